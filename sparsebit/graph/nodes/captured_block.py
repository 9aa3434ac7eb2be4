"""`CapturedBlock`: holds, in a graph module, the layers of a block whose forward was traced through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from sparsebit.errors import CaptureError


class OfSource(nn.Module):
    """A module of a graph that has the plain attributes of the module that was traced (`_traced`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes on the traced module, whose code reads them.

        The graph itself holds plain values as constants; `FrozenValues` notices the change.
        """
        module, new_names = self.__dict__.get(_TRACED, (None, []))
        is_own = module is None or name in GRAPH_MODULE_NAMES or isinstance(value, nn.Module)
        is_own = is_own or (name in self.__dict__ and not hasattr(module, name))
        is_own = is_own or name in (*self._parameters, *self._buffers, *self._modules)
        is_new = not is_own and (_is_method(module, name) or not hasattr(module, name))
        if is_own or (is_new and isinstance(value, Tensor)):
            super().__setattr__(name, value)
            return
        new_names += [name] if is_new else []
        setattr(module, name, value)
        if not isinstance(value, Tensor):
            self.__dict__[name] = value


def _is_method(module: nn.Module, name: str) -> bool:
    return name not in vars(module) and callable(getattr(module, name, None))


def show_attributes_of(module: nn.Module, traced: nn.Module, new_names: list[str]) -> None:
    """Give `module` the plain attributes of `traced`. `new_names` collects names that are set later and are new."""
    # Copied as values, because a `__getattr__` would cost a compiled model a guard for each attribute that it reads.
    for name, value in vars(traced).items():
        if not (hasattr(module, name) or isinstance(value, (nn.Module, Tensor)) or callable(value)):
            module.__dict__[name] = value
    module.__dict__[_TRACED] = (traced, new_names)  # in a tuple: it is not a child


_TRACED = "_traced"
# Names that every GraphModule has: those of its class, and those that torch.fx sets on instances (`_graph`, `meta`).
GRAPH_MODULE_NAMES = frozenset(dir(fx.GraphModule({}, fx.Graph())))


class CapturedBlock(OfSource):
    """Holds a block's layers, parameters and buffers under the block's name. The graph calls the layers directly.

    A hook on it would never run, and a call of it has no code to run: both raise an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"{_place(self)}: the block cannot be called by itself. It was captured as part of a graph, which calls "
            "the layers of the block directly. Call the whole model, or a layer of the block"
        )


_PATH = "_captured_path"


def _place(block: nn.Module) -> str:
    return str(block.__dict__.get(_PATH, "a block"))


def _refusing(method: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse_hook(f"{_place(self)}.{method}")


for _method in ("forward", "forward_pre", "full_backward", "full_backward_pre", "backward"):
    setattr(CapturedBlock, f"register_{_method}_hook", _refusing(f"register_{_method}_hook"))


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
