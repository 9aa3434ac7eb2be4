"""State that a forward leaves in a model: tensors in plain attributes, computed once and kept for the next run.

A cached value has the widths and the weights of the run that computed it. Masking or removing weights makes it stale,
so it is removed, and the next forward computes it again.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sparsebit.graph.state.state import tensors_inside

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def forget_run_state(model: nn.Module, fresh: nn.Module) -> None:
    """Set attributes of `model` that hold tensors back to what they are in `fresh`, which was never run.

    `fresh`: a model of the same structure. Attributes that hold tensors there too do not come from a run, and stay.
    """
    originals = dict(fresh.named_modules())
    for path, module in model.named_modules():
        if path not in originals:
            continue
        before = vars(originals[path])
        held = [name for name, value in vars(module).items() if name not in _REGISTRIES and _holds_tensor(value)]
        for name in held:
            if name not in before:
                del vars(module)[name]
            elif not _holds_tensor(before[name]):
                vars(module)[name] = copy.deepcopy(before[name])


def _holds_tensor(value: Any) -> bool:
    return any(True for _ in tensors_inside(value))
