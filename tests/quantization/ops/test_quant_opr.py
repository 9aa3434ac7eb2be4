from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm

from sparsebit.errors import ConfigError
from sparsebit.graph.ops.op_rows import OpKind
from sparsebit.quantization import (
    QMODULE_MAP,
    MultipleInputsQuantOpr,
    QIdentity,
    QuantModel,
    QuantOpr,
    register_qmodule,
)
from tests.quantization.tiny import calibrated, qconfig, simulated, site, sites


def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


fx.wrap("doubled")


class Swish(nn.Module):
    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class TestRegister:
    def test_a_function(self) -> None:
        @register_qmodule(sources=[doubled])
        class QDoubled(QuantOpr):
            def compute(self, x: Tensor, factor: float = 2.0) -> Tensor:
                return doubled(x, factor) + 1

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return doubled(x, factor=3.0)

        x = torch.randn(5)
        qmodel = calibrated(Model(), [x])
        assert sites(qmodel) == {"doubled.input"} and isinstance(qmodel.model.doubled, QDoubled)
        assert torch.equal(qmodel(x), simulated(site(qmodel, "doubled.input"), x) * 3 + 1)

    def test_a_torch_function_that_nobody_knew(self) -> None:
        @register_qmodule(sources=[torch.erf, "erf"])
        class QErf(QuantOpr):
            pass

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.erf(x) - x.erf()

        assert {"x.shared"} <= sites(QuantModel(Model(), qconfig()))

    def test_a_module_class_becomes_a_leaf(self) -> None:
        @register_qmodule(sources=[Swish])
        class QSwish(QuantOpr):
            def compute(self, x: Tensor) -> Tensor:
                return self.op(x) * self.beta  # attributes are the op's

        x = torch.randn(5)
        model = nn.Sequential(Swish(0.5))
        qmodel = calibrated(model, [x])
        assert isinstance(qmodel.model.get_submodule("0"), QSwish)
        assert torch.equal(qmodel(x), model(simulated(site(qmodel, "0.input"), x)) * 0.5)
        assert repr(next(m for m in qmodel.modules() if isinstance(m, QSwish))).startswith("QSwish(input=uint8 scale=")

    def test_a_method(self) -> None:
        @register_qmodule(sources=["cumsum"])
        class QCumsum(QuantOpr):
            pass

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.cumsum(dim=1)

        x = torch.randn(3, 4)
        qmodel = calibrated(Model(), [x])
        assert torch.equal(qmodel(x), simulated(site(qmodel, "cumsum.input"), x).cumsum(1))

    def test_several_inputs(self) -> None:
        @register_qmodule(sources=[torch.hypot], inputs=("input", "other"))
        class QHypot(MultipleInputsQuantOpr):
            def compute(self, x: Tensor, other: Tensor) -> Tensor:
                return torch.hypot(x, other) * 2

        class Model(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return torch.hypot(x, other=y)

        x, y = torch.randn(5), torch.randn(5)
        qmodel = calibrated(Model(), [(x, y)])
        assert QMODULE_MAP[torch.hypot].kind is OpKind.MULTI
        one, other = (simulated(site(qmodel, f"hypot.input.{i}"), value) for i, value in enumerate((x, y)))
        assert torch.equal(qmodel(x, y), torch.hypot(one, other) * 2)

    def test_ones_own_weighted_layer(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gain = nn.Parameter(torch.randn(4, 6))

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, self.gain)

        @register_qmodule(sources=[Scaled], weight="gain")
        class QScaled(QuantOpr):
            def compute(self, x: Tensor) -> Tensor:
                assert self.weight_quantizer is not None
                return F.linear(x, self.weight_quantizer(self.gain))

        x, model = torch.randn(5, 6), nn.Sequential(Scaled())
        qmodel = calibrated(model, [x], qconfig(bits=4), asym=True)
        assert sites(qmodel) == {"0.input", "0.weight"}
        expected = F.linear(simulated(site(qmodel, "0.input"), x), simulated(site(qmodel, "0.weight"), model[0].gain))
        assert torch.equal(qmodel(x), expected)

    def test_it_is_used_although_the_tensor_is_shared(self) -> None:
        @register_qmodule(sources=[torch.erf])
        class QErf(QuantOpr):
            def compute(self, x: Tensor) -> Tensor:
                return torch.erf(x) + 100

        class Model(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return torch.erf(x), torch.sigmoid(x)

        x = torch.randn(5)
        qmodel = calibrated(Model(), [x])
        assert sites(qmodel) == {"x.shared"} and bool((qmodel(x)[0] > 50).all())

    def test_under_a_runtime_what_was_taught_is_quantized(self) -> None:
        @register_qmodule(sources=[torch.erf])
        class QErf(QuantOpr): ...

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.erf(torch.sigmoid(x))

        assert sites(QuantModel(Model(), qconfig(backend="onnxruntime"))) == {"erf.input"}

    def test_what_is_no_quant_opr(self) -> None:
        with pytest.raises(ConfigError, match="on a subclass of QuantOpr"):
            register_qmodule(sources=[torch.erf])(nn.Linear)

    def test_what_is_no_op(self) -> None:
        class QThree(QuantOpr): ...

        with pytest.raises(ConfigError, match=r"register_qmodule\(\[3\]\).* allowed: module classes, functions"):
            register_qmodule(sources=[3])(QThree)


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[:, :1], self.weight, self.weight[0])


class Frozen(nn.Module):
    """A part without gradients on half of the input, times the other half: autograd refuses that for a view.

    The half is not contiguous; on a contiguous copy of it, `F.linear` gives a view.
    """

    def __init__(self, part: str, mode: Any) -> None:
        super().__init__()
        self.layer, self.block, self.function = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), ByFunction()
        self.part, self.mode = part, mode

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.hsplit(x, 2)
        with self.mode():
            y: Tensor = getattr(self, self.part)(left)
        return y.mul_(right)


class TestWeightedLayers:
    @pytest.mark.parametrize("layer", [
        nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), nn.ConvTranspose1d(4, 6, 3, stride=2), nn.Linear(6, 3),
    ], ids=["conv", "transposed", "linear"])  # fmt: skip
    def test_parametrized_weights_stay_parametrized(self, layer: nn.Module) -> None:
        model, x = nn.Sequential(weight_norm(copy.deepcopy(layer))).eval(), torch.randn(2, 4, 6)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        qmodel = calibrated(model, [x])
        torch.testing.assert_close(qmodel(x), model(x), atol=0.05, rtol=0.05)
        assert not torch.equal(qmodel(x), model(x))
        after = qmodel.model.state_dict()
        assert all(torch.equal(after[name.replace("0.", "0.op.", 1)], tensor) for name, tensor in before.items())
        qmodel(x).sum().backward()
        assert all(parameter.grad is not None for parameter in qmodel.parameters())

    def test_hooks_of_the_layer_still_run(self) -> None:
        seen: list[tuple[int, ...]] = []
        model = nn.Sequential(nn.Linear(6, 3))
        model[0].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
        qmodel = calibrated(model, [torch.randn(2, 6)])
        seen.clear()
        qmodel(torch.randn(5, 6))
        assert seen == [(5, 3)]

    def test_a_subclass_of_a_layer_computes_by_itself(self) -> None:
        class Flipped(nn.Conv1d):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.flip(-1)).flip(-1)

        model, x = nn.Sequential(Flipped(4, 3, 3)), torch.randn(2, 4, 6)
        qmodel = calibrated(model, [x])
        torch.testing.assert_close(qmodel(x), model(x), atol=0.05, rtol=0.05)
        assert any(quantizer.target == "weight" and quantizer.is_enable for quantizer in qmodel.quantizers())

    @pytest.mark.sample(5)
    @pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.set_grad_enabled(False)], ids=["no_grad", "set"])
    @pytest.mark.parametrize("part", ["layer", "block", "function"])
    @pytest.mark.parametrize("is_accelerated", [False, True])
    def test_what_is_computed_without_gradients_may_be_written_with_them(
        self, part: str, mode: Any, is_accelerated: bool
    ) -> None:
        model, x = Frozen(part, mode).train(), torch.randn(3, 2, 4, 4)
        qmodel = calibrated(model, [x], qconfig(bits=16)).train()
        qmodel.accelerate(is_accelerated)
        expected, got = (run(x.clone().requires_grad_()) for run in (model, qmodel))
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
        assert got.requires_grad

    def test_attributes_are_the_ops(self) -> None:
        qmodel = QuantModel(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2)), qconfig())
        layer = next(module for module in qmodel.modules() if isinstance(module, QuantOpr))
        assert layer.stride == (2, 2) and layer.weight is layer.op.weight
        with pytest.raises(AttributeError, match="nothing"):
            _ = layer.nothing


@pytest.mark.parametrize("call", [F.relu, torch.relu, "relu"], ids=["function", "torch", "method"])
def test_repr_is_one_line(call: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if isinstance(call, str) else call(x)

    qmodel = QuantModel(Model(), qconfig())
    assert repr(qmodel.model.relu) == "Q[relu](input=uint8 uncalibrated)"


def test_qidentity_is_a_quantizer_alone() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    x = torch.randn(5)
    qmodel = calibrated(Model(), [x])
    (identity,) = [module for module in qmodel.modules() if isinstance(module, QIdentity)]
    assert torch.equal(identity(x), simulated(identity.input_quantizer, x))
    assert repr(identity).startswith("QIdentity(uint8 scale=")


class TestFirstSparsebit:
    """Classes as its users wrote them."""

    @pytest.mark.parametrize("source", [torch.Tensor.erf, "erf"], ids=["method", "name"])
    def test_methods_of_tensors(self, source: object) -> None:
        @register_qmodule(sources=[source])
        class QErf(QuantOpr):
            def _forward(self, x: Tensor) -> Tensor:
                return torch.erf(x)

        class Erf(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.erf()

        x = torch.randn(8, 4)
        qmodel = QuantModel(Erf(), qconfig(bits=16))
        assert [type(m) for m in qmodel.modules() if isinstance(m, QuantOpr)] == [QErf]
        torch.testing.assert_close(qmodel(x), x.erf())

    def test_a_constructor_with_the_module_and_a_config(self) -> None:
        class Gain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gain = 3.0

            def forward(self, x: Tensor) -> Tensor:
                return self.gain * x

        @register_qmodule(sources=[Gain])
        class QGain(QuantOpr):
            def __init__(self, org_module: Gain, config: object = None) -> None:
                super().__init__()
                self.gain = org_module.gain
                self._repr_info = "QGain "

            def forward(self, x_in: Tensor) -> Tensor:
                return self.gain * self.input_quantizer(x_in)

        x = torch.randn(8, 4)
        qmodel = calibrated(nn.Sequential(Gain()), [x], qconfig(bits=2))
        (layer,) = (m for m in qmodel.modules() if type(m) is QGain)
        assert torch.equal(qmodel(x), 3 * layer.input_quantizer(x))
        assert len(qmodel(x).unique()) <= 4

    def test_set_quant_of_one_op(self) -> None:
        x = torch.randn(8, 4)
        qmodel = calibrated(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), [x], qconfig(bits=2))
        first, second = (m for m in qmodel.modules() if isinstance(m, QuantOpr))
        first.set_quant(w_quant=True)
        assert first.weight_quantizer.is_enable and not first.input_quantizer.is_enable
        assert second.weight_quantizer.is_enable and second.input_quantizer.is_enable
        first.set_quant(w_quant=True, a_quant=True)
        assert first.input_quantizer.is_enable

    def test_identity_is_an_op(self) -> None:
        class Add(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + x.relu()

        x = torch.randn(8, 4)
        qmodel = calibrated(Add(), [x], qconfig({"A.QADD.ENABLE_QUANT": True}))
        identities = [m for m in qmodel.modules() if isinstance(m, QIdentity)]
        assert identities and all(isinstance(m, QuantOpr) and m.weight_quantizer is None for m in identities)
        identities[0].set_quant(a_quant=False)
        assert not identities[0].input_quantizer.is_enable
        assert all(layer.op == "QIdentity" or layer.op.startswith("Q") for layer in qmodel.coverage.quantized)


def test_attributes_of_a_layer_are_set_where_it_reads_them() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), torch.randn(2, 3, 9, 9)
    qmodel = calibrated(model, [x], qconfig(bits=16))
    qmodel.set_quant(w_quant=False, a_quant=False)
    weight = torch.randn(4, 3, 3, 3)
    for layers in (model, qmodel.model):
        layer: Any = layers.get_submodule("0")
        layer.weight, layer.bias, layer.stride = nn.Parameter(weight), None, (2, 2)
    torch.testing.assert_close(qmodel(x), model(x))
    assert sum(name.endswith("weight") for name, _ in qmodel.named_parameters()) == 2
