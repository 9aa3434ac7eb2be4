"""Capture + W8A8 calibration + forward of many architectures with random weights.

    python benchmarks/zoo.py [--only GLOB] [--json FILE]

Prints one JSON line per architecture: whether it was captured, the float forward's relative difference to the original,
the output SQNR of W8A8, the share of weighted layers quantized, and the modules that could not be traced.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit, sqnr_db
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

Build = Callable[[], tuple[nn.Module, Any]]

CONFIG = {
    "BACKEND": "virtual",
    "DEVICE": "cpu",
    "SCHEDULE": {"FUSE_BN": True},
    "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"BIT": 8}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"BIT": 8}},
}

TIMM = {
    # name: image size
    "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64, "wide_resnet50_2": 64, "seresnet50": 64,
    "resnetv2_50x1_bit": 64,
    "densenet121": 64, "inception_v3": 96, "xception41": 96, "mobilenetv2_100": 64, "mobilenetv3_small_100": 64,
    "efficientnet_b0": 64, "tf_efficientnet_b0": 64, "efficientnet_lite0": 64, "mnasnet_100": 64, "ghostnet_100": 64,
    "regnetx_002": 64, "regnety_002": 64, "rexnet_100": 64, "dla34": 64, "hrnet_w18_small": 64, "res2net50_26w_4s": 64,
    "skresnet18": 64, "cspresnet50": 64, "cspdarknet53": 64, "repvgg_a0": 64, "nf_resnet50": 64, "dm_nfnet_f0": 64,
    "vgg11_bn": 64, "convnext_atto": 64, "convnextv2_atto": 64, "swin_tiny_patch4_window7_224": 224,
    "vit_tiny_patch16_224": 224, "deit_tiny_patch16_224": 224, "cait_xxs24_224": 224, "mixer_s32_224": 224,
    "poolformer_s12": 64, "levit_128s": 224, "maxvit_nano_rw_256": 256, "coatnet_nano_rw_224": 224, "mobilevit_xxs": 64,
    "efficientformer_l1": 224, "edgenext_xx_small": 64, "pvt_v2_b0": 64, "twins_pcpvt_small": 224,
    "visformer_tiny": 224,
    "crossvit_tiny_240": 240, "beit_base_patch16_224": 224, "xcit_nano_12_p16_224": 224, "fastvit_t8": 64,
    "gmlp_s16_224": 224, "resmlp_12_224": 224,
}  # fmt: skip
TORCHVISION = {
    "alexnet": 64, "squeezenet1_1": 64, "shufflenet_v2_x0_5": 64, "googlenet": 64, "mobilenet_v3_large": 64,
    "efficientnet_v2_s": 64, "vit_b_32": 224, "swin_t": 64, "maxvit_t": 224,
}  # fmt: skip


def timm_model(name: str, size: int) -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model(name, pretrained=False), torch.randn(2, 3, size, size)


def torchvision_model(name: str, size: int) -> tuple[nn.Module, Any]:
    from torchvision import models

    extra = {"init_weights": True, "aux_logits": True} if name == "googlenet" else {}
    return models.get_model(name, weights=None, **extra), torch.randn(2, 3, size, size)


def segmentation(name: str) -> tuple[nn.Module, Any]:
    from torchvision.models import segmentation as zoo

    return getattr(zoo, name)(weights=None, weights_backbone=None, num_classes=5), torch.randn(2, 3, 64, 64)


def fcos_head() -> tuple[nn.Module, Any]:
    """A detector's body: backbone, pyramid, and heads that are shared by all levels."""
    from torchvision.models import resnet18
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.detection.fcos import FCOSHead

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
            self.backbone = BackboneWithFPN(resnet18(weights=None), layers, [128, 256, 512], 64)
            self.head = FCOSHead(64, 1, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return self.head(list(self.backbone(x).values()))

    return Detector(), torch.randn(1, 3, 64, 64)


def video() -> tuple[nn.Module, Any]:
    from torchvision.models.video import r3d_18

    return r3d_18(weights=None), torch.randn(1, 3, 4, 32, 32)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge, self.head = self._block(2 * width, width), nn.Conv2d(width, 4, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down1(x)
        deep = self.up(self.down2(self.pool(skip)))
        return self.head(self.merge(torch.cat([skip, deep], dim=1)))


class AudioNet(nn.Module):
    """Conv1d stack with a GRU on top, as keyword spotters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 80, 4), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(), nn.AvgPool1d(4),
        )  # fmt: skip
        self.gru, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.body(x).transpose(1, 2))
        return self.head(states[:, -1])


def hugging_face(kind: str) -> tuple[nn.Module, Any]:
    import transformers as hf

    ids = torch.randint(5, 90, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    if kind == "bert":
        return hf.BertModel(hf.BertConfig(**small)), {"input_ids": ids, "attention_mask": mask}
    if kind == "roberta":
        return hf.RobertaModel(hf.RobertaConfig(**small, pad_token_id=1)), {"input_ids": ids, "attention_mask": mask}
    if kind == "distilbert":
        config = hf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99)
        return hf.DistilBertForSequenceClassification(config), {"input_ids": ids, "attention_mask": mask}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)), {
            "input_ids": ids,
            "use_cache": False,
        }
    if kind == "t5-encoder":
        config = hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99)
        return hf.T5EncoderModel(config), {"input_ids": ids, "attention_mask": mask}
    if kind == "whisper-encoder":
        config = hf.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=32,
        )
        return hf.models.whisper.modeling_whisper.WhisperEncoder(config), {"input_features": torch.randn(1, 16, 64)}
    if kind == "vit":
        config = hf.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=32, patch_size=8)
        return hf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=2)), {
            "input_ids": ids,
            "attention_mask": mask,
            "use_cache": False,
        }
    if kind == "wav2vec2":
        config = hf.Wav2Vec2Config(
            **small,
            conv_dim=(16, 16),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
        )
        return hf.Wav2Vec2Model(config), {"input_values": torch.randn(1, 800)}
    raise ValueError(kind)


def transformer() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)), torch.randn(
        2, 7, 32
    )


ZOO: dict[str, Build] = {
    **{f"timm/{name}": (lambda n=name, s=size: timm_model(n, s)) for name, size in TIMM.items()},
    **{f"torchvision/{name}": (lambda n=name, s=size: torchvision_model(n, s)) for name, size in TORCHVISION.items()},
    "torchvision/fcn_resnet50": lambda: segmentation("fcn_resnet50"),
    "torchvision/deeplabv3_mobilenet": lambda: segmentation("deeplabv3_mobilenet_v3_large"),
    "torchvision/lraspp": lambda: segmentation("lraspp_mobilenet_v3_large"),
    "torchvision/fcos_body": fcos_head,
    "torchvision/r3d_18": video,
    "plain/unet": lambda: (UNet(), torch.randn(2, 3, 32, 32)),
    "plain/audio": lambda: (AudioNet(), torch.randn(2, 1, 2000)),
    "plain/transformer": transformer,
    **{f"transformers/{kind}": (lambda kind=kind: hugging_face(kind)) for kind in
       ("bert", "roberta", "distilbert", "gpt2", "t5-encoder", "whisper-encoder", "vit", "llama", "wav2vec2")},
}  # fmt: skip


def examine(name: str, build: Build) -> dict[str, Any]:
    import sparsebit

    torch.manual_seed(0)
    model, batch = build()
    model.eval()
    _spread(model)
    start = time.perf_counter()
    qmodel = sparsebit.quantize(model, [batch], CONFIG)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        expected, quantized = _outputs(model, batch), _outputs(qmodel, batch)
        qmodel.set_quant(w_quant=False, a_quant=False)
        plain = _outputs(qmodel, batch)
    coverage = qmodel.coverage
    difference = _difference(expected, plain)
    exact = difference <= 1e-5
    # Folding changes the order of roundings: then float64 is the judge of who is nearer.
    reference = expected if exact else _outputs(copy.deepcopy(model).double(), _double(batch))
    distances = {"original": _difference(reference, expected), "captured": _difference(reference, plain)}
    return {
        "model": name,
        "ok": exact or distances["captured"] <= 1.5 * distances["original"],
        "float_difference": difference,
        "distance_to_float64": None if exact else distances,
        "sqnr_db": round(
            sqnr_db(torch.cat([e.flatten() for e in expected]), torch.cat([q.flatten() for q in quantized])), 1
        ),
        "weighted_quantized": f"{coverage.num_weighted_quantized}/{coverage.num_weighted}",
        "layers_quantized": len(coverage.quantized),
        "untraced": [
            f"{m.path or '(model)'}: {m.reason[:100]} @ {m.line.rsplit('/', 1)[-1][:90]}" for m in coverage.opaque
        ],
        "unknown_ops": sorted(
            {f.reason.split(":")[0] for f in coverage.float_layers if f.reason.startswith("unknown op")}
        ),
        "seconds": round(seconds, 1),
    }


def _spread(model: nn.Module) -> None:
    """Batch-norm statistics and layer scales as if trained: fresh ones hide errors behind ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    for parameter in model.parameters():
        if not parameter.detach().any():
            torch.nn.init.normal_(parameter, 0, 0.02, generator=generator)


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _double(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="glob on the names")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    torchvision_shim.install()
    failed = 0
    for name, build in ZOO.items():
        if not fnmatch.fnmatch(name, options.only):
            continue
        try:
            record = examine(name, build)
        except Exception as error:  # a failure is a result here
            record = {
                "model": name,
                "ok": False,
                "error": "".join(traceback.format_exception_only(error)).strip(),
                "where": traceback.format_exc()[-700:],
            }
        failed += not record["ok"]
        emit({"benchmark": "zoo", **record}, options.json)
    print(f"{failed} failed", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
