"""The replacement of a removed residual block: a module that returns its input, or norms of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparsebit.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(nn.Module().__dict__)


class SkippedBlock(nn.Identity):
    """Returns its first tensor argument and ignores all others.

    `norms`: names of parts of the block that stay: if norms follow the additions of a block, its input passes them one
    after the other. Plain attributes of the replaced block (a stride, the name of an attention type) stay, since code
    outside may read them.
    """

    def __init__(self, block: nn.Module, norms: Sequence[str] = ()) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if name not in _OF_MODULES}
        vars(self).update({name: value for name, value in plain.items() if isinstance(value, _PLAIN)})
        self.training = block.training
        self.norms_behind = tuple(norms)
        for path in norms:
            above: nn.Module = self
            *parents, own = path.split(".")
            for name in parents:  # empty modules, so that parameters keep their names
                above._modules.setdefault(name, nn.Module())
                above = above.get_submodule(name)
            above.add_module(own, block.get_submodule(path))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The first tensor of the call, passed through the norms."""
        found = first_tensor(args, kwargs)
        assert found is not None, "a block of the model is called without a tensor"
        for path in self.norms_behind:
            found = self.get_submodule(path)(found)
        return found


def first_tensor(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first argument that is a tensor, positional ones first."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def skip_blocks(model: nn.Module, names: Iterable[str], norms: Mapping[str, Sequence[str]]) -> None:
    """Replace these modules, in place. `norms`: which norms of a block stay, by its name."""
    blocks = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in blocks:
            raise CheckpointError(f"the plan was made for another model: this one has no block {name}")
        model.set_submodule(name, SkippedBlock(blocks[name], norms.get(name, ())))
