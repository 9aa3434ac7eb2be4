from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.exporting.qdq import codes_of, required_opset
from sparsebit.errors import DeploymentError
from sparsebit.numerics import reference
from sparsebit.numerics.qparams import broadcast_to, qparams_from_range
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec, to_rows
from sparsebit.quantization import QuantModel
from tests.deploy.exported_files import EXACT, differences, initializers, metadata, opset, types, worst
from tests.quantization.tiny import calibrated, qconfig

BITS = range(1, 17)
CONTAINERS = {1: 2, 2: 2, 3: 4, 4: 4, **dict.fromkeys(range(5, 9), 8), **dict.fromkeys(range(9, 17), 16)}


class Ladder(nn.Module):
    """A linear for every number of bits, `b1` to `b16`, each with its output."""

    def __init__(self) -> None:
        super().__init__()
        for bits in BITS:
            self.add_module(f"b{bits}", nn.Linear(12, 8))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.get_submodule(f"b{bits}")(x) for bits in BITS]


class Exported:
    """A calibrated model, its file, and what it was calibrated on."""

    def __init__(self, model: nn.Module, x: Tensor, changes: dict[str, Any], folder: Path, **options: Any) -> None:
        self.x, self.file = x, folder / "m.onnx"
        self.qmodel: QuantModel = calibrated(model, [x], qconfig(changes))
        self.qmodel.export_onnx(x, self.file, **options)
        self.nodes = {node.name: node for node in onnx.load(str(self.file)).graph.node}


def ladder(kind: str, scheme: str, folder: Path, **changes: Any) -> Exported:
    specific = [{f"b{bits}": ["QUANTIZER.BIT", bits]} for bits in BITS]
    other = "A" if kind == "W" else "W"
    settings = {f"{kind}.QSCHEME": scheme, f"{kind}.SPECIFIC": specific, f"{other}.QUANTIZER.DISABLE": True}
    torch.manual_seed(0)
    return Exported(Ladder(), torch.randn(5, 12), {**settings, **changes}, folder)


SCHEMES = ["per-tensor-affine", "per-channel-symmetric", "per-group-symmetric", "per-group-affine"]


@pytest.fixture(scope="module", params=SCHEMES)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    changes = {"W.QUANTIZER.GROUP_SIZE": 5} if "group" in request.param else {}  # 12 = 5 + 5 + 2: a ragged group
    return ladder("W", request.param, tmp_path_factory.mktemp("weights"), **changes)


@pytest.fixture(scope="module", params=["per-tensor-symmetric", "per-tensor-affine", "per-channel-affine"])
def activations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return ladder("A", request.param, tmp_path_factory.mktemp("activations"), **{"A.OBSERVER.LAYOUT": "NLC"})


@pytest.mark.sample(2)
def test_weights_of_every_width_are_what_was_simulated(weights: Exported) -> None:
    found = differences(weights.qmodel, weights.file, weights.x)
    assert len(found) == 16
    assert {name: gap for name, gap in found.items() if gap > EXACT} == {}


def test_weights_are_stored_in_the_narrowest_type(weights: Exported) -> None:
    kinds = types(weights.file)
    sign = "INT" if weights.qmodel.config.W.symmetric else "UINT"
    assert {bits: kinds[f"b{bits}.weight/codes"] for bits in BITS} == {b: f"{sign}{CONTAINERS[b]}" for b in BITS}
    assert opset(weights.file) == 25  # the first one with int2


TWO_BITS = {
    "linear": (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)), {"INT2"}),
    "outputs that are not fours": (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 33)), {"INT2", "INT4"}),
    "convolutions": (nn.Sequential(nn.Conv1d(64, 6, 3), nn.Conv1d(6, 6, 1, groups=6)), {"INT2"}),
}


@pytest.mark.parametrize("name", TWO_BITS)
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-group-affine"])
def test_onnxruntime_runs_two_bits(name: str, scheme: str, tmp_path: Path) -> None:
    model, kinds = TWO_BITS[name]
    changes = {"BACKEND": "onnxruntime", "A.QUANTIZER.DISABLE": True, "W.QUANTIZER.BIT": 2, "W.QSCHEME": scheme}
    if "group" in scheme:
        changes["W.QUANTIZER.GROUP_SIZE"] = 32
        kinds = {f"U{kind}" for kind in kinds}
    torch.manual_seed(0)
    x = torch.randn(5, 64, 16) if name == "convolutions" else torch.randn(5, 64)
    exported = Exported(model, x, changes, tmp_path, check=[x])  # the check compares it with the simulation
    assert {kind for site, kind in types(exported.file).items() if site.endswith("/codes")} == kinds


def test_two_bit_embeddings_have_any_number_of_rows(tmp_path: Path) -> None:
    changes = {"BACKEND": "onnxruntime", "A.QUANTIZER.DISABLE": True, "W.QUANTIZER.BIT": 2}
    ids = torch.randint(0, 33, (4, 7))
    exported = Exported(nn.Sequential(nn.Embedding(33, 18)), ids, changes, tmp_path, check=[ids])
    assert types(exported.file)["0.weight/codes"] == "INT2"


def test_codes_stay_in_their_true_range(weights: Exported) -> None:
    values = initializers(weights.file)
    for quantizer in (q for q in weights.qmodel.quantizers() if q.is_enable):
        codes = values[f"{quantizer.name}/codes"].astype("int64")
        assert quantizer.spec.qmin <= codes.min() and codes.max() <= quantizer.spec.qmax, quantizer.name
        assert codes.max() > codes.min()


def test_every_node_carries_site_role_and_bits(weights: Exported) -> None:
    for bits in BITS:
        facts = metadata(weights.nodes[f"b{bits}.weight/dq"])
        assert facts == {"sparsebit.site": f"b{bits}.weight", "sparsebit.role": "weight", "sparsebit.bits": str(bits)}
        # Without a zero point, which may be 0, ONNX Runtime leaves a Gemm in float.
        assert len(weights.nodes[f"b{bits}.weight/dq"].input) == 3
    onnx.checker.check_model(str(weights.file), full_check=True)


def test_activations_of_every_width_are_what_was_simulated(activations: Exported) -> None:
    found = differences(activations.qmodel, activations.file, activations.x)
    assert {name: gap for name, gap in found.items() if gap > EXACT} == {}
    # Beyond what was seen in calibration, where the grid clips.
    assert worst(activations.qmodel, activations.file, 4 * activations.x) <= EXACT


def test_activations_have_a_clip_where_their_type_is_wider(activations: Exported) -> None:
    kinds = types(activations.file)
    sign = "INT" if activations.qmodel.config.A.symmetric else "UINT"
    is_per_channel = activations.qmodel.config.A.granularity == "channel"
    for bits in BITS:
        assert kinds[f"b{bits}.input/zero_point"] == f"{sign}{8 if bits <= 8 else 16}"
        has_clip = f"b{bits}.input/{'clip_low' if is_per_channel else 'clip'}" in activations.nodes
        assert has_clip == (bits not in (8, 16))
        assert metadata(activations.nodes[f"b{bits}.input/q"])["sparsebit.bits"] == str(bits)
    onnx.checker.check_model(str(activations.file), full_check=True)


def test_activations_per_channel_of_images_with_dynamic_sizes(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8) * torch.tensor([1.0, 10.0, 0.1]).reshape(1, 3, 1, 1)
    changes = {"A.QSCHEME": "per-channel-affine", "A.QUANTIZER.BIT": 5}
    made = Exported(
        nn.Sequential(nn.Conv2d(3, 4, 3)), x, changes, tmp_path, dynamic_axes={"input": {0: "n", 2: "h", 3: "w"}}
    )
    assert initializers(made.file)["0.input/scale"].shape == (3,)
    assert worst(made.qmodel, made.file, torch.randn(1, 3, 11, 9)) <= EXACT


def test_weights_of_convolutions(tmp_path: Path) -> None:
    """Without a zero point where all are 0, and without an axis where there is one scale."""
    affine = [{"2": ["QSCHEME", "per-channel-affine"]}]
    changes = {"W.QSCHEME": "per-channel-symmetric", "W.SPECIFIC": affine, "A.QUANTIZER.DISABLE": True}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 3), nn.Conv2d(1, 4, 3))
    made = Exported(model, torch.randn(2, 3, 8, 8), changes, tmp_path)
    nodes = [made.nodes[f"{layer}.weight/dq"] for layer in range(3)]
    assert [len(node.input) for node in nodes] == [2, 2, 3]
    assert [[attribute.name for attribute in node.attribute] for node in nodes] == [["axis"], [], ["axis"]]
    assert worst(made.qmodel, made.file, made.x) <= EXACT


class Table(nn.Module):
    """A weight in groups that are longer than its rows, or its columns."""

    def __init__(self, axis: int, num_scales: int) -> None:
        super().__init__()
        self.axis = axis
        self.table, self.fc = nn.Parameter(torch.randn(6, 10)), nn.Linear(6, 4)
        self.register_buffer("scale", torch.rand(num_scales) + 0.1)
        self.register_buffer("zero_point", torch.zeros(num_scales))

    def forward(self, x: Tensor) -> Tensor:
        numbers = (self.axis, 32, -8, 7, "ste", "table")
        weight = torch.ops.sparsebit.fake_quantize(self.table, self.scale, self.zero_point, *numbers)
        return self.fc(x @ weight.T)


@pytest.mark.parametrize(("axis", "num_scales"), [(-1, 6), (0, 10)])
def test_a_group_of_a_whole_row_is_a_scale_per_row(axis: int, num_scales: int, tmp_path: Path) -> None:
    made = Exported(Table(axis, num_scales), torch.randn(5, 10), {}, tmp_path)
    assert {attribute.name for attribute in made.nodes["table/dq"].attribute} == {"axis"}
    assert worst(made.qmodel, made.file, made.x) <= EXACT


class Hypernetwork(nn.Module):
    """Its weight is computed from an input: nothing to store."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.tanh(weight))


@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-group-affine"])
def test_a_weight_that_depends_on_an_input_is_quantized_as_the_model_runs(scheme: str, tmp_path: Path) -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    changes = {"W.QSCHEME": scheme, "W.QUANTIZER.GROUP_SIZE": 4}
    qmodel = calibrated(Hypernetwork(), [(x, weight)], qconfig(changes))
    qmodel.export_onnx((x, weight), tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", x, weight) <= EXACT


def test_a_scale_that_is_computed_from_an_input_is_refused(tmp_path: Path) -> None:
    class Dynamic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.abs().max() / 127
            return torch.ops.sparsebit.fake_quantize(x, scale, torch.zeros(()), None, 0, -128, 127, "ste", "mine")

    x = torch.randn(3, 8)
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 8), Dynamic()), [x])
    with pytest.raises(DeploymentError, match="mine: its scale or zero point is computed while the model runs"):
        qmodel.export_onnx(x, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "granularity",
    [PerTensor(), PerChannel(0), PerGroup(1, 4), PerGroup(1, 5)],
    ids=["tensor", "channel", "whole", "ragged"],
)
@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_codes_are_those_of_the_reference(granularity: Any, bits: int) -> None:
    x = torch.randn(6, 12)
    for symmetric in (True, False):
        spec = TensorSpec(bits, symmetric, granularity)
        rows = to_rows(x, granularity)
        scale, zero_point = qparams_from_range(rows.amin(1), rows.amax(1), spec)
        codes = codes_of(x, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax)
        assert int(codes.min()) >= spec.qmin and int(codes.max()) <= spec.qmax
        wide_scale, wide_zero = (broadcast_to(p, x.shape, granularity) for p in (scale, zero_point))
        assert torch.equal((codes - wide_zero) * wide_scale, reference.fake_quantize(x, scale, zero_point, spec))


def test_what_is_no_number_is_stored_as_zero() -> None:
    """As the fake-quant rounds it."""
    x = torch.tensor([float("nan"), 1.0])
    assert codes_of(x, torch.tensor(0.5), torch.tensor(3.0), None, 0, -128, 127).tolist() == [3, 5]


def test_half_precision_is_cast_around_the_float32_nodes(tmp_path: Path) -> None:
    exported = Exported(nn.Sequential(nn.Linear(12, 8)).half(), torch.randn(5, 12).half(), {}, tmp_path)
    casts = {name for name, node in exported.nodes.items() if node.op_type == "Cast"}
    assert casts == {"0.input/in", "0.input/out", "0.weight/out"}


@pytest.mark.parametrize("scheme", ["per-tensor-symmetric", "per-channel-symmetric"])
def test_fp8_weights_keep_their_axis(scheme: str, tmp_path: Path) -> None:
    changes = {"W.QUANTIZER.TYPE": "fp8", "W.QSCHEME": scheme, "A.QUANTIZER.DISABLE": True}
    exported = Exported(nn.Sequential(nn.Linear(12, 8)), torch.randn(5, 12), changes, tmp_path)
    assert worst(exported.qmodel, exported.file, exported.x) <= EXACT


def test_the_opset_that_a_set_of_formats_needs() -> None:
    widths = frozenset({2, 4, 8, 16})
    assert required_opset([(-128, 127, 0, True), (0, 255, 0, False)], widths) == 13
    assert required_opset([(-128, 127, 32, True)], widths) == 21
    assert required_opset([(-8, 7, 0, True)], widths) == 21
    assert required_opset([(-2, 1, 0, True)], widths) == 25
    assert required_opset([(-2, 1, 0, False)], widths) == 13  # an activation: int8, with a clip
