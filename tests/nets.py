"""Small networks in few lines: their layers, and what they do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def with_layers(layers: Callable[[], dict[str, Any]]) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """A module's class from its `forward` and from what its `__init__` sets, made anew for each instance.

    ```python
    @with_layers(lambda: {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)})
    def Twice(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))
    ```
    """

    def made(forward: Callable[..., Any]) -> type[nn.Module]:
        def initialize(self: nn.Module) -> None:
            nn.Module.__init__(self)
            for name, value in layers().items():
                setattr(self, name, value)

        name, qualname = forward.__name__, forward.__qualname__
        forward.__name__, forward.__qualname__ = "forward", f"{qualname}.forward"
        forward.__code__ = forward.__code__.replace(co_name="forward")  # as tracebacks and messages name it
        members = {"__init__": initialize, "forward": forward, "__doc__": forward.__doc__}
        return type(name, (nn.Module,), {**members, "__module__": forward.__module__, "__qualname__": qualname})

    return made
