"""The architectures of `zoo.py`: what builds each, with random weights, and one batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo_transformers
from torch import nn

Build = Callable[[], tuple[nn.Module, Any]]

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
    # of 2024 to 2026, and older ones of other kinds
    "csatv2": 256, "mobilevitv2_050": 64, "starnet_s1": 64, "rdnet_tiny": 64, "swiftformer_xs": 64, "shvit_s1": 64,
    "mambaout_femto": 64, "hgnetv2_b0": 64, "repvit_m0_9": 64, "tiny_vit_5m_224": 224, "efficientvit_b0": 64,
    "efficientvit_m0": 224, "hiera_tiny_224": 224, "inception_next_atto": 64, "mobilenetv4_conv_small": 64,
    "mobilenetv4_hybrid_medium": 64, "nextvit_small": 64, "sequencer2d_s": 64, "fasternet_t0": 64, "ghostnetv3_050": 64,
    "focalnet_tiny_srf": 64, "davit_tiny": 64, "gcvit_xxtiny": 224, "efficientformerv2_s0": 224, "efficientvim_m1": 224,
    "iformer_t": 224, "lowformer_b0": 64, "cpubone_nano": 64, "lcnetv2_small": 64, "hieradet_small": 64,
}  # fmt: skip
# Vision transformers of two blocks, where the smallest published one is large.
TIMM_SHORT = {
    "gemma4_vit_167m": 96, "qwen3_vit_88m": 64, "vit_small_patch16_dinov3": 64, "naflexvit_base_patch16_gap": 64,
    "eva02_tiny_patch14_224": 56, "vit_pe_core_tiny_patch16_384": 64, "beit3_base_patch16_224": 64,
    "flexivit_small": 64,
}  # fmt: skip
TORCHVISION = {
    "alexnet": 64, "squeezenet1_1": 64, "shufflenet_v2_x0_5": 64, "googlenet": 64, "mobilenet_v3_large": 64,
    "efficientnet_v2_s": 64, "vit_b_32": 224, "swin_t": 64, "maxvit_t": 224,
}  # fmt: skip


def timm_model(name: str, size: int) -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model(name, pretrained=False), torch.randn(2, 3, size, size)


def short_timm_model(name: str, size: int) -> tuple[nn.Module, Any]:
    import timm

    has_fixed_size = name.startswith(("eva02", "vit_pe", "beit3", "flexivit"))
    extra = {"img_size": size} if has_fixed_size else {}
    return timm.create_model(name, pretrained=False, depth=2, **extra), torch.randn(2, 3, size, size)


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


def transformer() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)), torch.randn(
        2, 7, 32
    )


ZOO: dict[str, Build] = {
    **{f"timm/{name}": (lambda n=name, s=size: timm_model(n, s)) for name, size in TIMM.items()},
    **{f"timm/{name}": (lambda n=name, s=size: short_timm_model(n, s)) for name, size in TIMM_SHORT.items()},
    **{f"torchvision/{name}": (lambda n=name, s=size: torchvision_model(n, s)) for name, size in TORCHVISION.items()},
    "torchvision/fcn_resnet50": lambda: segmentation("fcn_resnet50"),
    "torchvision/deeplabv3_mobilenet": lambda: segmentation("deeplabv3_mobilenet_v3_large"),
    "torchvision/lraspp": lambda: segmentation("lraspp_mobilenet_v3_large"),
    "torchvision/fcos_body": fcos_head,
    "torchvision/r3d_18": video,
    "plain/unet": lambda: (UNet(), torch.randn(2, 3, 32, 32)),
    "plain/audio": lambda: (AudioNet(), torch.randn(2, 1, 2000)),
    "plain/transformer": transformer,
    **{f"transformers/{kind}": (lambda k=kind: zoo_transformers.build(k)) for kind in zoo_transformers.KINDS},
}  # fmt: skip
