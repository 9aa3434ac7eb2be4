from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.execution.blocks.captured_step import CapturedStep


def learned(
    device: str, *, is_wanted: bool, sizes: tuple[int, ...] = (4, 4, 4, 2, 4)
) -> tuple[Tensor, list[float], int]:
    """The parameter after a step for each batch, the losses, and how often Python ran a step."""
    torch.manual_seed(0)
    parameter = torch.ones(3, device=device, requires_grad=True)
    rate = torch.tensor(0.1, device=device)
    optimizer = torch.optim.Adam(
        [{"params": [parameter], "lr": rate}], foreach=False, fused=device == "cuda", capturable=device == "cuda"
    )
    count = 0

    def learn(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        loss = (x @ parameter - 1).square().mean()
        (parameter.grad,) = torch.autograd.grad(loss, [parameter])
        optimizer.step()
        return loss.detach()

    step, losses = CapturedStep(learn, [parameter], optimizer, is_wanted=is_wanted), []
    for number, size in enumerate(sizes):
        rate.fill_(0.1 / (number + 1))
        losses.append(float(step(torch.randn(size, 3).to(device))))
    return parameter.detach().cpu(), losses, count


def test_a_cpu_runs_each_step() -> None:
    wanted, losses, count = learned("cpu", is_wanted=True)
    plain, others, _ = learned("cpu", is_wanted=False)
    assert torch.equal(wanted, plain) and losses == others and count == 5


@pytest.mark.gpu
def test_a_graph_does_what_the_steps_do() -> None:
    """With rates that change, and a batch of another size among the others."""
    wanted, losses, count = learned("cuda", is_wanted=True)
    plain, others, _ = learned("cuda", is_wanted=False)
    torch.testing.assert_close(wanted, plain)
    assert losses == pytest.approx(others, rel=1e-5)
    assert count == 3 + 1 + 1  # to warm up, to capture, and the small batch
