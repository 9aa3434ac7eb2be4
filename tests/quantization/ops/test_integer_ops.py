from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerKernel, IntegerLayer, with_gradient_of
from tests.parameters import first_fast
from tests.quantization.tiny import calibrated, qconfig

pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """Convolutions (plain, depthwise, pointwise), adds, pools, linears."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 8, 1, bias=False)
        self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.max_pool2d(F.relu(self.conv(x) + x), 2)
        x = self.pointwise(F.relu6(self.depthwise(x))) + x
        x = F.avg_pool2d(x, 2)
        return self.head(F.relu(self.hidden(F.adaptive_avg_pool2d(x, 1).flatten(1))))


@pytest.mark.parametrize("seed", first_fast(range(3)))
def test_the_simulation_is_the_runtime_bit_by_bit(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 12, 12) * (1 + seed)
    qmodel = calibrated(Net(), [x], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x, torch.randn_like(x)])
    assert parity is not None and parity.is_exact


def test_which_ops_are_integer() -> None:
    qmodel = calibrated(Net(), [torch.randn(2, 3, 12, 12)], qconfig(backend="onnxruntime"))
    assert sum(isinstance(module, IntegerLayer) for module in qmodel.modules()) == 6
    assert sum(isinstance(module, IntegerAdd) for module in qmodel.modules()) == 2


@pytest.mark.parametrize("backend", ["virtual", "openvino", "tensorrt"])
def test_other_backends_have_none(backend: str) -> None:
    qmodel = calibrated(Net(), [torch.randn(2, 3, 12, 12)], qconfig(backend=backend))
    assert not any(isinstance(module, IntegerKernel) for module in qmodel.modules())


def test_gradients_are_those_of_plain_fake_quant() -> None:
    x = torch.randn(2, 3, 12, 12)
    qmodel = calibrated(Net(), [x], qconfig(backend="onnxruntime"))

    def gradients() -> dict[str, Tensor]:
        qmodel.zero_grad()
        F.mse_loss(qmodel(x), torch.zeros(2, 4)).backward()
        return {name: p.grad.clone() for name, p in qmodel.named_parameters() if p.grad is not None}

    exact = gradients()
    for module in qmodel.modules():
        if isinstance(module, IntegerKernel):
            module.train()  # inactive
    plain = gradients()
    assert exact.keys() == plain.keys()
    for name, gradient in exact.items():
        # They differ where a code flips; not by what leaving out the integer path would do.
        assert float(F.cosine_similarity(gradient.flatten(), plain[name].flatten(), dim=0)) > 0.99, name


def test_it_is_off_in_training_and_without_quantization() -> None:
    x = torch.randn(2, 3, 12, 12)
    qmodel = calibrated(Net(), [x], qconfig(backend="onnxruntime"))
    kernels = [module for module in qmodel.modules() if isinstance(module, IntegerKernel)]
    qmodel.eval()
    assert all(kernel.is_active for kernel in kernels)
    qmodel.train()
    assert not any(kernel.is_active for kernel in kernels)
    qmodel.eval().set_quant()
    assert not any(kernel.is_active for kernel in kernels)


def test_double_precision_takes_the_plain_way() -> None:
    x = torch.randn(2, 3, 12, 12)
    qmodel = calibrated(Net(), [x], qconfig(backend="onnxruntime"))
    with torch.no_grad():
        expected = qmodel(x)
        found = qmodel.double()(x.double())
    assert found.dtype == torch.float64
    assert torch.allclose(found.float(), expected, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("broadcast", [(1, 4, 1, 1), (4, 1, 1)], ids=["one_per_channel", "fewer_dimensions"])
def test_an_add_that_broadcasts_takes_the_plain_way(broadcast: tuple[int, ...]) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + F.adaptive_avg_pool2d(self.gate(x), 1)[:1].reshape(broadcast)

    x = torch.randn(2, 3, 6, 6)
    qmodel = calibrated(Adds(), [x], qconfig(backend="onnxruntime"))
    with torch.no_grad():
        assert torch.allclose(qmodel(x), Adds.forward(qmodel.original, x), atol=0.1)  # type: ignore[arg-type]


def test_the_exact_value_with_the_plain_gradient() -> None:
    plain = torch.tensor([1.0, 2.0], requires_grad=True)
    value = with_gradient_of(plain * 3, torch.tensor([3.5, 5.5]))
    value.sum().backward()
    assert value.tolist() == [3.5, 5.5]
    assert plain.grad is not None and plain.grad.tolist() == [3.0, 3.0]
