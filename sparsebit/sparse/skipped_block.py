"""What a residual block becomes when it is removed: a module without parameters that gives its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from sparsebit.errors import CheckpointError

_OF_MODULES = frozenset(nn.Module().__dict__)


class SkippedBlock(nn.Identity):
    """Gives its first tensor, whatever else a block was called with.

    Plain attributes of the block that it replaces (a stride, a name of a kind of attention) stay, since code around may
    read them.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        kept = {name: value for name, value in block.__dict__.items() if _is_plain(value)}
        self.__dict__.update({name: value for name, value in kept.items() if name not in _OF_MODULES})
        self.training = block.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The first tensor of the call."""
        found = first_tensor(args, kwargs)
        assert found is not None, "a block of the model is called without a tensor"
        return found


def first_tensor(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first argument that is a tensor, positional ones first."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def skip_blocks(model: nn.Module, names: Iterable[str]) -> None:
    """Replace these modules, in place."""
    for name in names:
        above, _, own = name.rpartition(".")
        try:
            block = model.get_submodule(name)
        except AttributeError:
            raise CheckpointError(f"the plan was made for another model: this one has no block {name}") from None
        setattr(model.get_submodule(above), own, SkippedBlock(block))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
