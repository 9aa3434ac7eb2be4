"""Whether a tensor is dense in memory, and whether it is a stack of parts; also for a compiler's symbolic sizes."""

from __future__ import annotations

from torch import Tensor


def is_dense(x: Tensor) -> bool:
    """Whether the tensor has no gaps in memory, whatever the order of its dimensions.

    Sizes may be a compiler's symbols, which are compared but not sorted.
    """
    left = [(step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    expected = 1
    while left:
        place = -1
        for index, (step, _) in enumerate(left):
            if step == expected:
                place = index
        if place < 0:
            return False
        expected = expected * left.pop(place)[1]
    return True


def stack_form(x: Tensor, dim: int) -> tuple[int, int] | None:
    """(rows, elements): in memory, `x` is rows that hold as many elements of each part, one part after the other.

    None for another tensor, for one of more than three parts, and if a compiler does not know their length.
    """
    num_parts, inner = x.shape[dim], x.stride(dim)
    if num_parts not in (2, 3) or not isinstance(inner, int) or not x.numel() or not is_dense(x):
        return None
    return x.numel() // (inner * num_parts), inner
