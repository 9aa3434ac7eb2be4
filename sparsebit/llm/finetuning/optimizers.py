"""The optimizers of adapters: AdamW of torch, or with 8-bit states of bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sparsebit.errors import ConfigError, import_problem

# By name, the classes of bitsandbytes; AdamW of torch has none.
OPTIMIZERS: dict[str, str | None] = {
    "adamw": None,
    "adamw8bit": "AdamW8bit",
    "paged_adamw8bit": "PagedAdamW8bit",
}


def resolve_optimizer(name: str, device: torch.device) -> str:
    """The name that "auto" selects: the paged 8-bit one on a GPU if bitsandbytes is installed."""
    if name == "auto":
        return "paged_adamw8bit" if device.type == "cuda" and find_spec("bitsandbytes") is not None else "adamw"
    if OPTIMIZERS[name] is not None and device.type != "cuda":
        raise ConfigError(f"optimizer={name!r} on {device}: bitsandbytes runs on GPUs; use 'adamw'")
    return name


def make_optimizer(
    name: str, parameters: Sequence[nn.Parameter], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """`name`: one of `OPTIMIZERS`."""
    of_bitsandbytes = OPTIMIZERS[name]
    if of_bitsandbytes is None:
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    try:
        import bitsandbytes
    except Exception:  # a broken package raises anything
        raise ConfigError(
            f"optimizer={name!r} needs the package 'bitsandbytes', which {import_problem('bitsandbytes')} pip install "
            "bitsandbytes, or use 'adamw'"
        ) from None
    made: Any = getattr(bitsandbytes.optim, of_bitsandbytes)
    found: torch.optim.Optimizer = made(parameters, lr=learning_rate, weight_decay=weight_decay)
    return found
