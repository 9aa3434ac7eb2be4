"""Scenes that reach layers which the example does not call: other items of a list, and what an argument switches on.

A layer of `self.layers[i](x)` for another `i` reads or makes the same channels as the one that the example calls.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from sparsebit.execution.batches import Call
from sparsebit.graph.values.nested import tensors_of
from sparsebit.sparse.proof.scenes import Scene

_MOST = 16  # scenes; each is a few runs


def scenes_of_uncalled(model: nn.Module, call: Call, scenes: Sequence[Scene]) -> list[Scene]:
    """The scenes in which the model runs and calls layers that neither the example nor one of `scenes` calls."""
    example = Scene("", call)
    trials = [one.trial(model) for one in (example, *scenes)]
    called = set[str]().union(*(trial.called for trial in trials if trial is not None))
    layers = {path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    if layers <= called:
        return []
    found = []
    for scene in itertools.islice((*_swaps(model, example, called), *_switched_on(model, example)), _MOST):
        trial = scene.trial(model)
        if trial is not None and not called.issuperset(trial.called & layers):
            called |= trial.called
            found.append(scene)
    return found


def _swaps(model: nn.Module, example: Scene, called: set[str]) -> Iterator[Scene]:
    """An uncalled item of a list takes the place of a called one of the same class."""
    for path, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
            continue
        names = {key: f"{path}.{key}".lstrip(".") for key in container._modules}
        known = [key for key, name in names.items() if name in called]
        for key in [key for key in names if key not in known]:
            same = [one for one in known if type(container._modules[one]) is type(container._modules[key])]
            if same:
                yield replace(example, name=f"with {names[key]} for {names[same[0]]}", swap=(path, same[0], key))


def _switched_on(model: nn.Module, example: Scene) -> Iterator[Scene]:
    """An argument that is None in the example gets a tensor: each of the example's shapes and dtypes in turn."""
    signature = inspect.signature(model.forward)
    bound = signature.bind(*example.call[0], **example.call[1])
    bound.apply_defaults()
    for name in [name for name, value in bound.arguments.items() if value is None]:
        for tensor in {(x.shape, x.dtype): x for x in tensors_of(example.call)}.values():
            given = inspect.BoundArguments(signature, {**bound.arguments, name: tensor})
            yield replace(example, name=f"with {name}", call=(given.args, given.kwargs))
