"""`StandIn`: a module that replaces another one and answers `isinstance` as that one does."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Code that asks `isinstance(layer, nn.Linear)` gets the answer of the module that this one replaces."""

    def _stands_for(self) -> nn.Module | None:
        """That module; None where there is none (yet)."""
        raise NotImplementedError(f"{type(self).__name__} must define _stands_for()")

    @property
    def __class__(self) -> type:
        """What `isinstance` asks besides the real type, which `type()` gives.

        Torch itself gets the real type: its compiler looks for the forward there, `fully_shard` derives from it.
        """
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return type(self)
        module = self._stands_for()
        return type(self) if module is None else type(module)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Wrappers change a module's real type: `fully_shard` does."""
        vars(object)["__class__"].__set__(self, kind)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By the real type: pickle would take `__class__` for it."""
        return _blank, (type(self),), self.__dict__


def without_stand_ins(module: nn.Module) -> nn.Module:
    """The same module, with what stands in for a module below it replaced by that module."""
    for name, child in module._modules.items():
        while isinstance(child, StandIn) and (replaced := child._stands_for()) is not None:
            child = replaced
        if child is not None:
            module._modules[name] = without_stand_ins(child)
    return module


def _blank(kind: type[StandIn]) -> StandIn:
    return kind.__new__(kind)
