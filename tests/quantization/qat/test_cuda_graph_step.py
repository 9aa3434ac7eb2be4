from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import CudaGraphStep, QuantModel, parse_qconfig
from tests.quantization.tiny import prepared


def ready(device: str) -> QuantModel:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    config = {"DEVICE": device, "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}}
    qmodel = prepared(
        model, [batch(device)[0]], parse_qconfig(config | {"A": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}})
    )
    qmodel.init_QAT()
    return qmodel.train()


def batch(device: str, size: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 12, 12, generator=generator)
    return images.to(device), torch.randint(0, 4, (size,), generator=generator).to(device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("drop", [True, False], ids=["gradients dropped", "gradients kept"])
def test_training_is_that_of_plain_steps(device: str, drop: bool) -> None:
    captured = ready(device)
    plain = copy.deepcopy(captured)
    optimizers = [torch.optim.SGD(qmodel.parameters(), lr=0.05, momentum=0.9) for qmodel in (captured, plain)]
    step = CudaGraphStep(captured, loss_of)
    for number in range(5):
        x, y = batch(device, size=8 if number != 3 else 5, seed=number)  # one of another shape
        found = step(x, y).clone()
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=drop)
        optimizers[1].zero_grad()
        expected = loss_of(plain, x, y)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    for (name, one), two in zip(captured.state_dict().items(), plain.state_dict().values(), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4, msg=name)


def test_half_precision() -> None:
    seen: list[torch.dtype] = []

    def noting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return torch.nn.functional.mse_loss(model(x).float(), torch.zeros(len(x), 3))

    model = nn.Linear(4, 3)
    CudaGraphStep(model, noting, half=torch.bfloat16)(torch.randn(2, 4), torch.zeros(2))
    CudaGraphStep(model, noting)(torch.randn(2, 4), torch.zeros(2))
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.gpu
def test_no_gradient_is_left_by_a_batch_that_is_run_as_usual() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.always(x)
            return y + self.sometimes(x) if len(x) == 5 else y

    model = Net().cuda()
    step = CudaGraphStep(model, lambda model, x: model(x).square().mean())
    for size in (8, 5):
        step(torch.randn(size, 4, device="cuda"))
    assert model.sometimes.weight.grad is not None
    step(torch.randn(8, 4, device="cuda"))
    assert model.sometimes.weight.grad is None and model.always.weight.grad is not None


def test_batches_may_be_dicts() -> None:
    model = nn.Linear(4, 3)
    step = CudaGraphStep(model, lambda model, batch: model(batch["x"]).square().mean())
    assert step({"x": torch.randn(2, 4)}).ndim == 0 and model.weight.grad is not None


def test_what_is_frozen_stands_still_whatever_the_optimizer_remembers() -> None:
    qmodel = ready("cpu")
    optimizer = torch.optim.AdamW(qmodel.parameters(), lr=0.05)
    step = CudaGraphStep(qmodel, loss_of)
    for number in range(3):
        step(*batch("cpu", size=8, seed=number))
        optimizer.step()
    qmodel.freeze("scales")
    scales = {name: p.detach().clone() for name, p in qmodel.named_parameters() if name.endswith("scale")}
    for number in range(2):
        step(*batch("cpu", size=8, seed=number))
        optimizer.step()
    assert scales and all(torch.equal(qmodel.get_parameter(name), value) for name, value in scales.items())


def test_the_former_name_works() -> None:
    from sparsebit.quantization import CapturedStep

    assert CapturedStep is CudaGraphStep
