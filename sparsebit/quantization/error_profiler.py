"""Which layer loses what: each layer's output with and without quantization, on real data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.execution.batches import Call
from sparsebit.execution.value_store import SharedData
from sparsebit.graph.nested import map_nested
from sparsebit.progress import track
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.placement import split_site
from sparsebit.quantization.quantizers.base import Quantizer

Checker = Callable[[Tensor, Tensor], Any]


def profile_errors(model: nn.Module, calls: Iterable[Call], checker: Checker, *, is_async: bool) -> dict[str, float]:
    """`{layer: checker(quantized output, float output)}`, averaged over the batches.

    `is_async`: each layer quantized alone, on float inputs (one pass). Else all layers quantized together (two passes).
    """
    layers = quantized_layers(model)
    totals = dict.fromkeys(layers, 0.0)
    counts = dict.fromkeys(layers, 0)

    def note(name: str, quantized: Any, original: Any) -> None:
        if isinstance(quantized, Tensor) and isinstance(original, Tensor) and quantized.is_floating_point():
            totals[name] += float(checker(quantized, original))
            counts[name] += 1

    profile = _profile_alone if is_async else _profile_together
    with torch.no_grad(), _restored(model):
        for args, kwargs in track(calls, "error per layer"):
            profile(model, layers, args, kwargs, note)
    return {name: totals[name] / counts[name] for name in layers if counts[name]}


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with at least one calibrated quantizer, by name; a quantizer that stands alone, by its site's name."""
    found: dict[str, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, QuantOpr):
            sites = [q.name for q in _quantizers_of(module) if not q.fake_fused and q.is_calibrated]
            if sites:
                found[sites[0] if isinstance(module, QIdentity) else split_site(sites[0])[0]] = module
    return found


def _profile_alone(
    model: nn.Module, layers: dict[str, nn.Module], args: Any, kwargs: Any, note: Callable[..., None]
) -> None:
    _switch(model, False)
    names = {module: name for name, module in layers.items()}

    def compare(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        own = _quantizers_of(module)
        for quantizer in own:
            quantizer.use_quant = quantizer.is_calibrated
        note(names[module], module.forward(*inputs, **keywords), output)
        for quantizer in own:
            quantizer.use_quant = False

    with _hooked(layers.values(), compare):
        model(*args, **kwargs)


def _profile_together(
    model: nn.Module, layers: dict[str, nn.Module], args: Any, kwargs: Any, note: Callable[..., None]
) -> None:
    store = SharedData()
    names = {module: name for name, module in layers.items()}
    visits = dict.fromkeys(layers, 0)

    def keep(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        name = names[module]
        store.put((name, visits[name]), map_nested(Tensor, torch.clone, output))  # which others may write into
        visits[name] += 1

    def compare(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        name = names[module]
        if (name, visits[name]) in store:
            note(name, output, store.get((name, visits[name])))
            store.drop((name, visits[name]))
        visits[name] += 1

    for on, hook in ((False, keep), (True, compare)):
        _switch(model, on)
        visits.update(dict.fromkeys(layers, 0))
        with _hooked(layers.values(), hook):
            given, named = map_nested(Tensor, torch.clone, (args, kwargs))  # a model may write into its inputs
            model(*given, **named)


@contextlib.contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Whatever is switched inside is as before afterwards; the model runs in eval mode."""
    switches = {q: q.use_quant for q in model.modules() if isinstance(q, Quantizer)}
    training = model.training
    model.eval()
    try:
        yield
    finally:
        for quantizer, on in switches.items():
            quantizer.use_quant = on
        model.train(training)


def _switch(model: nn.Module, on: bool) -> None:
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.use_quant = on and module.is_calibrated


def _quantizers_of(module: nn.Module) -> list[Quantizer]:
    return [child for child in module.children() if isinstance(child, Quantizer)]
