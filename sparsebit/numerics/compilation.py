"""What torch's compilers are doing."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether `torch.export` traces this. `torch.compiler.is_exporting()` of torch 2.11 says so of every compiler."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))
