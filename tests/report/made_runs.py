"""Runs for tests, made by hand: a record with layers in two modules, a ladder, and large graphs."""

from __future__ import annotations

from dataclasses import replace

from sparsebit.records.audit import Audit, Latency, LayerRun
from sparsebit.records.coverage import Coverage, FloatLayer, ParameterRecord, QuantizedLayer
from sparsebit.records.error_profile import ErrorProfile, LayerError, SiteError, ValueHistogram
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderGoal, LadderStep
from sparsebit.records.layer_graph import GraphLayer
from sparsebit.records.run_record import RunRecord
from sparsebit.report.layout import draw
from sparsebit.report.page_data import Layer, Run
from tests.records.examples import ENVIRONMENT, FILE, MODEL, parity, run

HOSTILE = "<script>alert(1)</script>"
BELL = ValueHistogram(-1.0, 0.125, (1, 2, 5, 12, 30, 60, 90, 99, 97, 88, 61, 29, 13, 4, 2, 1))


def timed(ms: float, ratio: float) -> Latency:
    return Latency(ms, (ms, ms), ms, (ms, ms), ratio, ratio, 10, 1)


def site(name: str, sqnr_db: float = 40.0, **values: object) -> SiteError:
    target = "weight" if name.endswith("weight") else "activation"
    made = SiteError(name, target, "int8", 1, 0.01, sqnr_db, -0.9, 0.95, -1.0, 1.0, 0.0, BELL, BELL)
    return replace(made, **values)  # type: ignore[arg-type]


def layer_run(name: str, op: str = "Conv", arithmetic: str = "integer", **values: object) -> LayerRun:
    made = LayerRun(name, op, "convolution", op == "Conv", arithmetic, f"QLinear{op}")  # type: ignore[arg-type]
    return replace(made, **values)  # type: ignore[arg-type]


GRAPH = (
    GraphLayer("stem.conv", "conv"),
    GraphLayer("stem.relu", "relu", ("stem.conv",)),
    GraphLayer("block.conv1", "conv", ("stem.relu",)),
    GraphLayer("block.conv2", "conv", ("block.conv1",)),
    GraphLayer("block.add", "add", ("stem.relu", "block.conv2")),
    GraphLayer(HOSTILE, "linear", ("block.add",)),
)
AUDIT = Audit(
    "net.onnx",
    "onnxruntime",
    "1.26",
    "a CPU",
    1,
    (
        layer_run("stem.conv", ms=0.5, float_ms=0.9, macs=1000, num_bytes=216, shape=(1, 8, 4, 4)),
        layer_run("block.conv1", ms=0.1, float_ms=0.3, macs=5000, num_bytes=512),
        layer_run("block.conv2", ms=0.1, float_ms=0.3, macs=5000, num_bytes=512),
        layer_run("add_7", "Add", "float", cause="it adds tensors in float", remedy="share their scales"),
    ),
    {},
    100,
    400,
    latency={"float": timed(2.0, 1.0), "quantized": timed(1.0, 0.5)},
    verdict="faster than float",
)
COVERAGE = Coverage(
    quantized=(
        QuantizedLayer("stem.conv", "QConv2d", {"input": "uint8", "weight": "int8"}),
        QuantizedLayer("block.conv1", "QConv2d", {"weight": "int8"}),
        QuantizedLayer("block.conv2", "QConv2d", {"weight": "int4"}),
        QuantizedLayer("stem.relu", "QIdentity", {"output": "uint8"}),
    ),
    float_layers=(FloatLayer(HOSTILE, f"the config says {HOSTILE}"),),
    num_weighted=4,
    num_weighted_quantized=3,
    parameters=(
        ParameterRecord("stem.conv.weight", 216, "int8", 864, 220),
        ParameterRecord("stem.conv.bias", 8, "float32", 32, 32, "biases stay float"),
    ),
)
ERRORS = ErrorProfile(
    False,
    2,
    (LayerError("block.conv2", 0.5, 9.0), LayerError("block.conv1", 0.1, 24.0), LayerError("stem.conv", 0.01, 38.0)),
    (
        site("stem.conv.input", 45.0),
        site("stem.conv.weight", 22.0, peaks=(0.1, 0.1, 0.1, 2.0), scales=(0.1, 0.2), num_scales=1),
        site("block.conv2.weight", 9.0, format="int4", clipped=0.1),
    ),
)
RECORD = RunRecord(
    model=MODEL, graph=GRAPH, coverage=COVERAGE, errors=(ERRORS,), file=FILE, parity=(parity(),), audits=(AUDIT,),
    runs=(run(),),
)  # fmt: skip


def judged(loss: float, bound: float | None = 0.3) -> Judgement:
    return Judgement("top-1 accuracy", "points", 500, 92.0, 92.0 - loss, loss, bound, True)


def step(name: str, loss: float | None, latency: float, verdict: str = "within", **values: object) -> LadderStep:
    cost = Cost(round(1000 * latency), latency / 2, 500, 1.0, latency, latency)
    recipe = {"config": f"BACKEND: onnxruntime # {HOSTILE}", "placement": "default", "sparsity": None, "round_to": 1}
    found = None if loss is None else judged(loss)
    made = LadderStep(name, "eight bits", f"because {HOSTILE}", verdict, 3.0, name, recipe, cost, found)  # type: ignore[arg-type]
    return replace(made, **values)  # type: ignore[arg-type]


LADDER = Ladder(
    identity="id",
    goal=LadderGoal("onnxruntime", "top-1 accuracy", 0.5, {}, "latency", 20.0),
    float_cost=Cost(1000, 1.0, 500, 1.0, 1.0, 1.0),
    steps=(
        step("01-w8", 0.2, 0.6, final=judged(0.3)),
        step("02-w4", 3.0, 0.4, "too much loss"),
        step("03-broken", None, 0.9, "failed", cost=None, fault="no kernel"),
        step("04-slow", 0.1, 0.9),
    ),
    best="01-w8",
    met=True,
    reason="01-w8 loses 0.30 points",
    pareto=("02-w4", "01-w8", "04-slow"),
    seconds=60.0,
    finished=True,
    reproduce="sparsebit.quantize(model, batches, 'best.yaml')",
    environment=ENVIRONMENT,
)


def language_step(name: str, size: float, loss: float, **options: object) -> LadderStep:
    cost = Cost(round(4e6 * size), size / 16, 0, 1.0, bits=size)
    found = Judgement("perplexity", "% of perplexity", 64, -350.0, -350.0 - loss, loss, 0.1, True)
    verdict = "within" if loss <= 1 else "too much loss"
    recipe = {"target": "transformers", "options": options}
    return LadderStep(name, "four bits", "fewer bytes", verdict, 30.0, name, recipe, cost, found)  # type: ignore[arg-type]


LANGUAGE_LADDER = LADDER.replace(
    goal=LadderGoal("transformers", "perplexity", 1.0, {}, "bits", 20.0),
    float_cost=Cost(64_000_000, 1.0, 0, 1.0, bits=16.0),
    steps=(
        language_step("01-w8", 8.2, 0.02, method="rtn", bits=8),
        language_step("02-w4-gptq", 4.2, 0.9, candidate_bits=[3, 4]),
        language_step("03-w3", 3.2, 12.0, bits=3),
    ),
    best="02-w4-gptq",
    pareto=("03-w3", "02-w4-gptq", "01-w8"),
)


def large_run(num_layers: int, *, is_flat: bool = False, name: str = "large") -> Run:
    """A network of residual blocks with four layers each, in stages of six blocks."""
    layers = []
    for place in range(num_layers):
        block = place // 4
        label = f"node_{place}" if is_flat else f"stages.{block // 6}.blocks.{block % 6}.conv{place % 4}"
        inputs = tuple({place - 1, place - 4} if place % 4 == 0 and place >= 4 else {place - 1} if place else ())
        layers.append(
            Layer(
                label, "conv", "integer", 8, 8, 50.0 - place % 45, 1000 + place, 4000, 10000, 0.01 * (1 + place % 7),
                inputs=inputs,
            )
        )  # fmt: skip
    drawing = draw([layer.name for layer in layers], [layer.inputs for layer in layers])
    return Run(name=name, kind="ONNX file", layers=tuple(layers), drawing=drawing)
