from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel, correct_biases, gptq, reconstruct
from tests.quantization import tiny

DATA = list(torch.randn(3, 32, 6, generator=torch.Generator().manual_seed(0)))


class Shares(nn.Module):
    """A second op reads a parameter of the first layer: as the graph's own value, not through a layer."""

    def __init__(self, read: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.read = nn.Linear(6, 6), nn.Linear(6, 6), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.one, F.relu(self.two(F.relu(self.one(x)))))


class TiedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


WEIGHT_READERS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "transposed": lambda layer, x: x @ layer.weight.t(),
    "einsum": lambda layer, x: torch.einsum("bi,oi->bo", x, layer.weight),
    "norm": lambda layer, x: x * layer.weight.norm(),
}
ALGORITHMS: dict[str, Callable[[QuantModel], Any]] = {
    "gptq": lambda qmodel: gptq(qmodel, DATA),
    "reconstruct": lambda qmodel: reconstruct(qmodel, DATA, steps=3, learn_biases=True),
    "bias correction": lambda qmodel: correct_biases(qmodel, DATA, method="empirical"),
}


def changed(model: nn.Module, algorithm: str) -> set[str]:
    """The parameters that the algorithm changes, but for those of quantizers."""
    qmodel = tiny.calibrated(model.eval(), DATA, tiny.qconfig(bits=3), example_inputs=DATA[0])
    named = {name: p for name, p in qmodel.model.named_parameters() if ".op." in name}
    before = {name: p.detach().clone() for name, p in named.items()}
    ALGORITHMS[algorithm](qmodel)
    return {name for name, p in named.items() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("algorithm", ["gptq", "reconstruct"])
@pytest.mark.parametrize("read", WEIGHT_READERS)
def test_a_weight_that_another_op_reads_stays(read: str, algorithm: str) -> None:
    torch.manual_seed(0)
    assert "one.op.weight" not in changed(Shares(WEIGHT_READERS[read]), algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bias_that_another_op_reads_stays(algorithm: str) -> None:
    torch.manual_seed(0)
    found = changed(Shares(lambda layer, x: x * layer.bias), algorithm)
    assert "two.op.bias" in found and "one.op.bias" not in found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bias_of_two_layers_stays(algorithm: str) -> None:
    torch.manual_seed(0)
    assert "one.op.bias" not in changed(TiedBias(), algorithm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("algorithm", "options"), [
    (gptq, {}), (reconstruct, {"steps": 20, "learn_biases": True}), (correct_biases, {"method": "analytic"}),
    (correct_biases, {"method": "empirical"}),
], ids=["gptq", "reconstruct", "analytic", "empirical"])  # fmt: skip
def test_a_batch_that_is_not_finite_is_refused(
    algorithm: Callable[..., Any], options: dict[str, Any], value: float
) -> None:
    torch.manual_seed(0)
    data = [batch.clone() for batch in DATA]
    data[1][0, 0] = value
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    qmodel = tiny.calibrated(model, DATA, tiny.qconfig(bits=3), example_inputs=DATA[0])
    with pytest.raises(CalibrationError):
        algorithm(qmodel, data, **options)
    assert all(bool(p.isfinite().all()) for p in qmodel.model.parameters())
