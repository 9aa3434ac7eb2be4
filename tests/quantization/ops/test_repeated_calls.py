"""Layers that the model calls on several tensors: integers in the simulation as in the file, per call."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.audit.audit_file import audit
from sparsebit.quantization import QuantModel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization.tiny import calibrated, qconfig, site


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.layer(torch.relu(self.layer(x)))))


class ThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(torch.relu(self.layer(x)))))


class Branches(nn.Module):
    """One head on several levels, as detectors have it; one level is a max pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.layer = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.stem(x))
        y = self.down(x) * 3
        return self.layer(x), self.layer(y), self.layer(F.max_pool2d(x, 2)), self.layer(y) + 1


class WithoutBias(ThreeTimes):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3, padding=1, bias=False)


MODELS = {"linear": (Twice, (32, 16)), "conv": (ThreeTimes, (4, 8, 8, 8)), "head": (Branches, (4, 8, 8, 8)),
          "without bias": (WithoutBias, (4, 8, 8, 8))}  # fmt: skip


def built(name: str, seed: int = 0, backend: str = "onnxruntime") -> tuple[QuantModel, Tensor]:
    kind, shape = MODELS[name]
    torch.manual_seed(seed)
    batches = [torch.randn(shape) for _ in range(2)]
    return calibrated(kind().eval(), batches, qconfig(backend=backend)), torch.randn(shape)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.exact_sums
def test_the_file_is_bit_exact(name: str, tmp_path: Path) -> None:
    qmodel, x = built(name)
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.is_exact
    # Two calls on one tensor are one in the file, whose output two sites quantize.
    assert audit(tmp_path / "m.onnx", repeats=0).counts().get("float", 0) == (name == "head")


def test_each_call_has_its_own_bias() -> None:
    qmodel, _ = built("conv")
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    roundings = [rounding for rounding, _ in layer.arithmetics]
    assert len(roundings) == 3 and len({rounding.scale().sum().item() for rounding in roundings if rounding}) == 3
    sources = [rounding.sources[0] for rounding in roundings if rounding]
    assert set(sources) == set(layer.input_quantizer.replaced_by.values())


def test_copies_saved_models_and_threads_choose_alike(tmp_path: Path) -> None:
    qmodel, x = built("conv")
    with torch.no_grad():
        expected = qmodel(x)
        assert torch.equal(copy.deepcopy(qmodel)(x), expected)
    parts = [torch.randn_like(x) for _ in range(8)]
    with torch.inference_mode():
        alone = [qmodel(part) for part in parts]

    def run(part: Tensor) -> Tensor:
        with torch.inference_mode():
            return qmodel(part)

    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(run, parts), alone, strict=True))


def test_a_channel_whose_bias_is_large_has_room_in_every_call() -> None:
    torch.manual_seed(0)
    model, x = ThreeTimes(), torch.randn(4, 8, 8, 8)
    with torch.no_grad():
        model.layer.weight[0] *= 1e-9
        model.layer.bias[0] = 100.0
    qmodel = calibrated(model, [x], qconfig(backend="onnxruntime"))
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    bias = layer.stored_bias()
    assert bias is not None
    for rounding, _ in layer.arithmetics:
        assert rounding is not None and torch.allclose(rounding(bias)[0], bias[0], rtol=1e-5)


def test_nothing_is_left_of_it_where_a_quantizer_is_off() -> None:
    qmodel, x = built("linear")
    site(qmodel, "layer.input.0").disable_quant()
    with torch.no_grad():
        qmodel(x)
    assert not vars(x)  # the user's tensor


def test_gradients_are_those_of_the_plain_layer() -> None:
    qmodel, x = built("conv")
    with torch.no_grad():
        exact = qmodel(x)
    output = qmodel(x)
    assert torch.allclose(output, exact, rtol=1e-5, atol=1e-6)
    output.sum().backward()
    assert all(p.grad is not None for p in qmodel.parameters() if p.requires_grad)


def test_a_layer_that_untraced_code_calls_too_stays_plain() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Twice()

        def forward(self, x: Tensor) -> Tensor:
            if float(x.sum()) > 1e9:
                raise ValueError
            return self.inner(x) + self.inner.layer(x).mean()

    torch.manual_seed(0)
    x = torch.randn(32, 16)
    qmodel = calibrated(Mixed(), [x], qconfig(backend="onnxruntime"), example_inputs=x)
    with torch.no_grad():
        assert torch.isfinite(qmodel(x)).all()


def test_openvino_rounds_the_bias_of_each_call() -> None:
    qmodel, x = built("conv", backend="openvino")
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    assert [(rounding is not None, integer is not None) for rounding, integer in layer.arithmetics] == [
        (True, False)
    ] * 3
    assert torch.isfinite(qmodel(x)).all()
