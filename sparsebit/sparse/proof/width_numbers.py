"""Numbers that a model's code computes from sizes of tensors: the smaller model must compute with the same ones.

Equal outputs do not show it where another argument switches the number's effect off:
`h * torch.tensor([1.0, h.shape[1] ** -0.5])[kind]`, `h * h.shape[1] ** p` with `p=0`, `h / sorted([h.shape[1], n])[0]`.
While `NumbersOfSizes` is open, a size that the user's code reads is a `_Size`: an int that stays one in the arithmetic
of sizes (`c // 4`), and that is noted where it becomes a number (a fraction, a power, an operand of a tensor) or is
compared other than in a condition. Conditions are the matter of `code_forks.py`.
"""

from __future__ import annotations

import dis
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsebit.sparse.proof.code_forks import FORK
from sparsebit.sparse.proof.width_reads import SIZING

_TORCH = os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STDLIB, _PACKAGES = sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep
_READS: tuple[Any, ...] = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]
# With these a size selects or moves elements, or is a number of groups.
_MOVING = frozenset((
    "__getitem__", "select", "index_select", "roll", "tensor_split", "as_strided", "unflatten", "eye", "randperm",
    "empty_strided", "group_norm", "layer_norm", "rms_norm", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "fold", "interpolate",
    "multi_head_attention_forward",
))  # fmt: skip


def is_library(filename: str) -> bool:
    """Whether code is torch's, Sparsebit's or Python's: its branches and numbers are not the user's."""
    is_python = filename.startswith(_STDLIB) and not filename.startswith(_PACKAGES)
    return filename.startswith(("<frozen", _HERE, _TORCH)) or is_python


class NumbersOfSizes(TorchFunctionMode):
    """Collects the numbers of sizes that are used while it is open, by the line of code.

    `model`: a copy to run; the integers in its modules' attributes become `_Size`, since some follow the channels.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                vars(module).update(
                    {name: _Size.of(value, self) for name, value in vars(module).items() if type(value) is int}
                )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name, frame = function.__name__, sys._getframe(1)
        own = (name, "handle_torch_function", "wrapped")  # of functions of torch that are written in Python
        while frame.f_back and frame.f_code.co_name in own and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if is_library(frame.f_code.co_filename):
            return result
        if function in _READS:
            marked = self._marked(result)
            if function is Tensor.__len__:
                marked.note(frame)  # Python makes a plain number of it
            return marked
        if name not in SIZING and name not in _MOVING:
            for size in _sizes_in(args[2:] if name == "__setitem__" else (args, kwargs)):
                size.note(frame)
        return result

    def _marked(self, result: Any) -> Any:
        if isinstance(result, int):
            return _Size.of(result, self)
        return torch.Size([_Size.of(size, self) for size in result])

    def differs_from(self, other: NumbersOfSizes) -> str | None:
        """The first line of code that computed with other numbers in the other run; None if there is none.

        A line may run in one of them alone: layers whose weights are computed become plain ones.
        """
        both = self.found.keys() & other.found.keys()
        return next(
            (place for place in self.found if place in both and set(self.found[place]) != set(other.found[place])), None
        )


def _sizes_in(value: Any) -> Iterator[_Size]:
    if isinstance(value, _Size):
        yield value
    elif isinstance(value, Mapping):
        yield from _sizes_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _sizes_in(item)


class _Size(int):
    """A size of a tensor. `origin`: where its uses are noted."""

    origin: NumbersOfSizes

    @classmethod
    def of(cls, value: int, origin: NumbersOfSizes) -> _Size:
        size = cls(value)
        size.origin = origin
        return size

    def note(self, frame: FrameType) -> list[int]:
        """Note that the user's code uses the size as a number, and return the notes of that line."""
        if is_library(frame.f_code.co_filename):
            return []
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        notes = self.origin.found.setdefault(place, [])
        notes.append(int.__int__(self))
        return notes

    def __float__(self) -> float:
        self.note(sys._getframe(1))
        return int.__float__(self)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        self.note(sys._getframe(1))
        plain = [int.__int__(one) if isinstance(one, _Size) else one for one in given]
        return getattr(function, method)(*plain, **options)

    def __hash__(self) -> int:
        """A table may hold another value for each size."""
        self._note_choice(sys._getframe(1))
        return int.__hash__(self)

    def _note_choice(self, frame: FrameType) -> None:
        if frame.f_lasti not in _conditions(frame.f_code):
            self.note(frame)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class _Fraction(float):
    """A number that a size has become. Rounded at once, it is a size again: `int(c / 2)`."""

    notes: list[int]

    def _rounded(self, convert: Callable[..., int], *given: Any) -> Any:
        if self.notes and not given:
            self.notes.pop()
        return convert(float(self), *given)

    def __int__(self) -> int:
        return self._rounded(int)  # type: ignore[no-any-return]

    def __trunc__(self) -> int:
        return self._rounded(int)  # type: ignore[no-any-return]

    def __round__(self, *given: Any) -> Any:
        return self._rounded(round, *given)

    def __floor__(self) -> int:
        return self._rounded(float.__floor__)  # type: ignore[no-any-return]

    def __ceil__(self) -> int:
        return self._rounded(float.__ceil__)  # type: ignore[no-any-return]


def _arithmetic(name: str) -> Callable[..., Any]:
    def compute(self: _Size, *others: Any) -> Any:
        result = getattr(int, name)(self, *others)
        if result is NotImplemented and others and isinstance(others[0], float):
            result = getattr(float, name)(int.__float__(self), *others)
        if result is NotImplemented:
            return result
        # A power of a width is no size any more, even if it is a whole number.
        if isinstance(result, int) and "pow" not in name:
            return _Size.of(result, self.origin)
        if not isinstance(result, float):
            self.note(sys._getframe(1))
            return result
        fraction = _Fraction(result)
        fraction.notes = self.note(sys._getframe(1))
        return fraction

    return compute


def _comparison(name: str) -> Callable[[_Size, Any], Any]:
    def compare(self: _Size, other: Any) -> Any:
        self._note_choice(sys._getframe(1))
        return getattr(int, name)(self, other)

    return compare


for _name in (
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "truediv",
    "pow",
    "divmod",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
):
    setattr(_Size, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(_Size, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in ("neg", "pos", "abs"):
    setattr(_Size, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Size, f"__{_name}__", _comparison(f"__{_name}__"))


@lru_cache(maxsize=4096)
def _conditions(code: CodeType) -> frozenset[int]:
    """The offsets of comparisons whose result only decides a branch, which `code_forks` runs both ways."""
    found = set()
    # Which of these instructions stand between a comparison and its jump depends on the version of Python.
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("PRECALL", "CACHE", "TO_BOOL")]
    for one, following in itertools.pairwise(instructions):
        if one.opname not in ("COMPARE_OP", "CONTAINS_OP"):
            continue
        is_jump = "JUMP" in following.opname or following.opname in ("UNARY_NOT", "COPY")
        # The call that a fork adds around a condition has the condition's own position.
        is_fork = following.opname.startswith("CALL") and following.positions == one.positions and FORK in code.co_names
        if is_jump or is_fork:
            found.add(one.offset)
    return frozenset(found)
