from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.numerics import reference
from sparsebit.numerics.spec import PerChannel, PerGroup
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from tests.quantization.tiny import calibrated, qconfig, site, sites

NUM_EXPERTS, WIDTH, HIDDEN = 4, 6, 10


class Experts(nn.Module):
    """Stacked matrices, indexed by where the data are sent: nothing that can be traced."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        up, down = (NUM_EXPERTS, HIDDEN, WIDTH), (NUM_EXPERTS, WIDTH, HIDDEN)
        self.up = nn.Parameter(torch.randn(down if transposed else up))
        self.down = nn.Parameter(torch.randn(up if transposed else down))
        self.up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight if self.transposed else F.linear(x, weight)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (rows,) = torch.where(chosen == expert)
            hidden = F.silu(self.apply_weight(x[rows], self.up[expert]) + self.up_bias[expert])
            result = result.index_add(0, rows, self.apply_weight(hidden, self.down[expert]))
        return result


class Routed(nn.Module):
    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS), experts or Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x).argmax(-1))


class Batched(nn.Module):
    """All experts at once, in products of stacks: this can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(0).expand(NUM_EXPERTS, -1, -1), self.weight).sum(0)


class Gathered(Experts):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if float(x.sum()) == 0.5:  # cannot be traced
            return x
        hidden = F.silu(torch.bmm(self.up[chosen], x.unsqueeze(-1)).squeeze(-1))
        return torch.einsum("bhw,bw->bh", self.down[chosen], hidden)


def weights_only() -> Any:
    return qconfig({"A.QUANTIZER.DISABLE": True})


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_quantized_per_expert_and_output(transposed: bool) -> None:
    torch.manual_seed(0)
    model, x = Routed(Experts(transposed)).eval(), torch.randn(16, WIDTH)
    qmodel = calibrated(model, [x], weights_only(), example_inputs=x)
    axis = 1 if transposed else 2
    assert site(qmodel, "experts.up").spec.granularity == PerGroup(axis, WIDTH)
    assert site(qmodel, "experts.down").spec.granularity == PerGroup(axis, HIDDEN)
    assert site(qmodel, "experts.up").scale.numel() == NUM_EXPERTS * HIDDEN
    rounded = copy.deepcopy(model)
    for layer in qmodel.model.modules():
        if isinstance(layer, QuantizedParameter):
            quantizer, name = layer.weight_quantizer, layer.parameter_name
            value = reference.fake_quantize(layer.parameter, quantizer.scale, quantizer.zero_point, quantizer.spec)
            getattr(rounded.experts, name).data.copy_(value)
    weight = site(qmodel, "router.weight")
    rounded.router.weight.data.copy_(weight(model.router.weight))
    torch.testing.assert_close(qmodel(x), rounded(x))
    assert not torch.equal(qmodel(x), model(x))
    qmodel.set_quant()
    assert torch.equal(qmodel(x), model(x))


def test_square_stacks_have_the_axis_that_products_sum_up() -> None:
    class Square(nn.Module):
        def __init__(self, transposed: bool) -> None:
            super().__init__()
            self.transposed, self.weight = transposed, nn.Parameter(torch.randn(6, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            for index in range(int(x.abs().sum() > 0), 6):
                x = x @ (self.weight[index].T if self.transposed else self.weight[index])
            return x

    x = torch.randn(3, 6)
    for transposed, axis in ((False, 1), (True, 2)):
        qmodel = QuantModel(Square(transposed), weights_only(), example_inputs=x)
        assert site(qmodel, "weight").spec.granularity == PerGroup(axis, 6)


def test_gathered_experts() -> None:
    model, x = Routed(Gathered()).eval(), torch.randn(16, WIDTH)
    qmodel = calibrated(model, [x], weights_only(), example_inputs=x)
    assert site(qmodel, "experts.up").spec.granularity == PerGroup(2, WIDTH)
    assert site(qmodel, "experts.down").spec.granularity == PerGroup(2, HIDDEN)


def test_a_stack_in_a_product_of_the_graph_is_a_weight_not_an_activation() -> None:
    model, x = Batched().eval(), torch.randn(5, WIDTH)
    for example in (None, x):
        qmodel = calibrated(model, [x], qconfig({"W.QUANTIZER.BIT": 4}), example_inputs=example)
        assert sites(qmodel) == {"bmm.input.0", "weight"}
        assert site(qmodel, "weight").spec.granularity == PerGroup(1, WIDTH)
        assert site(qmodel, "weight").spec.bits == 4
        quantizer = site(qmodel, "weight")
        assert torch.unique(qmodel.model(x)).numel() > 1 and quantizer.is_enable
        assert qmodel.coverage.parameter_fraction == 1.0


def test_the_drawing_shows_them() -> None:
    assert "QuantizedParameter(weight: int8" in QuantModel(Batched(), qconfig()).dump_mermaid()


class Indexed(nn.Module):
    """Experts that the graph indexes with what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.weight[self.router(x).argmax(-1)]
        return torch.bmm(chosen, x.unsqueeze(-1)).squeeze(-1)


class Summed(Indexed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.weight)


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
@pytest.mark.parametrize("kind", [Indexed, Summed])
def test_stacks_that_the_graph_indexes_or_sums(kind: type[nn.Module], backend: str) -> None:
    x = torch.randn(5, WIDTH)
    for example in (None, x):
        qmodel = calibrated(kind().eval(), [x], qconfig(backend=backend), example_inputs=example)
        assert site(qmodel, "weight").spec.granularity == PerGroup(2, WIDTH) and site(qmodel, "weight").is_enable


def test_without_an_example_a_sizeable_stack_is_a_weight() -> None:
    qmodel = QuantModel(Routed(), qconfig())
    assert {"experts.up", "experts.down"} <= sites(qmodel)
    transposed = Routed(Experts(transposed=True))
    transposed.experts.is_transposed = True
    assert site(QuantModel(transposed, qconfig()), "experts.up").spec.granularity == PerGroup(1, WIDTH)


def test_what_no_product_reads_stays_float() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.factor = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.table[int(x.argmax()) % 3]) @ self.factor

    coverage = QuantModel(Table(), qconfig(), example_inputs=torch.randn(8, 6)).coverage
    assert {p.name: p.format for p in coverage.parameters} == {"table": "float32", "factor": "int8"}
    assert "no matrix product reads it" in str(coverage)


def test_a_matrix_that_own_code_multiplies_with_is_quantized_per_output() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 9))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight if float(x.sum()) != 0.5 else x

    x = torch.randn(4, 6)
    assert site(QuantModel(Own(), weights_only(), example_inputs=x), "weight").spec.granularity == PerChannel(1)
    coverage = QuantModel(Own(), weights_only()).coverage  # nothing says how it is used
    assert coverage.parameter_fraction == 0.0 and "pass example_inputs" in str(coverage)


def test_a_kernel_that_own_code_convolves_with() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(6, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.kernel) if float(x.sum()) != 0.5 else x

    qmodel = QuantModel(Own(), weights_only(), example_inputs=torch.randn(2, 3, 8))
    assert site(qmodel, "kernel").spec.granularity == PerChannel(0)


def test_lists_and_dicts_of_parameters() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])
            self.more = nn.ParameterDict({"out": nn.Parameter(torch.randn(6, 2))})

        def forward(self, x: Tensor) -> Tensor:
            for index in range(int(x.shape[0] > 0 and float(x.sum()) == 0.5), 3):
                x = torch.tanh(x @ self.experts[index])
            return x @ self.more["out"]

    model, x = Listed().eval(), torch.randn(4, 6)
    qmodel = calibrated(model, [x], qconfig({"A.QUANTIZER.DISABLE": True, "W.QUANTIZER.BIT": 3}), example_inputs=x)
    assert qmodel.coverage.parameter_fraction == 1.0
    assert {p.name for p in qmodel.coverage.parameters} == {"experts.0", "experts.1", "experts.2", "more.out"}
    assert not torch.allclose(qmodel(x), model(x), atol=1e-3)
    qmodel.set_quant()
    assert torch.equal(qmodel(x), model(x))


class TestConfig:
    def test_specific_names_the_parameter_or_its_module(self) -> None:
        specific = [{"*.down": ["QUANTIZER.BIT", 4]}]
        qmodel = QuantModel(Routed(), qconfig({"W.SPECIFIC": specific}))
        assert (site(qmodel, "experts.up").spec.bits, site(qmodel, "experts.down").spec.bits) == (8, 4)
        qmodel = QuantModel(Routed(), qconfig({"W.SPECIFIC": [{"experts": ["QUANTIZER.BIT", 2]}]}))
        assert site(qmodel, "experts.up").spec.bits == 2

    def test_disable_leaves_it_in_float(self) -> None:
        qmodel = QuantModel(Routed(), qconfig({"W.SPECIFIC": [{"experts.up": ["QUANTIZER.DISABLE", True]}]}))
        assert "experts.up" not in sites(qmodel) and "experts.down" in sites(qmodel)
        (record,) = [p for p in qmodel.coverage.parameters if p.name == "experts.up"]
        assert record.reason == "QUANTIZER.DISABLE is true in the config"

    def test_skipped_modules_stay_float(self) -> None:
        qmodel = QuantModel(Routed(), qconfig({"SKIP_TRACE_MODULES": ["experts"]}))
        assert not {"experts.up", "experts.down"} & sites(qmodel)

    def test_groups(self) -> None:
        changes = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 3, "W.QUANTIZER.BIT": 4}
        qmodel = QuantModel(
            Routed(), qconfig({**changes, "A.QUANTIZER.DISABLE": True}), example_inputs=torch.randn(4, 6)
        )
        assert site(qmodel, "experts.up").spec.granularity == PerGroup(2, 3)

    def test_per_tensor(self) -> None:
        qmodel = QuantModel(Routed(), qconfig({"W.QSCHEME": "per-tensor-symmetric"}))
        assert site(qmodel, "experts.up").scale.numel() == 1


def test_coverage_of_a_mixture() -> None:
    qmodel = QuantModel(Routed(), qconfig(), example_inputs=torch.randn(4, WIDTH))
    coverage = qmodel.coverage
    assert (coverage.num_weighted_quantized, coverage.num_weighted) == (2, 2)
    (layer,) = [layer for layer in coverage.quantized if layer.name == "experts"]
    assert layer.op == "Experts" and layer.sites == {"weight.up": "int8", "weight.down": "int8"}
    assert "experts" in next(m for m in coverage.opaque if m.path == "experts").quantized_inside
    assert any("its activations stay float" in note for note in coverage.notes)


class TestLife:
    def test_master_weights_keep_their_names_and_values(self) -> None:
        model, x = Routed().eval(), torch.randn(8, WIDTH)
        qmodel = calibrated(model, [x], example_inputs=x)
        state = qmodel.state_dict()
        assert torch.equal(state["model.experts.up"], model.experts.up)
        assert isinstance(qmodel.model.experts, Experts) and type(qmodel.model.experts).__name__ == "Experts"
        assert "experts.up" in dict(qmodel.model.named_parameters())

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        model, x = Routed().eval(), torch.randn(8, WIDTH)
        qmodel = calibrated(model, [x], example_inputs=x)
        loaded = QuantModel.load(qmodel.save(tmp_path / "saved"), Routed())
        assert torch.equal(loaded(x), qmodel(x))
        fresh = QuantModel(model, qconfig(), example_inputs=x)
        fresh.load_state_dict(qmodel.state_dict())
        fresh.set_quant(w_quant=True, a_quant=True)
        assert torch.equal(fresh(x), qmodel(x))

    def test_copied(self) -> None:
        model, x = Routed().eval(), torch.randn(8, WIDTH)
        qmodel = calibrated(model, [x], example_inputs=x)
        twin = copy.deepcopy(qmodel)
        assert torch.equal(twin(x), qmodel(x))
        with torch.no_grad():
            twin.model.experts._parameters["up"].mul_(2)
        assert torch.equal(qmodel(x), calibrated(model, [x], example_inputs=x)(x))
        assert not torch.equal(twin(x), qmodel(x))

    @pytest.mark.parametrize("kind", ["uniform", "lsq"])
    def test_gradients_reach_the_master_weight(self, kind: str) -> None:
        model, x = Routed().eval(), torch.randn(32, WIDTH)
        qmodel = QuantModel(model, qconfig({"W.QUANTIZER.TYPE": kind}), example_inputs=x)
        qmodel.prepare_calibration()
        qmodel(x)
        qmodel.init_QAT()
        qmodel.train()
        for _ in range(2):  # what one step has read is not there in the next
            qmodel(x).square().sum().backward()
        grad = qmodel.model.experts._parameters["up"].grad
        assert grad is not None and bool((grad != 0).any())
        if kind == "lsq":
            scale = site(qmodel, "experts.up").scale
            assert scale.grad is not None and bool((scale.grad != 0).any())
        before = qmodel(x).detach()
        torch.optim.SGD(qmodel.parameters(), 1e-3).step()
        assert not torch.equal(qmodel(x), before)

    def test_each_is_quantized_once_per_forward(self) -> None:
        model, x = Routed().eval(), torch.randn(32, WIDTH)
        qmodel = calibrated(model, [x], example_inputs=x)
        calls = []
        handle = site(qmodel, "experts.up").register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            qmodel(x)
        assert len(calls) == 1
        handle.remove()

    def test_calibrated_in_order(self) -> None:
        model, x = Routed().eval(), torch.randn(32, WIDTH)
        qmodel = calibrated(model, [x], asym=True, example_inputs=x)
        assert site(qmodel, "experts.up").is_enable

    def test_the_float_model_is_not_touched(self) -> None:
        model, x = Routed().eval(), torch.randn(8, WIDTH)
        before = model(x)
        calibrated(model, [x], qconfig(bits=2), example_inputs=x)
        assert type(model.experts) is Experts and torch.equal(model(x), before)


class Square(nn.Module):
    """As wide inside as outside: sizes do not tell the axes apart, the equation does."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.weight, self.equation = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH)), equation

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.weight).sum(1)


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize(("equation", "axis"), [("bi,eio->beo", 1), ("bi, eoi -> beo", 2)])
def test_square_experts_in_an_einsum(equation: str, axis: int, with_example: bool) -> None:
    x = torch.randn(3, WIDTH)
    config = qconfig({"W.QSCHEME": "per-channel-symmetric"})
    qmodel = QuantModel(Square(equation), config, example_inputs=x if with_example else None)
    (parameter,) = qmodel.coverage.parameters
    assert parameter.reason is None or not parameter.reason
    assert site(qmodel, "weight").spec.granularity == PerGroup(axis, WIDTH)
