"""`StandIn`: a module that replaces another one, and has its class in `isinstance` and its attributes."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class StandIn(nn.Module):
    """`isinstance(layer, nn.Linear)` has the same result as for the replaced module.

    Attributes that this module lacks are read from it.
    """

    def _replaced_module(self) -> nn.Module | None:
        """The module that this one replaces; None while there is none. Must not read an attribute that is missing."""
        raise NotImplementedError(f"{type(self).__name__} must define _replaced_module()")

    @property
    def __class__(self) -> type:
        """The replaced module's class, which `isinstance` also tests; `type()` still returns the real type.

        Torch itself sees the real type: its compiler looks for the forward there, and `fully_shard` derives from it.
        """
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return type(self)
        module = self._replaced_module()
        return type(self) if module is None else type(module)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Change the real type, as `fully_shard` does."""
        vars(object)["__class__"].__set__(self, kind)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._replaced_module()
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the real type; by default pickle uses `__class__`, which is another one here."""
        return object.__new__, (type(self),), self.__dict__


def replaced_by(module: nn.Module) -> nn.Module:
    """The module that a stand-in replaces; any other module itself."""
    while isinstance(module, StandIn) and (replaced := module._replaced_module()) is not None:
        module = replaced
    return module


def without_stand_ins(module: nn.Module) -> nn.Module:
    """The same module, in place, with each stand-in below it replaced by its module."""
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = without_stand_ins(replaced_by(child))
    return module
