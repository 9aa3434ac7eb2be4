from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QMODULE_MAP, QuantModel, QuantOpr, parse_qconfig, register_qmodule
from sparsebit.quantization.speed.fused_activations import FusedReLU
from tests.quantization.tiny import prepared


class Net(nn.Module):
    """One ReLU module used three times (once behind a residual, for two readers), and one as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.conv3, self.conv4 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.relu, self.hidden, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.conv3(self.relu(self.conv2(x)))
        y = self.relu(x + y)
        y = F.relu(self.conv4(y)) + y
        return self.fc(F.relu(self.hidden(y.mean((2, 3)))))


def ready(weights: str = "lsq", activations: str = "lsq", scheme: str = "per-tensor-affine") -> QuantModel:
    torch.manual_seed(0)
    config = {
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"TYPE": weights, "BIT": 4}},
        "A": {"QSCHEME": scheme, "QUANTIZER": {"TYPE": activations, "BIT": 4}},
    }
    qmodel = prepared(Net(), [images()], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rectifying(qmodel: QuantModel, x: Tensor | None = None) -> list[str]:
    """The quantizers that stand for a ReLU in a training step."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fused = FusedReLU.fused

        def noting(step: FusedReLU, given: Tensor) -> object:
            output = fused(step, given)
            if output is not None:
                found.append(step.reader.input_quantizer.name)
            return output

        patch.setattr(FusedReLU, "fused", noting)
        qmodel(images() if x is None else x)
    return found


def step(qmodel: QuantModel) -> tuple[Tensor, dict[str, Tensor | None]]:
    output = qmodel(images())
    output.square().sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in qmodel.named_parameters()}


@pytest.mark.parametrize("types", [("lsq", "lsq"), ("uniform", "uniform")], ids="/".join)
def test_a_step_is_equal_bit_by_bit(types: tuple[str, str]) -> None:
    plain = ready(*types).train()
    fused = copy.deepcopy(plain)
    assert rectifying(fused) == ["conv3.input", "fc.input"]
    plain.accelerate(False)
    (expected, expected_grads), (found, found_grads) = step(plain), step(fused)
    assert torch.equal(found, expected)
    for name, grad in expected_grads.items():
        other = found_grads[name]
        assert (grad is None) == (other is None), name
        assert grad is None or (other is not None and torch.equal(grad, other)), name


def test_the_relu_runs_wherever_the_quantizer_does_not_stand_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = ready().train()
    calls = []
    relu = F.relu
    monkeypatch.setattr(F, "relu", lambda x, **more: (calls.append(1), relu(x, **more))[1])

    def count() -> int:
        calls.clear()
        qmodel(images())
        return sum(calls)

    in_training = count()
    qmodel.eval()
    in_eval = count()
    assert in_eval == in_training + 2
    qmodel.train()
    qmodel.set_quant(w_quant=True, a_quant=False)
    assert count() == in_eval
    qmodel.set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        assert count() == in_eval
    assert count() == in_training


def test_packed_before_or_after_it_is_the_same_step() -> None:
    models = [ready() for _ in range(3)]
    models[1].pack_saved_activations()
    for qmodel in models:
        qmodel.train()
    models[2].pack_saved_activations()
    assert "fc.input" in rectifying(models[1])
    steps = [step(qmodel) for qmodel in models]
    for output, grads in steps[1:]:
        assert torch.equal(output, steps[0][0])
        for name, grad in steps[0][1].items():
            other = grads[name]
            assert grad is None or (other is not None and torch.equal(grad, other)), name


@pytest.mark.parametrize("activations", ["lsq+", "pact"])
def test_grids_that_may_begin_elsewhere_do_not_rectify(activations: str) -> None:
    assert rectifying(ready(activations=activations).train()) == []


def test_signed_grids_do_not_rectify() -> None:
    assert rectifying(ready(scheme="per-tensor-symmetric").train()) == []


def test_a_grid_that_has_changed_is_seen() -> None:
    qmodel = ready().train()
    quantizer = next(quantizer for quantizer in qmodel.quantizers() if quantizer.name == "conv3.input")
    assert "conv3.input" in rectifying(qmodel)
    quantizer.zero_point.data.fill_(3.0)
    assert rectifying(qmodel) == ["fc.input"]


def test_a_grid_that_becomes_signed_is_seen() -> None:
    qmodel = ready().train()
    assert "conv3.input" in rectifying(qmodel)
    quantizer = next(quantizer for quantizer in qmodel.quantizers() if quantizer.name == "conv3.input")
    quantizer.spec = quantizer.spec.replace(symmetric=True)
    assert rectifying(qmodel) == ["fc.input"]
    found = qmodel(images())
    qmodel.accelerate(False)
    assert torch.equal(found, qmodel(images()))


def test_nothing_else_notices(tmp_path: Path) -> None:
    qmodel = ready()
    before, coverage, names = qmodel(images()), str(qmodel.coverage), list(qmodel.state_dict())
    qmodel.train().eval()
    assert torch.equal(qmodel(images()), before)
    assert str(qmodel.coverage) == coverage and list(qmodel.state_dict()) == names
    qmodel.save(tmp_path / "kept")
    assert torch.equal(QuantModel.load(tmp_path / "kept", Net())(images()), before)
    assert torch.equal(copy.deepcopy(qmodel)(images()), before)


def test_the_file_has_its_relus(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    qmodel = ready().train()
    step(qmodel)
    qmodel.eval().export_onnx(images(), tmp_path / "model.onnx", check=[images()])
    nodes = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert nodes.count("Relu") == 5


@pytest.mark.parametrize("kind", ["full backward hook", "pre-hook"])
def test_hooks_on_the_reader(kind: str) -> None:
    qmodel = ready()
    plain = copy.deepcopy(qmodel)
    for candidate in (qmodel, plain):
        reader = candidate.model.get_submodule("conv3")
        if kind == "pre-hook":
            reader.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
        else:
            reader.register_full_backward_hook(lambda *call: None)
    qmodel.train()
    plain.train()
    plain.accelerate(False)
    (expected, expected_grads), (found, found_grads) = step(plain), step(qmodel)
    assert torch.equal(found, expected)
    for name, grad in expected_grads.items():
        assert torch.equal(found_grads[name], grad), name  # type: ignore[arg-type]


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    qmodel = ready().train()
    handle = qmodel.model.get_submodule("conv3").register_forward_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        qmodel(images())
    handle.remove()
    copied = copy.deepcopy(qmodel)
    assert torch.equal(copied(images()), qmodel(images()))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.own, self.last = nn.Linear(8, 8), nn.ReLU(), Cubed(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.own(self.relu(self.first(x))))


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def trained(model: nn.Module, x: Tensor) -> QuantModel:
    bits = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    config = {"DEVICE": "cpu", "W": bits, "A": {"QSCHEME": "per-tensor-affine", **bits}}
    qmodel = prepared(model, [x], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train()


def test_a_users_own_op_is_given_what_the_relu_computed() -> None:
    before = dict(QMODULE_MAP)
    try:

        @register_qmodule(sources=[Cubed])
        class QCubed(QuantOpr):
            def forward(self, x: Tensor) -> Tensor:
                assert bool((x >= 0).all())
                return self.input_quantizer(x) ** 3 + x

        torch.manual_seed(0)
        x = torch.randn(16, 8)
        qmodel = trained(Chain(), x)
        in_training = qmodel(x)
        torch.testing.assert_close(in_training, qmodel.eval()(x))
    finally:
        QMODULE_MAP.clear()
        QMODULE_MAP.update(before)


@pytest.mark.parametrize("place", ["relu", "reader", "op"])
def test_hooks_that_come_late_see_what_the_relu_computed(place: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    qmodel = trained(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), x)
    qmodel(x)
    expected = qmodel(x)
    assert rectifying(qmodel, x)
    seen: list[Tensor] = []
    reader = qmodel.model.get_submodule("2")
    module = {"relu": qmodel.model.get_submodule("1"), "reader": reader, "op": reader.op}[place]
    if place == "relu":
        module.register_forward_hook(lambda *given: seen.append(given[-1]))
    else:
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert torch.equal(qmodel(x), expected)
    assert len(seen) == 1 and bool((seen[0] >= 0).all())
