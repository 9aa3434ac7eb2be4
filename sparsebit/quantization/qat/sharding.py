"""Parameters spread over the ranks: `torch.distributed.fsdp.fully_shard` on a captured model.

`fully_shard` gathers a module's parameters when the module is called. In a graph the leaves are called and the blocks
they come from are not, so a block is sharded as the list of its leaves. Learned scales are a group of their own,
together with batch norms, whose running statistics are float32: they keep float32 whatever the weights compute in, are
gathered once per step, and stay whole until the backward is over, since several layers may read one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.config.selectors import near_names
from sparsebit.errors import CaptureError
from sparsebit.graph.capture import Captured
from sparsebit.quantization.quantizers.base import Quantizer

_FLOAT32 = (Quantizer, _BatchNorm)
# Settings that apply to these too; types and placements are for weights.
_SHARED_SETTINGS = ("mesh", "offload_policy")


def shard(
    root: nn.Module, model: nn.Module, captured: Captured, blocks: Iterable[str], settings: dict[str, Any]
) -> None:
    """`fully_shard` on the learned scales and batch norms, on each of the blocks, and on `root`.

    `model`: the captured model, inside `root`. `blocks`: names in the float model. `settings`: those of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    units = [block_modules(model, captured, name) for name in blocks]  # before any change, because names may be wrong
    small: list[nn.Module] = []
    small += (module for module in model.modules() if isinstance(module, _FLOAT32) and _has_parameters(module))
    if small:
        shared = {name: value for name, value in settings.items() if name in _SHARED_SETTINGS}
        fully_shard(small, reshard_after_forward=False, **shared)
    for modules in (*filter(None, units), [root]):
        for module in modules:
            module.register_forward_hook(_without_view)
        fully_shard(modules if len(modules) > 1 else modules[0], **settings)


def block_modules(model: nn.Module, captured: Captured, block: str) -> list[nn.Module]:
    """The modules with weights that the graph calls for the float model's module `block`, in order."""
    paths = dict.fromkeys(_called(model, captured, block))
    if not paths:
        known = [path for path, _ in model.named_modules() if path]
        raise CaptureError(
            f"shard(): the model has no block {block!r}; near names: {', '.join(near_names(block, known)) or 'none'}"
        )
    blocks = [model.get_submodule(path) for path in paths]
    own = [[part for part in module.modules() if not isinstance(part, _FLOAT32)] for module in blocks]
    return [module for module, parts in zip(blocks, own, strict=True) if any(map(_has_parameters, parts))]


def _called(model: nn.Module, captured: Captured, block: str) -> Iterator[str]:
    around = [path for path in captured.regions if path != block and _is_inside(block, path)]
    if around:
        path = max(around, key=len)
        prefix = f"{path}." if path else ""
        nodes = captured.regions[path].graph_module.graph.nodes
        targets = [f"{prefix}{node.target}" for node in nodes if node.op == "call_module"]
        inside = [target for target in targets if _is_inside(target, block)]
        if inside or not any(_is_inside(block, target) for target in targets):
            yield from inside
            return
    # No graph calls the block's layers: untraced code calls the block itself.
    if any(path == block for path, _ in model.named_modules()):
        yield block


def _without_view(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A linear's output of three dimensions is a view, on which the hooks of `fully_shard` would not be safe."""
    if isinstance(output, Tensor) and output.requires_grad and output._is_view():
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output


def _is_inside(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
