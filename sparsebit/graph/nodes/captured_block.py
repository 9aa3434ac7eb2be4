"""`CapturedBlock`: replaces, in a graph, a block whose forward was traced."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, fx, nn

from sparsebit.errors import CaptureError


class OfSource(nn.Module):
    """A module of a graph whose plain attributes are those of the module that was traced (`_traced`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are set on the traced module, whose code reads them; the graph holds plain values as constants."""
        traced: tuple[nn.Module, list[str]] | None = self.__dict__.get(_TRACED)
        is_own = (
            name in GRAPH_MODULE_NAMES
            or isinstance(value, nn.Module)
            or (name in self.__dict__ and not _shows(traced, name))
        )
        if traced is None or is_own or name in (*self._parameters, *self._buffers, *self._modules):
            super().__setattr__(name, value)
            return
        module, new_names = traced
        is_method = name not in vars(module) and callable(getattr(module, name, None))
        is_new = is_method or not hasattr(module, name)
        if is_new and isinstance(value, Tensor):
            super().__setattr__(name, value)
            return
        new_names += [name] if is_new else []
        setattr(module, name, value)
        if not isinstance(value, Tensor):
            self.__dict__[name] = value


def _shows(traced: tuple[nn.Module, list[str]] | None, name: str) -> bool:
    return traced is not None and hasattr(traced[0], name)


def show_attributes_of(module: nn.Module, traced: nn.Module, new_names: list[str]) -> None:
    """From now on `module` also has the plain attributes of `traced`. `new_names` collects attributes that are set and
    that `traced` did not have.
    """
    # As values: a `__getattr__` would cost a compiled model a guard for each attribute that it reads.
    for name, value in vars(traced).items():
        if not (hasattr(module, name) or isinstance(value, (nn.Module, Tensor)) or callable(value)):
            module.__dict__[name] = value
    module.__dict__[_TRACED] = (traced, new_names)  # in a tuple: it is not a child


_TRACED = "_traced"
# What a GraphModule has itself: its class, and torch.fx on each instance (`_graph`, `meta`).
GRAPH_MODULE_NAMES = frozenset(dir(fx.GraphModule({}, fx.Graph())))


class CapturedBlock(OfSource):
    """Holds a block's layers, parameters and buffers under the block's name. The graph calls the layers directly.

    A hook on it would never fire, and a call would have no code to run: both raise an error.
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
