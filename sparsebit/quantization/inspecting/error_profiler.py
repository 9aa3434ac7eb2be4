"""`profile`: the error of each layer's output and of each quantized tensor, on real data.

A layer's error compares its output with and without quantization. "Alone" (`_profile_alone`): one float pass, in which
each layer runs a second time with its own quantizers on, so all inputs are float. "Together" (`_profile_together`): a
float pass keeps the outputs, a quantized pass compares with them, so errors add up along the network. A site's error is
that of its own rounding and clipping (`SiteErrors`), measured in the pass without quantization.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.comparing.parity import decibels
from sparsebit.execution.batches import Call, calls
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.modes import evaluating
from sparsebit.graph.values.nested import map_nested
from sparsebit.progress import track
from sparsebit.quantization.calibrating.model_state import quantizers_of, require_calibrated, switched
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.inspecting.site_errors import SiteErrors
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr, WeightedQuantOpr
from sparsebit.quantization.planning.sites import split_site
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import ErrorProfile, LayerError
from sparsebit.records.phases import phase

log = logging.getLogger(__name__)

Checker = Callable[[Tensor, Tensor], Any]


def get_quantization_error(
    qmodel: SimulatedModel, data: Any, checker: Checker = F.mse_loss, is_async: bool = True
) -> dict[str, float]:
    """`{layer: checker(quantized output, float output)}` on one batch or an iterable of batches.

    `is_async`: each layer quantized alone, on float inputs (one pass); else all layers quantized (two passes).
    """
    batches = _calls(qmodel, "get_quantization_error", data)
    found = _averaged(qmodel, batches, lambda quantized, original: (checker(quantized, original),), is_async=is_async)
    return {name: error for name, (error,) in found.items()}


def profile(qmodel: SimulatedModel, data: Any, *, sync: bool = False, histograms: bool = True) -> ErrorProfile:
    """Mean squared error and SQNR of every layer's output and of every quantized tensor, on one batch or several.

    `sync`: the layers' errors with all layers quantized together; else each layer quantized alone. `histograms`:
    also at most 64 bins of the float values of each tensor, together with the range that quantization clips them to.
    """
    found = profile_model(qmodel, _calls(qmodel, "profile", data), sync=sync, histograms=histograms)
    return replace(found, changed_by=_changed_by(qmodel))


def as_batches(data: Any) -> Iterable[Any]:
    """One batch, or an iterable of them, as an iterable."""
    is_tuple = isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)
    return [data] if is_tuple or isinstance(data, (Tensor, Mapping)) else data


def _calls(qmodel: SimulatedModel, verb: str, data: Any) -> Iterator[Call]:
    require_calibrated(qmodel, verb)
    if names := ", ".join(_changed_by(qmodel)):
        log.warning("%s(): algorithms have changed weights (%s); errors are counted from the changed ones", verb, names)
    return calls(as_batches(data), qmodel.original, qmodel.device)


def _changed_by(qmodel: SimulatedModel) -> tuple[str, ...]:
    """The algorithms that changed weights, so that errors are relative to the changed weights, not to the user's."""
    if not (len(qmodel.float_parameters) or qmodel.float_values_are_lost):
        return ()
    return qmodel.applied_algorithms or ("before the model was saved",)


def profile_model(
    model: nn.Module, calls: Iterable[Call], *, sync: bool = False, histograms: bool = True
) -> ErrorProfile:
    """Every layer's error, the worst SQNR first, and every site's. `sync`: all layers quantized together."""
    num_batches = 0

    def counted() -> Iterator[Call]:
        nonlocal num_batches
        for num_batches, call in enumerate(calls, 1):  # noqa: B007
            yield call

    def noise_and_signal(quantized: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
        return F.mse_loss(quantized, original), original.square().mean()

    calibrated = [q for q in quantizers_of(model) if not q.fake_fused and q.is_calibrated]
    sites = {quantizer: SiteErrors(quantizer, histogram=histograms) for quantizer in calibrated}
    for quantizer, weight in _stored_weights(model):
        if quantizer in sites:
            sites[quantizer].add(weight)
    watched = [quantizer for quantizer, errors in sites.items() if not errors.count]

    def watch(quantizer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(quantizer, Quantizer) and not quantizer.use_quant and inputs:  # in the pass without quantization
            sites[quantizer].add(inputs[0])

    handles = [quantizer.register_forward_pre_hook(watch) for quantizer in watched]
    with hooked(handles):
        found = _averaged(model, counted(), noise_and_signal, is_async=not sync)
    layers = [LayerError(name, noise, decibels(signal, noise)) for name, (noise, signal) in found.items()]
    return ErrorProfile(
        sync,
        num_batches,
        tuple(sorted(layers, key=lambda layer: layer.sqnr_db)),
        tuple(errors.result() for errors in sites.values() if errors.count),
    )


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with at least one calibrated quantizer, by the layer's name; separate quantizers by their site's name."""
    found: dict[str, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, QuantOpr):
            sites = [q.name for q in _quantizers_of(module) if not q.fake_fused and q.is_calibrated]
            if sites:
                found[sites[0] if isinstance(module, QIdentity) else split_site(sites[0])[0]] = module
    return found


@phase("profile")
def _averaged(
    model: nn.Module, calls: Iterable[Call], measure: Callable[[Tensor, Tensor], tuple[Any, ...]], *, is_async: bool
) -> dict[str, tuple[float, ...]]:
    """The results of `measure` on each layer's quantized and float output, averaged over the batches."""
    layers = quantized_layers(model)
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in layers}

    def note(name: str, quantized: Any, original: Any) -> None:
        if isinstance(quantized, Tensor) and isinstance(original, Tensor) and quantized.is_floating_point():
            measured[name].append(tuple(map(float, measure(quantized, original))))

    profile = _profile_alone if is_async else _profile_together
    with torch.no_grad(), restored(model):
        for call in track(calls, "error per layer"):
            profile(model, {module: name for name, module in layers.items()}, call, note)
    return {
        name: tuple(sum(column) / len(column) for column in zip(*found, strict=True))
        for name, found in measured.items()
        if found
    }


def _profile_alone(model: nn.Module, names: dict[nn.Module, str], call: Call, note: Callable[..., None]) -> None:
    _switch(model, False)

    def compare(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        with switched([quantizer for quantizer in _quantizers_of(module) if quantizer.is_calibrated], to=True):
            note(names[module], module.forward(*inputs, **keywords), output)

    with hooked(module.register_forward_hook(compare, with_kwargs=True) for module in names):
        model(*call[0], **call[1])


def _profile_together(model: nn.Module, names: dict[nn.Module, str], call: Call, note: Callable[..., None]) -> None:
    store = SharedData()
    visits: Counter[str] = Counter()

    def keep(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        name = names[module]
        store.put((name, visits[name]), map_nested(Tensor, torch.clone, output))  # later ops may write into it
        visits[name] += 1

    def compare(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        name = names[module]
        if (name, visits[name]) in store:
            note(name, output, store.get((name, visits[name])))
            store.drop((name, visits[name]))
        visits[name] += 1

    for on, hook in ((False, keep), (True, compare)):
        _switch(model, on)
        visits.clear()
        with hooked(module.register_forward_hook(hook, with_kwargs=True) for module in names):
            args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
            model(*args, **kwargs)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards the mode of every module and all switches are restored."""
    with switched(quantizers_of(model)), evaluating(model):
        yield


def _switch(model: nn.Module, on: bool) -> None:
    for quantizer in quantizers_of(model):
        quantizer.use_quant = on and quantizer.is_calibrated


def _stored_weights(model: nn.Module) -> Iterator[tuple[Quantizer, Tensor]]:
    """The weights of quantizers that exist without a forward. Computed weights are observed when the forward runs."""
    for module in model.modules():
        if isinstance(module, WeightedQuantOpr):
            weight: Any = module.op.weight
            yield module.weight_quantizer, weight
        elif isinstance(module, QuantizedParameter):
            yield module.weight_quantizer, module.parameter


def _quantizers_of(module: nn.Module) -> list[Quantizer]:
    return [child for child in module.children() if isinstance(child, Quantizer)]
