"""`CapturedBlock`: what a graph holds instead of a block that it was traced through."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from sparsebit.errors import CaptureError


class CapturedBlock(nn.Module):
    """Holds a block's layers, parameters and buffers under the block's name. The graph calls the layers directly.

    A hook on it would never fire, and it has no code that a call could run: both are refused.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"{self._place}: the block cannot be called by itself. It was captured as part of a graph, which calls the "
            "layers of the block directly. Call the whole model, or a layer of the block"
        )

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_forward_hook")

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_forward_pre_hook")

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_full_backward_hook")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_full_backward_pre_hook")

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_backward_hook")

    @property
    def _place(self) -> str:
        return str(self.__dict__.get(_PATH, "a block"))

    def _refuse(self, method: str) -> NoReturn:
        refuse_hook(f"{self._place}.{method}")


_PATH = "_captured_path"


def mark_block(module: nn.Module, path: str) -> None:
    """Make the plain `nn.Module` that torch.fx put at `path` a CapturedBlock, in place."""
    module.__class__ = CapturedBlock
    module.__dict__[_PATH] = path


def refuse_hook(where: str) -> NoReturn:
    raise CaptureError(
        f"{where}: the hook would never run. The block was captured as part of a graph, which calls the layers of the "
        "block directly. Register the hook on the float model before the QuantModel is built (the block then keeps its "
        "own code), or register it on a layer of the block"
    )
