from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization.exporting.export import state_between_calls
from tests.quantization.tiny import calibrated

Step = Callable[["Stateful", Tensor], Tensor]
COUNT = [0]


class Stateful(nn.Module):
    """A linear layer with a state around it."""

    buffer: Tensor

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.fc, self.step = nn.Linear(8, 8), step
        self.calls, self.seen, self.last = 0, [], torch.zeros(8)  # type: ignore[var-annotated]
        self.register_buffer("buffer", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, self.fc(x))


def counting(self: Stateful, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.calls


def listing(self: Stateful, x: Tensor) -> Tensor:
    self.seen.append(1)
    return x * len(self.seen)


def remembering(self: Stateful, x: Tensor) -> Tensor:
    y = x + self.last
    self.last = x.detach().mean(0) + self.last
    return y


def buffering(self: Stateful, x: Tensor) -> Tensor:
    self.buffer.mul_(0.5)
    return x * self.buffer


def counting_outside(self: Stateful, x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


def watching(self: Stateful, x: Tensor) -> Tensor:
    self.calls += 1
    self.last = x.detach().mean(0)
    return x * 2


def drawing(self: Stateful, x: Tensor) -> Tensor:
    return x + 0 * torch.rand_like(x)


@pytest.mark.parametrize(
    ("step", "name"),
    [(counting, "calls"), (listing, "seen"), (remembering, "last"), (buffering, "buffer"), (counting_outside, "COUNT")],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_a_state_that_the_next_call_depends_on_is_found(step: Step, name: str, nested: bool) -> None:
    model, x = Stateful(step).eval(), torch.randn(4, 8)
    full = f"1.{name}" if nested and name != "COUNT" else name
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 8), model) if nested else model, [x], example_inputs=x)
    twin, count = copy.deepcopy(qmodel), COUNT[0]
    (found,) = state_between_calls(qmodel, ((x,), {}))
    assert full in found and COUNT[0] == count
    right = twin(x)
    COUNT[0] = count
    torch.testing.assert_close(qmodel(x), right, rtol=0, atol=0)


@pytest.mark.parametrize("step", [watching, drawing])
def test_a_state_without_an_effect_is_not_told(step: Step) -> None:
    x = torch.randn(4, 8)
    qmodel = calibrated(Stateful(step).eval(), [x], example_inputs=x)
    assert not state_between_calls(qmodel, ((x,), {}))


def test_an_export_tells_of_a_state_that_a_file_cannot_keep(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    qmodel = calibrated(Stateful(counting).eval(), [x], example_inputs=x)
    with pytest.warns(UserWarning, match="every call changes calls, and the next one depends on that; a file") as told:
        qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert told[0].filename == __file__
