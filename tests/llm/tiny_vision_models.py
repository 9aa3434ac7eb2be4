"""Small random models that read images, and batches as their processors make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IMAGE = 90  # the token that images replace
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "window_size": 16, "fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
# The settings of each type: of the text, of the tower, of the model; how many tokens an image has.
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        _QWEN,
        {"image_token_id": IMAGE, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93},
        4,
    ),
    "llava": (
        {"model_type": "llama"},
        {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        {"image_token_index": IMAGE},
        16,
    ),
    "gemma3": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_index": IMAGE, "mm_tokens_per_image": 4, "boi_token_index": 91, "eoi_token_index": 92},
        4,
    ),
    "smolvlm": ({"model_type": "llama"}, _TOWER, {"image_token_id": IMAGE, "scale_factor": 2}, 4),
    "idefics3": ({"model_type": "llama"}, _TOWER, {"image_token_id": IMAGE, "scale_factor": 2}, 4),
}


def tiny_vision_model(model_type: str) -> Any:
    """A random model of the type in float32."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    text, tower, own, _ = TYPES[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, text_config={**TEXT, **text}, vision_config=tower, **own)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_processor(folder: Path) -> Path:
    """A processor of llava beside the model and its tokenizer of letters: `z` is the token of images."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    template = "{% for m in messages %}{% for c in m.content %}{{ 'z' if c.type == 'image' else c.text }}"
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token=chr(IMAGE + 32),
        num_additional_image_tokens=1,
        chat_template=template + "{% endfor %}{% endfor %}",
    ).save_pretrained(folder)
    return folder


def batches(model_type: str, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Text with an image, at another place in each batch, and text alone in the last."""
    num_tokens = TYPES[model_type][3]
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 88, (1, 24 + number), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if number + 1 < count:
            start = 2 + number
            ids[0, start - 1], ids[0, start : start + num_tokens] = 91, IMAGE
            pixels = torch.randn(1, 3, 16, 16, generator=generator)
            if model_type == "qwen2_5_vl":
                batch["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
                batch["image_grid_thw"] = torch.tensor([[1, 4, 4]])
                batch["mm_token_type_ids"] = (ids == IMAGE).int()
            elif model_type in ("smolvlm", "idefics3"):
                batch["pixel_values"] = pixels[None]
            else:
                batch["pixel_values"] = pixels
        if model_type == "gemma3":
            batch["token_type_ids"] = (ids == IMAGE).long()
        found.append(batch)
    return found
