"""The choices of a search, with a stopwatch that knows what each layer takes; and real sessions, without times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.deploy.audit.file_latency import Stopwatch, Timed
from sparsebit.deploy.audit.region_times import RegionTime, RegionTimes
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.placement_search import PlacementProfile, apply_placement, measure_placement, tracing
from tests.quantization.tiny import MaskFirst, masked_batches

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SLOW_WISE = {"wise": 3.0, "Conv": 0.2, "Gemm": 0.2, "MatMul": 0.2}
BATCH = torch.randn(8, 3, 6, 6)


class Net(nn.Module):
    """Wide and depthwise convolutions in turns, a residual add and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.wise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.point(self.wise(x).relu())
        return self.head(x.mean((2, 3)))


class Fake(Stopwatch):
    """A layer takes `integer[kind]` in integers and 1 in float, each conversion `conversion`.

    `exactness`: the SQNR by the number of integer nodes; 30 dB where it is not given.
    """

    def __init__(
        self, integer: Mapping[str, float], conversion: float = 0.01, exactness: Mapping[int, float] | None = None
    ) -> None:
        super().__init__("onnxruntime", [])
        self.integer, self.conversion, self.exactness = integer, conversion, exactness or {}

    def times(self, file: bytes) -> dict[str, tuple[float, bool]]:
        found: dict[str, tuple[float, bool]] = {}
        made = {name: node for node in onnx.load_model_from_string(file).graph.node for name in node.output}
        for node in made.values():
            if node.op_type in ("Conv", "Gemm", "MatMul"):
                is_integer = made.get(node.input[1]) is not None
                groups = next((item.i for item in node.attribute if item.name == "group"), 1)
                kind = "wise" if groups > 1 else node.op_type
                found[node.name] = (self.integer.get(kind, 1.0) if is_integer else 1.0, is_integer)
            elif node.op_type == "QuantizeLinear":
                found[node.name] = (self.conversion, True)
        return found

    def ratios(self, files: Mapping[str, bytes], budget_s: float) -> dict[str, Timed]:
        sums = {name: sum(ms for ms, _ in self.times(file).values()) for name, file in files.items()}
        first = next(iter(sums.values()))
        return {name: Timed(total / first, 0.01) for name, total in sums.items()}

    def regions(self, files: Mapping[str, bytes]) -> dict[str, RegionTimes]:
        return {
            name: RegionTimes(
                *("onnxruntime", "1", "cpu", 1, 1, sum(ms for ms, _ in self.times(file).values()), 0.0),
                tuple(
                    RegionTime("kernel", ms, "integer" if is_integer else "float", () if "/q" in layer else (layer,))
                    for layer, (ms, is_integer) in self.times(file).items()
                ),
            )
            for name, file in files.items()
        }

    def sqnr_db(self, name: str, file: bytes, reference: bytes) -> float:
        return self.exactness.get(sum(is_integer for _, is_integer in self.times(file).values()), 30.0)


@pytest.fixture(scope="module")
def qmodel() -> QuantModel:
    torch.manual_seed(0)
    return sparsebit.quantize(Net().eval(), [BATCH], "onnxruntime")


TRACED: dict[QuantModel, Any] = {}


@pytest.fixture(autouse=True)
def _trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes seconds, and a search only reads it."""
    original = tracing.trace_onnx

    def trace(qmodel: QuantModel, data: Any) -> Any:
        if qmodel not in TRACED:
            TRACED[qmodel] = original(qmodel, data)
        return TRACED[qmodel]

    monkeypatch.setattr(tracing, "trace_onnx", trace)


def weights(qmodel: QuantModel) -> set[str]:
    return {site.layer for site in qmodel.plan.values() if site.role == "weight"}


def test_a_layer_that_is_slow_in_integers_becomes_float(qmodel: QuantModel) -> None:
    found = measure_placement(qmodel, [BATCH], stopwatch=Fake(SLOW_WISE))
    assert weights(found.qmodel) == {"stem", "point", "head"}
    assert found.profile.ratio < 1 and not found.profile.is_float
    assert weights(qmodel) == {"stem", "wise", "point", "head"}  # left as it was
    assert "chosen" in str(found.profile)


def test_where_all_gain_the_plan_stays(qmodel: QuantModel) -> None:
    watch = Fake({"wise": 0.2, "Conv": 0.2, "Gemm": 0.2, "MatMul": 0.2}, conversion=0.0)
    assert weights(measure_placement(qmodel, [BATCH], stopwatch=watch).qmodel) == weights(qmodel)


def test_where_nothing_gains_the_model_is_float(qmodel: QuantModel, tmp_path: Path) -> None:
    slow = Fake({"wise": 2.0, "Conv": 2.0, "Gemm": 2.0, "MatMul": 2.0})
    found = measure_placement(qmodel, [BATCH], stopwatch=slow)
    assert found.profile.is_float and not found.qmodel.plan.sites and "float altogether" in found.profile.words
    parity = found.qmodel.export_onnx(BATCH[:1], tmp_path / "float.onnx", check=[BATCH])
    assert parity is not None and parity.worst.max_difference < 1e-5
    ops = {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}
    assert not ops & {"QuantizeLinear", "DequantizeLinear"}
    found.qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", Net())
    torch.testing.assert_close(again(BATCH), qmodel.original(BATCH))


def test_a_faster_placement_that_is_less_exact_is_not_taken(qmodel: QuantModel) -> None:
    from sparsebit.deploy.runtimes import PROFILES
    from sparsebit.quantization.placement_search.traced_graph import TracedGraph

    default = TracedGraph(*tracing.trace_onnx(qmodel, BATCH[:1]), {}, pads_channels=True).file(
        (), PROFILES["onnxruntime"]
    )
    num_integer = sum(is_integer for _, is_integer in Fake(SLOW_WISE).times(default).values())
    watch = Fake(SLOW_WISE, exactness={num_integer: 40.0})
    found = measure_placement(qmodel, [BATCH], stopwatch=watch)
    assert "less exact" in {choice.verdict for choice in found.profile.choices}
    assert weights(found.qmodel) in (weights(qmodel), set())
    lenient = measure_placement(qmodel, [BATCH], stopwatch=watch, margin_db=20.0)
    assert weights(lenient.qmodel) == {"stem", "point", "head"}
    by_metric = measure_placement(qmodel, [BATCH], stopwatch=watch, metric=lambda _: 1.0)
    assert weights(by_metric.qmodel) == {"stem", "point", "head"}


def test_a_metric_that_gives_no_number_is_refused(qmodel: QuantModel) -> None:
    with pytest.raises(CalibrationError, match="the metric gave NaN"):
        measure_placement(qmodel, [BATCH], stopwatch=Fake(SLOW_WISE), metric=lambda _: float("nan"))


def test_a_metric_decides_where_one_is_given(qmodel: QuantModel) -> None:
    found = measure_placement(
        *(qmodel, [BATCH]),
        stopwatch=Fake(SLOW_WISE),
        metric=lambda model: float("wise" in weights(model)),
        metric_margin=0.1,
    )
    assert weights(found.qmodel) != {"stem", "point", "head"}


def test_the_time_limit_leaves_the_first_candidates(qmodel: QuantModel) -> None:
    found = measure_placement(qmodel, [BATCH], stopwatch=Fake(SLOW_WISE), seconds=0)
    assert weights(found.qmodel) == {"stem", "point", "head"} and len(found.profile.choices) <= 4


def test_the_chosen_file_is_what_was_simulated(qmodel: QuantModel, tmp_path: Path) -> None:
    """Real sessions: candidates load, and the model that comes back computes what its file computes."""
    found = measure_placement(qmodel, [BATCH], seconds=0)
    forced = apply_placement(qmodel, found.profile.replace(is_float=False, floats=("wise.weight",)))
    assert weights(forced) == {"stem", "point", "head"}
    torch.testing.assert_close(forced.sites["stem.weight"].scale, qmodel.sites["stem.weight"].scale)
    assert forced.export_onnx(BATCH[:1], tmp_path / "mixed.onnx", check=[BATCH]) is not None
    audit = sparsebit.audit(tmp_path / "mixed.onnx", repeats=0)
    assert [layer.arithmetic for layer in audit.heavy].count("float") == 1
    assert not any("rounds the float weights" in line for line in audit.warnings)


def test_profiles_are_files(qmodel: QuantModel, tmp_path: Path) -> None:
    found = measure_placement(qmodel, [BATCH], stopwatch=Fake(SLOW_WISE))
    file = found.profile.save(tmp_path / "profile.json")
    assert PlacementProfile.load(file) == found.profile
    assert weights(apply_placement(qmodel, file)) == {"stem", "point", "head"}
    elsewhere = found.profile.replace(cpu="another processor").save(tmp_path / "elsewhere.json")
    with pytest.warns(UserWarning, match="another processor, here"):
        apply_placement(qmodel, elsewhere)
    other = sparsebit.quantize(nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), [BATCH], "onnxruntime")
    with pytest.raises(ConfigError, match="another model"):
        apply_placement(other, file)
    newer = json.loads(file.read_text()) | {"version": 99}
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    with pytest.raises(ConfigError, match="99"):
        PlacementProfile.load(tmp_path / "newer.json")
    with pytest.raises(ConfigError, match="no such file"):
        apply_placement(qmodel, tmp_path / "absent.json")


def test_a_backend_without_a_runtime_here_is_refused() -> None:
    model = sparsebit.quantize(Net().eval(), [BATCH], "tensorrt")
    with pytest.raises(ConfigError, match="no runtime here"):
        measure_placement(model, [BATCH])


def test_one_sample_is_cut_from_the_inputs_that_have_samples() -> None:
    masked = sparsebit.quantize(MaskFirst(), masked_batches(first=True), "onnxruntime")
    found = tracing.traced(masked, masked_batches(first=True), "measure_placement()", "placement", stopwatch=Fake({}))
    assert found.shapes == ((5, 5), (1, 5, 6))
