"""`init_QAT` and an ordinary loop, for every quantizer: the loss falls, what is learned moves, and what is simulated at
the end is what the numbers say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.numerics import reference
from sparsebit.quantization import Quantizer, QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization.tiny import prepared, qconfig, run, site

COMBINATIONS = [
    *((weight, activation) for weight in ("uniform", "dorefa", "fp8", "lsq", "lsq+") for activation in ("uniform",)),
    *(("uniform", activation) for activation in ("pact", "lsq", "lsq+")),
    ("lsq+", "lsq+"),
]
LEARNED = {
    "lsq": {"scale"}, "lsq+": {"scale", "zero_point"}, "pact": {"alpha"}, "uniform": set(), "dorefa": set(),
    "fp8": set(),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def data() -> tuple[Tensor, Tensor]:
    """Three kinds of stripes and noise."""
    labels = torch.arange(48) % 3
    x = 0.3 * torch.randn(48, 1, 8, 8)
    x[labels == 0, :, ::2] += 1
    x[labels == 1, :, :, ::2] += 1
    return x, labels


@pytest.mark.sample(4)
@pytest.mark.parametrize(("weight", "activation"), COMBINATIONS)
def test_training(weight: str, activation: str) -> None:
    x, labels = data()
    config = qconfig(
        {
            "W.QUANTIZER.TYPE": weight,
            "W.QUANTIZER.BIT": 8 if weight == "fp8" else 4,
            "A.QUANTIZER.TYPE": activation,
            "A.QUANTIZER.PACT": {"ALPHA_VALUE": 2.0},
        },
        bits=4,
    ).replace("W.QSCHEME", "per-channel-affine" if weight == "lsq+" else "per-channel-symmetric")
    qmodel = QuantModel(Net(), config)
    optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.02)  # before calibration, on purpose
    qmodel.prepare_calibration()
    run(qmodel, x.split(16))
    qmodel.init_QAT()
    learned = {
        name: parameter
        for name, parameter in qmodel.named_parameters()
        if "_quantizer" in name and parameter.requires_grad
    }
    assert {name.rpartition(".")[2] for name in learned} == LEARNED[weight] | LEARNED[activation]
    before = {name: parameter.detach().clone() for name, parameter in learned.items()}

    qmodel.train()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(qmodel(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]
    moved = {name.rpartition(".")[2] for name, parameter in learned.items() if not torch.equal(parameter, before[name])}
    assert moved == LEARNED[weight] | LEARNED[activation]

    qmodel.eval()
    with torch.no_grad():
        assert_simulates_its_numbers(qmodel, x)


def assert_simulates_its_numbers(qmodel: QuantModel, x: Tensor) -> None:
    """Each quantizer's output is the reference fake-quant of its input under `qparams()`."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(quantizer: Quantizer, args: tuple[Tensor], output: Tensor) -> None:
        seen[quantizer.name] = args[0], output

    handles = [quantizer.register_forward_hook(note) for quantizer in qmodel.quantizers() if quantizer.is_enable]
    qmodel(x)
    for handle in handles:
        handle.remove()
    assert {name.rpartition(".")[2] for name in seen} >= {"input", "weight"}
    for name, (given, output) in seen.items():
        quantizer = site(qmodel, name)
        scale, zero_point = quantizer.qparams()
        expected = reference.fake_quantize(quantizer.transform(given), scale, zero_point, quantizer.spec)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
        assert torch.equal(zero_point.round().clamp(quantizer.spec.qmin, quantizer.spec.qmax), zero_point.round())


def test_weights_get_their_gradient_through_the_quantizer() -> None:
    x, labels = data()
    qmodel = prepared(Net(), [x], qconfig(bits=4))
    qmodel.init_QAT()
    qmodel.train()
    F.cross_entropy(qmodel(x), labels).backward()
    layers = [m for m in qmodel.modules() if isinstance(m, WeightedQuantOpr)]
    assert len(layers) == 2
    assert all(layer.op.weight.grad is not None and bool(layer.op.weight.grad.any()) for layer in layers)


def test_the_trained_state_loads_into_a_fresh_model() -> None:
    x, labels = data()
    config = qconfig({"W.QUANTIZER.TYPE": "lsq", "A.QUANTIZER.TYPE": "lsq+"}, bits=4)
    qmodel = prepared(Net(), [x], config)
    qmodel.init_QAT()
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.05)
    for _ in range(3):
        F.cross_entropy(qmodel.train()(x), labels).backward()
        optimizer.step()
    fresh = QuantModel(Net(), config)
    fresh.load_state_dict(qmodel.state_dict())
    fresh.set_quant(w_quant=True, a_quant=True)
    assert torch.equal(fresh.eval()(x), qmodel.eval()(x))


def test_autocast_trains() -> None:
    x, labels = data()
    qmodel = prepared(Net(), [x], qconfig({"W.QUANTIZER.TYPE": "lsq"}, bits=4))
    qmodel.init_QAT()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(qmodel.train()(x).float(), labels)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in qmodel.parameters() if p.requires_grad)
