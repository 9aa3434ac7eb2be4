"""Which tensors get a quantizer: `virtual` by the spec, a runtime by its profile, the user's own keys first."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import BackendError
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import QMODULE_MAP
from sparsebit.quantization import QuantModel, QuantOpr, parse_qconfig
from sparsebit.quantization.planning.float_reasons import HIDDEN
from sparsebit.quantization.planning.writes import IN_PLACE
from tests.quantization.tiny import Block, ConvBnRelu, Residual, Tied, calibrated, qconfig, site, sites


def placed(model: nn.Module, changes: dict[str, Any] | None = None, backend: str = "virtual") -> set[str]:
    return sites(QuantModel(model, qconfig(changes, backend=backend)))


def floats(model: nn.Module, changes: dict[str, Any] | None = None, backend: str = "virtual") -> dict[str, str]:
    coverage = QuantModel(model, qconfig(changes, backend=backend)).coverage
    return {layer.name: layer.reason for layer in coverage.float_layers}


class TestVirtual:
    def test_every_known_op_quantizes_its_input(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 2))
        assert placed(model) == {"0.input", "0.weight", "1.input", "2.input", "4.input", "4.weight"}

    @pytest.mark.parametrize(
        ("changes", "wanted"),
        [
            ({}, {"conv.input", "conv.weight"}),
            ({"SCHEDULE.FUSE_BN": True}, {"conv.input", "conv.weight"}),
            ({"SCHEDULE.DISABLE_UNNECESSARY_QUANT": False}, {"conv.input", "conv.weight", "bn.input", "relu.input"}),
            (
                {"SCHEDULE.DISABLE_UNNECESSARY_QUANT": False, "SCHEDULE.FUSE_BN": True},
                {"conv.input", "conv.weight", "relu.input"},
            ),
        ],
        ids=["default", "folded", "all", "folded, all"],
    )
    def test_conv_bn_relu(self, changes: dict[str, Any], wanted: set[str]) -> None:
        assert placed(ConvBnRelu(), changes) == wanted

    def test_absorbed_ops_say_by_whom(self) -> None:
        assert floats(ConvBnRelu()) == {"bn": "absorbed by conv", "relu": "absorbed by bn"}

    def test_a_chain_is_broken_where_somebody_else_reads(self) -> None:
        class Fork(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 1)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                x = self.conv(x)
                return F.relu(x), x

        assert placed(Fork()) == {"conv.input", "conv.weight", "relu.input"}

    @pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.sigmoid, lambda x: F.relu(input=x)])
    def test_linear_absorbs_any_activation(self, activation: Any) -> None:
        class Mlp(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return activation(self.fc(x))

        assert placed(Mlp()) == {"fc.input", "fc.weight"}

    def test_add_is_float_unless_asked_for(self) -> None:
        assert not any("add" in name for name in placed(Residual()))
        assert floats(Residual())["add"] == "A.QADD.ENABLE_QUANT is off"

    def test_each_input_of_an_add_has_its_own_identity(self) -> None:
        qmodel = QuantModel(Residual(), qconfig({"A.QADD.ENABLE_QUANT": True}))
        # The stem's output is read by the convolution and by the add: one tensor, one quantizer.
        assert {name for name in sites(qmodel) if "add" in name or "shared" in name} == {
            "add.input.0",
            "stem.relu.shared",
        }
        assert floats(Residual(), {"A.QADD.ENABLE_QUANT": True})["relu"] == "absorbed by add"

    def test_add_relu_without_absorption(self) -> None:
        changes = {"A.QADD.ENABLE_QUANT": True, "SCHEDULE.DISABLE_UNNECESSARY_QUANT": False}
        assert "relu.input" in placed(Residual(), changes)

    @pytest.mark.parametrize("op", [torch.matmul, torch.mul, torch.sub, lambda x, y: torch.cat([x, y])])
    def test_other_multi_input_ops_need_no_asking(self, op: Any) -> None:
        class Two(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return op(x, y)

        assert {name.partition(".")[2] for name in placed(Two())} == {"input.0", "input.1"}


class TestSharing:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.a(x), self.b(x), self.c(x)]

    def test_one_tensor_one_scale_however_many_consumers(self) -> None:
        assert placed(self.Branches()) == {"x.shared", "a.weight", "b.weight", "c.weight"}

    def test_another_spec_has_a_scale_of_its_own(self) -> None:
        changes = {"A.SPECIFIC": [{"b": ["QUANTIZER.BIT", 4]}]}
        qmodel = calibrated(self.Branches(), [torch.randn(8, 4)], qconfig(changes))
        assert sites(qmodel) == {"x.shared", "b.input", "a.weight", "b.weight", "c.weight"}
        assert site(qmodel, "b.input").spec.bits == 4
        assert site(qmodel, "x.shared").scale < site(qmodel, "b.input").scale

    def test_another_observer_has_a_scale_of_its_own(self) -> None:
        changes = {"A.SPECIFIC": [{"[bc]": ["OBSERVER.TYPE", "percentile", "OBSERVER.PERCENTILE.ALPHA", 0.1]}]}
        qmodel = calibrated(self.Branches(), [torch.randn(64, 4)], qconfig(changes))
        assert sites(qmodel) == {"a.input", "x.shared", "a.weight", "b.weight", "c.weight"}
        assert site(qmodel, "x.shared").scale < site(qmodel, "a.input").scale

    def test_a_key_written_with_its_default_is_no_other_spec(self) -> None:
        names = placed(self.Branches(), {"A.SPECIFIC": [{"b": ["OBSERVER.TYPE", "minmax"]}]})
        assert names == {"x.shared", "a.weight", "b.weight", "c.weight"}

    def test_a_module_called_twice_has_a_scale_per_call(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.fc(10 * self.fc(x))

        qmodel = calibrated(Twice(), [torch.randn(8, 4)])
        inputs = [q for q in qmodel.quantizers() if q.name.startswith("fc.input") and not q.fake_fused]
        assert len(inputs) == 2 and len({float(q.scale) for q in inputs}) == 2
        assert len([name for name in sites(qmodel) if "weight" in name]) == 1

    def test_tied_weights_are_quantized_each_in_its_place(self) -> None:
        model, ids = Tied(), torch.arange(12).reshape(2, 6)
        qmodel = calibrated(model, [ids])
        assert sites(qmodel) == {"embed.weight", "head.input", "head.weight"}
        assert torch.equal(qmodel(ids), model(ids)) is False
        assert qmodel.model.embed.op.weight is qmodel.model.head.op.weight


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
class TestRuntimes:
    def test_residual_adds_are_quantized(self, backend: str) -> None:
        names = placed(Residual(), backend=backend)
        shared = "stem.relu.output" if backend != "tensorrt" else "stem.relu.shared"
        second = "conv.output" if backend != "tensorrt" else "add.input.0"
        assert {shared, second} <= names

    def test_batch_norms_are_folded(self, backend: str) -> None:
        assert not any(
            isinstance(m, nn.BatchNorm2d) for m in QuantModel(Residual(), qconfig(backend=backend)).modules()
        )

    def test_of_a_transformer_the_linears_alone(self, backend: str) -> None:
        names = placed(Block(), backend=backend)
        assert {name.rpartition(".")[0] for name in names if name.endswith("weight")} == {
            *("embed", "qkv", "proj", "fc1", "fc2")
        }
        rest = {name for name in names if name.rpartition(".")[0] not in ("embed", "qkv", "proj", "fc1", "fc2")}
        assert rest == set()
        reasons = floats(Block(), backend=backend)
        assert reasons["add"].startswith("no convolution feeds it")
        assert reasons["softmax"] == f"{backend} runs softmax in float"
        assert reasons["matmul"] == f"{backend} runs matmul in float"

    def test_an_explicit_key_wins_and_says_what_it_costs(self, backend: str) -> None:
        with pytest.warns(
            UserWarning, match=rf"A.QADD.ENABLE_QUANT=False is obeyed, against the {backend} profile: .*float"
        ):
            qmodel = QuantModel(Residual(), qconfig({"A.QADD.ENABLE_QUANT": False}, backend=backend))
        assert "add.input.0" not in sites(qmodel)
        assert any("against the" in note for note in qmodel.coverage.notes)

    def test_a_key_that_agrees_with_the_profile_costs_nothing(self, backend: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explicit = placed(Residual(), {"A.QADD.ENABLE_QUANT": True, "SCHEDULE.FUSE_BN": True}, backend)
        assert explicit == placed(Residual(), backend=backend)

    def test_an_explicit_key_for_one_layer_wins(self, backend: str) -> None:
        changes = {"A.SPECIFIC": [{"add_1": ["QADD.ENABLE_QUANT", True]}]}
        with pytest.warns(UserWarning, match=r"A.QADD.ENABLE_QUANT=True is obeyed"):
            names = placed(Block(), changes, backend)
        assert any(name.startswith("add_1.") for name in names)
        assert not any(name.startswith("add.") for name in names)

    def test_unfused_batch_norm_is_obeyed_with_a_warning(self, backend: str) -> None:
        with pytest.warns(UserWarning, match=r"SCHEDULE.FUSE_BN=False is obeyed.*batch norms stay"):
            qmodel = QuantModel(Residual(), qconfig({"SCHEDULE.FUSE_BN": False}, backend=backend))
        assert sum(isinstance(m, nn.BatchNorm2d) for m in qmodel.modules()) == 2

    def test_functional_linears_count(self, backend: str) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(4, 4))

            def forward(self, x: Tensor) -> Tensor:
                return torch.addmm(self.w[0], F.linear(x, self.w), self.w)

        assert placed(Functional(), backend=backend) == {"linear.input", "linear.weight", "addmm.input", "addmm.weight"}


def test_onnxruntime_quantizes_outputs_behind_the_relu() -> None:
    names = placed(Residual(), backend="onnxruntime")
    assert names >= {"stem.conv.input", "stem.relu.output", "conv.output", "relu.output", "adaptive_avg_pool2d.output"}
    assert "stem.conv.output" not in names and "add.output" not in names
    assert "fc.input" not in QuantModel(Residual(), qconfig(backend="onnxruntime")).plan  # it is the pool's, flattened


def test_a_quantized_output_has_the_format_that_all_its_readers_want() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.a(x)
            return self.b(x), self.c(x)

    def observers(layers: str) -> dict[str, str]:
        changes = {"A.SPECIFIC": [{layers: ["OBSERVER.TYPE", "percentile"]}]}
        plan = QuantModel(Fork(), qconfig(changes, backend="onnxruntime")).plan
        return {name: site.observer for name, site in plan.items() if site.role != "weight"}

    assert observers("[bc]") == {
        "a.input": "minmax",
        "a.output": "percentile",
        "b.output": "percentile",
        "c.output": "percentile",
    }
    assert observers("b") == {  # they disagree: the output keeps its own, and `b` rounds it once more
        "a.input": "minmax",
        "a.output": "minmax",
        "b.input": "percentile",
        "b.output": "percentile",
        "c.output": "minmax",
    }


def test_a_registered_module_may_name_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = Doubled()

        def forward(self, x: Tensor) -> Tensor:
            return self.doubled(image=x)

    row = OpRow("doubled", OpKind.UNARY, inputs=("input",), implementation=QuantOpr)
    monkeypatch.setitem(QMODULE_MAP, Doubled, row)
    assert placed(Net()) == {"doubled.input"}


def test_a_gate_called_twice_has_a_site_per_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gate = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.b(self.gate(self.a(x))))

    assert {name for name in placed(Twice(), backend="onnxruntime") if "gate.gate" in name} == {
        *("gate.gate", "gate.gate.2")
    }


def test_a_format_that_does_not_follow_a_quantized_output() -> None:
    """Also where the output is moved in between."""
    changes = {"W.SPECIFIC": [{"2": ["QUANTIZER.TYPE", "fp8"]}], "A.SPECIFIC": [{"2": ["QUANTIZER.DISABLE", True]}]}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(BackendError, match="fp8 at 2: its input is the quantized output of 0"):
        QuantModel(model, qconfig(changes, backend="onnxruntime"))


@pytest.mark.parametrize("is_moved", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 4, 4), {"experts", "matmul.input.0"}),
        ((4, 4), {"matmul.input.0", "matmul.input.1"}),
        ((1, 4, 4), {"matmul.input.0", "matmul.input.1"}),
    ],
    ids=["stack", "matrix", "stack of one"],
)
def test_stacked_matrices_are_a_weight(shape: tuple[int, ...], is_moved: bool, expected: set[str]) -> None:
    """A single matrix is an operand like any other."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, self.experts.transpose(-1, -2) if is_moved else self.experts)

    assert placed(Stacked()) == expected


class Loose(nn.Module):
    """Layers in code that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Linear(4, 2)
        self.act, self.inplace, self.flat = nn.ReLU(), nn.ReLU(inplace=True), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        x = self.inplace(self.act(self.pool(self.conv(x))))
        return self.fc(self.flat(x.mean((2, 3))))


@pytest.mark.parametrize(("backend", "found"), [("virtual", {"pool.input", "act.input"}), ("onnxruntime", set())])
def test_layers_in_code_that_cannot_be_traced(backend: str, found: set[str]) -> None:
    plan = QuantModel(Loose(), qconfig(backend=backend)).plan
    assert set(plan) == {"conv.input", "conv.weight", "fc.input", "fc.weight"} | found
    reason = "onnxruntime runs max_pool in float" if backend == "onnxruntime" else None
    assert plan.floats.get("pool") == reason
    assert backend != "virtual" or plan.floats["inplace"] == IN_PLACE


def test_groups_in_code_that_cannot_be_traced() -> None:
    values = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 3, "A.QUANTIZER.DISABLE": True}
    with pytest.raises(BackendError, match="GROUP_SIZE=3 at fc: 4 inputs do not make whole groups"):
        QuantModel(
            Loose(), qconfig({**values, "W.SPECIFIC": [{"conv": ["QUANTIZER.DISABLE", True]}]}, backend="openvino")
        )


def test_ops_on_written_and_on_hidden_values_say_why_they_are_float() -> None:
    class Code(nn.Module):
        def forward(self, scores: Tensor, hidden: Tensor) -> Tensor:
            scores = scores * 2
            scores[:, :2].add_(1)
            return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)

    plan = QuantModel(Code(), qconfig({"A.QADD.ENABLE_QUANT": True})).plan
    assert plan.floats == {"add_": IN_PLACE, "softmax": HIDDEN}


def test_a_consumer_with_another_spec_reads_a_quantized_output() -> None:
    """Its own quantizer stands behind the output's, as it would in the runtime; neither is lost."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = self.a(x)
            return self.b(x), self.c(x), torch.cat([x, x.relu()])

    changes = {"A.SPECIFIC": [{"cat": ["OBSERVER.TYPE", "percentile", "OBSERVER.PERCENTILE.ALPHA", 0.2]}]}
    qmodel = calibrated(Chain(), [torch.randn(2, 3, 8, 8)], qconfig(changes, backend="onnxruntime"))
    assert {"a.output", "cat.input.0"} <= sites(qmodel)
    (identity,) = [n for n in qmodel.model.graph.nodes if n.target == "cat_input_0"]
    assert [n.target for n in identity.all_input_nodes] == ["a_output"] and len(identity.users) == 1
    assert site(qmodel, "cat.input.0").scale < site(qmodel, "a.output").scale


def test_tensorrt_is_symmetric_and_refuses_otherwise() -> None:
    qmodel = calibrated(Residual(), [torch.randn(2, 3, 8, 8)], qconfig(backend="tensorrt"))
    assert all(bool((q.zero_point == 0).all()) and q.spec.symmetric for q in qmodel.quantizers())


def test_a_glob_that_matches_nothing_names_the_near_ones() -> None:
    with pytest.warns(UserWarning, match=r"A.SPECIFIC: the glob 'stem.covn' matches no layer.*near names: .*stem.conv"):
        QuantModel(Residual(), qconfig({"A.SPECIFIC": [{"stem.covn": ["QUANTIZER.BIT", 4]}]}))


def test_the_warning_points_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="matches no layer") as caught:
        QuantModel(Residual(), qconfig({"A.SPECIFIC": [{"nowhere": ["QUANTIZER.BIT", 4]}]}))
    assert caught[0].filename == __file__


def test_disable_by_glob_leaves_the_layer_in_float() -> None:
    changes = {
        "A.SPECIFIC": [{"fc": ["QUANTIZER.DISABLE", True]}],
        "W.SPECIFIC": [{"fc": ["QUANTIZER.DISABLE", True]}, {"conv": ["QUANTIZER.DISABLE", True]}],
    }
    names = placed(Residual(), changes)
    assert not any(name.startswith("fc.") for name in names)
    assert "conv.input" in names and "conv.weight" not in names
    assert floats(Residual(), changes)["fc"] == "QUANTIZER.DISABLE is true in the config"


def test_weight_only() -> None:
    values = {"A.QUANTIZER": {"DISABLE": True}, "W.QUANTIZER.BIT": 4, "W.QSCHEME": "per-group-symmetric"}
    model = nn.Sequential(nn.Linear(256, 4), nn.ReLU())
    qmodel = QuantModel(model, qconfig(values, backend="onnxruntime"))
    assert sites(qmodel) == {"0.weight"}
    assert site(qmodel, "0.weight").scale.shape == (4 * 2,)


def test_skipped_modules_stay_float_and_are_not_entered() -> None:
    qmodel = QuantModel(Residual(), qconfig({"SKIP_TRACE_MODULES": ["stem", "fc"]}))
    assert sites(qmodel) == {"conv.input", "conv.weight", "adaptive_avg_pool2d.input"}
    reasons = {layer.name: layer.reason for layer in qmodel.coverage.float_layers}
    assert reasons["stem"] == reasons["fc"] == "SKIP_TRACE_MODULES keeps it in float"
    assert (qmodel.coverage.num_weighted_quantized, qmodel.coverage.num_weighted) == (1, 3)


def test_a_layer_that_stays_float_absorbs_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    section = {"QUANTIZER": {"BIT": 8}, "SPECIFIC": [{"0": ["QUANTIZER.DISABLE", True]}]}
    coverage = QuantModel(model, parse_qconfig({"DEVICE": "cpu", "W": section, "A": section})).coverage
    assert [layer.name for layer in coverage.quantized] == ["1", "2"]
    assert placed(model, {"SKIP_TRACE_MODULES": ["0"]}) == {"1.input", "2.input", "2.weight"}


def test_a_skip_glob_without_a_module_warns_with_near_names() -> None:
    config = {
        "DEVICE": "cpu",
        "SKIP_TRACE_MODULES": ["head*"],
        "W": {"QUANTIZER": {"BIT": 8}},
        "A": {"QUANTIZER": {"BIT": 8}},
    }
    model = nn.Sequential()
    model.add_module("heat", nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="SKIP_TRACE_MODULES: the glob 'head\\*' matches no module; near names: heat"):
        QuantModel(model, parse_qconfig(config))


def test_a_layer_that_reads_constants_alone_still_has_its_weight_quantized() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.register_buffer("ids", torch.arange(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table(self.ids)

    section = {"QUANTIZER": {"BIT": 8}}
    coverage = QuantModel(Positions(), parse_qconfig({"DEVICE": "cpu", "W": section, "A": section})).coverage
    assert coverage.num_weighted_quantized == coverage.num_weighted == 1


def test_a_concat_of_scores_and_computed_coordinates_stays_float() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            scores, offsets = self.left(x).sigmoid(), self.right(x)
            features = torch.cat([scores, offsets], 1)
            return torch.cat([features, (offsets * 2 - 0.5) * 640], 1)

    coverage = QuantModel(Head(), parse_qconfig({"BACKEND": "onnxruntime", "DEVICE": "cpu", **qbits})).coverage
    assert any(layer.name == "cat" for layer in coverage.quantized)
    assert "no convolution feeds it" in {layer.name: layer.reason for layer in coverage.float_layers}["cat_1"]


qbits: dict[str, Any] = {"W": {"QUANTIZER": {"BIT": 8}}, "A": {"QUANTIZER": {"BIT": 8}}}


class Gated(nn.Module):
    """Squeeze and excitation, a factor that is a parameter, and one that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.last(x) * self.scale * 2


@pytest.mark.parametrize(("backend", "expected"), [("onnxruntime", {"mul"}), ("openvino", set())])
def test_a_gate_of_convolutions_is_multiplied_in_integers(backend: str, expected: set[str]) -> None:
    assert {name.partition(".")[0] for name in placed(Gated().eval(), backend=backend) if "mul" in name} == expected


@pytest.mark.parametrize(("backend", "expected"), [("onnxruntime", True), ("openvino", False)])
def test_an_add_behind_a_product_follows_it(backend: str, expected: bool) -> None:
    """The model's input is not fed by a convolution; a product in integers is."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return x + y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()

    names = placed(Added().eval(), backend=backend)
    assert ("mul.output" in names, "add.output" in names) == (expected, expected)


class Swished(nn.Module):
    """The gate's other operand comes from an activation that ONNX Runtime runs in float."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.stem, self.activation, self.last = nn.Conv2d(3, 4, 3), activation, nn.Conv2d(4, 4, 1)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.stem(x))
        return self.last(x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid())


@pytest.mark.parametrize(
    ("activation", "expected"), [(nn.SiLU(), True), (nn.ReLU(), True), (nn.Hardswish(), True), (nn.Mish(), False)]
)
def test_a_product_behind_a_float_activation_stays_float(activation: nn.Module, expected: bool) -> None:
    found = placed(Swished(activation).eval(), backend="onnxruntime")
    assert any(name.startswith("mul") for name in found) == expected


def test_an_unknown_function_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.erfcx(self.fc(x))

    assert QuantModel(Net(), qconfig()).plan.floats["special_erfcx"].startswith("unknown op special_erfcx")
