"""Modes and gradients of a model that are changed for a while: `evaluating`, `modes_kept`, `without_gradients`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from sparsebit.graph.nodes.graph_module import CapturedGraph


def all_modules(*roots: nn.Module) -> list[nn.Module]:
    """Every module of the roots, and of the modules that captured graphs in them were traced from."""
    found: dict[int, nn.Module] = {}
    waiting = list(roots)
    for root in waiting:
        for module in root.modules():
            if id(module) not in found:
                found[id(module)] = module
                waiting += [module.source] if isinstance(module, CapturedGraph) else []
    return list(found.values())


@contextlib.contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end of the block each of the modules is in its own mode again."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all of the model is in eval mode; afterwards each module is in its own mode again."""
    with modes_kept(all_modules(model)):
        model.eval()
        yield


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter requires a gradient."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
