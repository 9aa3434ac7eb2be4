"""`accuracy_gains`: which layers cost accuracy, by the score of the quantized model with one layer in float.

The error of a layer's output (`profile`) shows how much a layer loses, not how much of that matters to the outputs. A
full evaluation for each layer would take too long. So every layer is made float once on few samples, and only the
layers that bring the outputs nearest to the float model's are evaluated with the metric on all data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.batches import Call, calls, input_rows, require_repeatable
from sparsebit.execution.blocks.find_blocks import Block, whole_graph
from sparsebit.execution.sample_rows import find_sample_rows
from sparsebit.graph.capture import Captured
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.progress import note, track
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.calibrating.model_state import (
    quantizers_of,
    require_calibrated,
    require_settled,
    switched,
    warn_if_lost,
)
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.inspecting.class_scores import Agreement, LabelledBatches
from sparsebit.quantization.inspecting.error_profiler import as_batches, profile_model, quantized_layers, restored
from sparsebit.quantization.ops.quant_opr import QIdentity
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records import AccuracyGains, LayerError, LayerGain
from sparsebit.records.phases import phase

NUM_LAYERS = 8
_NUM_SAMPLES = 32  # for the short trial of every layer, which selects the layers that are measured on all data
METRICS = ("accuracy", "agreement")

Metric = Callable[[Any], float]


def accuracy_gains(
    qmodel: SimulatedModel, data: Any, metric: str | Metric = "accuracy", *, num_layers: int = NUM_LAYERS
) -> AccuracyGains:
    """Which layers cost accuracy: the score that is regained when each of the worst layers is float.

    The `num_layers` layers (0: all) that, made float, bring the outputs of 32 samples nearest to the float model's
    are made float one at a time: weight, inputs, and parameters that algorithms changed. `data`: a batch or a
    list of them, `(inputs, labels)` or mappings with `labels`. `metric`: "accuracy" (top-1); "agreement" with the
    float model's top-1, which needs no labels; or a function that gets the model and returns a score, higher is
    better. The model is restored afterwards, also after an error.

    >>> print(qmodel.accuracy_gains(test_loader, num_layers=3))  # doctest: +SKIP
    top-1 accuracy on 1000 samples: float 0.9120, quantized 0.8560
    in float                   score     gain  SQNR alone
    layer3.0.conv1            0.8710  +0.0150     17.2 dB
    """
    if type(num_layers) is not int or num_layers < 0:
        raise ConfigError(f"num_layers={num_layers!r}: allowed: whole numbers from 0 (all layers)")
    if not callable(metric) and metric not in METRICS:
        raise ConfigError(f"metric={metric!r}: allowed: {', '.join(METRICS)}, or a function of the model")
    require_settled(qmodel, "accuracy_gains")
    batches = as_batches(data)
    require_repeatable(batches, "accuracy_gains()")
    if metric == "accuracy":
        LabelledBatches(batches, qmodel.original, None)  # raises for labels that are missing, before any long work
    warn_if_lost(qmodel, "the changed weights count as float")
    require_calibrated(qmodel, "accuracy_gains")
    errors = profile_model(qmodel, calls(batches, qmodel.original, qmodel.device), histograms=False).layers
    return _measured(qmodel, batches, metric, sorted(errors, key=lambda error: error.sqnr_db), num_layers)


@phase("accuracy")
@torch.no_grad()
def _measured(
    qmodel: SimulatedModel, batches: Iterable[Any], metric: str | Metric, worst: list[LayerError], num_layers: int
) -> AccuracyGains:
    """The scores with each of the `num_layers` worst layers in float (0: all); the model is restored."""
    float_layers = FloatLayers(qmodel.built.captured, qmodel.float_parameters)
    with restored(qmodel):
        quantizers = qmodel.quantizers()
        # If quantization is off altogether, the quantized score is that with everything switched on.
        is_off = not any(quantizer.is_enable for quantizer in quantizers)
        switches = {q: q.is_calibrated if is_off else q.use_quant for q in quantizers}
        judge = _judge(qmodel, batches, metric, float_layers)

        def score(layers: Iterable[str] | None = (), metric: Metric = judge.score) -> float:
            """The score with these layers in float; None: everything."""
            for quantizer, on in switches.items():  # at each score, because the user's metric may switch quantizers
                quantizer.use_quant = on
            qmodel.eval()
            with float_layers.of(layers):
                return metric(qmodel)

        float_score, quantized = score(None), score()
        if 0 < num_layers < len(worst):
            output_error = _OutputError(qmodel, batches, float_layers)
            every = track(worst, "outputs with a layer in float", fewest=2)
            left = {error.layer: score([error.layer], output_error) for error in every}
            worst = sorted(worst, key=lambda e: left[e.layer])[:num_layers]  # stable: ties stay in order of their SQNR
        scores: dict[str, float] = {}
        for error in track(worst, "accuracy with a layer in float", fewest=2):
            scores[error.layer] = score([error.layer])
            note(f"{error.layer} {scores[error.layer] - quantized:+.4f}")
        together = score([error.layer for error in worst]) if len(worst) != 1 else scores[worst[0].layer]
    rows = [LayerGain(e.layer, e.sqnr_db, scores[e.layer], scores[e.layer] - quantized) for e in worst]
    rows.sort(key=lambda row: -row.gain)  # stable: with equal gains, the worst error comes first
    return AccuracyGains(judge.name, judge.num_samples, float_score, quantized, together, tuple(rows))


class _OutputError:
    """The squared error of the outputs on the first samples, relative to the energy of the float model's outputs."""

    def __init__(self, qmodel: Any, batches: Iterable[Any], layers: FloatLayers) -> None:
        stream = (call for call in calls(batches, qmodel.original, qmodel.device) if input_rows(call) != {0})
        call = next(stream, None)
        if call is None:
            raise CalibrationError("accuracy_gains(): no batch with samples was given")
        with layers.of(None):
            samples = find_sample_rows(call, qmodel)
            self.call: Call = samples.of(call, range(min(samples.count, _NUM_SAMPLES)))
            self.expected = self._outputs(qmodel)

    def __call__(self, qmodel: Any) -> float:
        pairs = zip(self._outputs(qmodel), self.expected, strict=True)
        errors = [float((y - x).square().sum() / x.square().sum().clamp_min(1e-30)) for y, x in pairs]
        return sum(error for error in errors if math.isfinite(error))

    def _outputs(self, qmodel: Any) -> list[Tensor]:
        args, kwargs = map_nested(Tensor, torch.clone, self.call)  # a model may write into its inputs
        return [x.double() for x in tensors_of(qmodel(*args, **kwargs)) if x.is_floating_point()]


class FloatLayers:
    """Switches single layers of a quantized model to float: their weights, their parameters and their inputs."""

    def __init__(self, captured: Captured, float_parameters: FloatParameters) -> None:
        self.model, self.float_parameters = captured.model, float_parameters
        self.layers = quantized_layers(captured.model)
        self.root = captured.regions[""].graph_module if "" in captured.regions else None
        self.nodes: dict[nn.Module, list[fx.Node]] = {}
        self.readers: dict[nn.Module, list[QIdentity]] = {}
        for graph_module in (region.graph_module for region in captured.regions.values()):
            for node in graph_module.graph.find_nodes(op="call_module"):
                module = graph_module.get_submodule(str(node.target))
                if graph_module is self.root:
                    self.nodes.setdefault(module, []).append(node)
                sources = [module_of(source, graph_module) for source in node.all_input_nodes]
                # The separate quantizers before the node; other nodes may read them too.
                self.readers.setdefault(module, []).extend(s for s in sources if isinstance(s, QIdentity))
        if self.root is not None:
            float_parameters.drop_outdated(self.root)

    @contextlib.contextmanager
    def of(self, names: Iterable[str] | None) -> Iterator[None]:
        """Inside, these layers are float; None: the whole model is."""
        with contextlib.ExitStack() as stack:
            original = self.float_parameters.original
            if names is None:
                stack.enter_context(switched(quantizers_of(self.model), to=False))
                for block in [] if self.root is None else whole_graph(self.root):
                    stack.enter_context(original(block))
            for name in names or ():
                layer = self.layers[name]
                stack.enter_context(switched([m for m in layer.children() if isinstance(m, Quantizer)], to=False))
                stack.enter_context(_reading_float(layer, self.readers.get(layer, [])))
                if nodes := self.nodes.get(layer):
                    stack.enter_context(original(Block(name, tuple(nodes))))
            yield


class _Judge(NamedTuple):
    """A metric with its name."""

    name: str
    num_samples: int
    metric: Metric

    def score(self, qmodel: Any) -> float:
        return score_of(self.metric, qmodel, f"accuracy_gains(): the metric ({self.name})")


def score_of(metric: Metric, qmodel: Any, who: str) -> float:
    """The score of the metric; raises if it is not a finite number. `who`: the metric's name in the error."""
    given = metric(qmodel)
    try:
        score = float(given)
    except (TypeError, ValueError, RuntimeError):
        raise CalibrationError(f"{who} gave {type(given).__name__}; it must return one number") from None
    if not math.isfinite(score):
        raise CalibrationError(f"{who} gave {'NaN' if math.isnan(score) else score}; it must return a finite number")
    return score


def _judge(qmodel: Any, batches: Iterable[Any], metric: str | Metric, layers: FloatLayers) -> _Judge:
    if callable(metric):
        return _Judge(getattr(metric, "__name__", "metric"), 0, metric)
    if metric == "accuracy":
        labelled = LabelledBatches(batches, qmodel.original, qmodel.device)
        return _Judge("top-1 accuracy", labelled.num_samples, labelled.accuracy)
    with layers.of(None):
        agreement = Agreement(batches, qmodel)
    return _Judge("top-1 agreement with the float model (no labels)", agreement.num_samples, agreement)


@contextlib.contextmanager
def _reading_float(layer: nn.Module, sources: Sequence[QIdentity]) -> Iterator[None]:
    """Inside, the layer reads the unrounded inputs of the quantizers `sources`; other readers get rounded values.

    Switching the quantizers off would change all readers. So hooks keep what went into each quantizer, and replace the
    layer's arguments by it.
    """
    seen: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(source: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen[source] = inputs[0], output

    def unquantized(value: Any) -> Any:
        return next((given for given, output in seen.values() if output is value), value)

    def read(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(unquantized, args)), {name: unquantized(value) for name, value in kwargs.items()}

    handles = [source.register_forward_hook(keep) for source in dict.fromkeys(sources)]
    if handles:
        handles.append(layer.register_forward_pre_hook(read, with_kwargs=True))
    with hooked(handles):
        yield
