"""A smaller model learns the outputs of the whole one, or stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsebit.compress.networks.teaching import learn_outputs
from sparsebit.sparse.sparse_config import parse_sconfig
from sparsebit.sparse.sparse_model import SparseModel
from tests.compress.nets import Patterns, batches, trained


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return batches(256, 3)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def small(data: list[Tensor]) -> nn.Module:
    """The net without half of its channels."""
    smodel = SparseModel(trained(), parse_sconfig("{SPARSER: {TYPE: structured, RATIO: 0.5}}"), data[0]).eval()
    smodel.calc_params(data)
    return smodel.shrink().eval()


@pytest.fixture(scope="module")
def learned(small: nn.Module, data: list[Tensor]) -> nn.Module:
    return learn_outputs(small, trained(), data, steps=60)


@torch.no_grad()
def noise(student: nn.Module, teacher: nn.Module, data: list[Tensor]) -> float:
    pairs = [(student(batch), teacher(batch)) for batch in data]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))


def test_a_pruned_net_gets_nearer_to_the_whole_one_on_new_samples(small: nn.Module, learned: nn.Module) -> None:
    new: list[Tensor] = batches(256, 17)  # type: ignore[assignment]
    before, after = (noise(model, trained(), new) for model in (small, learned))
    assert after < 0.6 * before


def test_the_student_and_its_norms_are_left_as_they_were(small: nn.Module, learned: nn.Module) -> None:
    assert learned is not small and not learned.training
    assert not learned.conv1.weight.equal(small.conv1.weight)  # type: ignore[union-attr,operator,arg-type]
    assert not any(one.requires_grad or one.grad is not None for one in learned.parameters())
    for name, buffer in small.named_buffers():
        assert learned.get_buffer(name).equal(buffer)


def test_the_same_data_gives_the_same_weights(small: nn.Module, learned: nn.Module, data: list[Tensor]) -> None:
    torch.manual_seed(123)  # the state of the global generator does not matter
    again = learn_outputs(small, trained(), data, steps=60).state_dict()
    assert all(value.equal(again[name]) for name, value in learned.state_dict().items())


def test_every_eighth_piece_decides_and_is_not_learned_from(small: nn.Module, data: list[Tensor]) -> None:
    held = [-batch if place % 8 == 0 else batch for place, batch in enumerate(data)]
    learned = [batch if place % 8 == 0 else -batch for place, batch in enumerate(data)]
    one, same, other = (learn_outputs(small, trained(), given, steps=30) for given in (data, held, learned))
    assert one.conv1.weight.equal(same.conv1.weight)  # type: ignore[union-attr,operator,arg-type]
    assert not one.conv1.weight.equal(other.conv1.weight)  # type: ignore[union-attr,operator,arg-type]


class Slope(nn.Module):
    """`slope * x`, or the same of its magnitude."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.slope, self.change = nn.Parameter(torch.ones(1)), change

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * self.change(x)


def test_a_student_that_got_worse_on_held_out_samples_is_kept() -> None:
    """What is learned (the slope of negative numbers) is wrong for the held-out positive ones."""
    pieces = [torch.rand(32, 1) + 0.1 if place % 8 == 0 else -torch.rand(32, 1) - 0.1 for place in range(16)]
    student = Slope()
    assert learn_outputs(student, Slope(torch.abs), pieces, steps=50) is student
    assert student.slope.tolist() == [1.0]


def test_a_student_without_error_stays(data: list[Tensor]) -> None:
    student = trained()
    assert learn_outputs(student, trained(), data[:1], steps=2) is student


class Named(Patterns):
    """Scores in a mapping, with a tensor of integers that has no distance."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return {"classes": scores.argmax(1), "logits": scores}


def test_labels_and_outputs_in_a_mapping() -> None:
    teacher, student = Named().eval(), Named().eval()
    teacher.load_state_dict(trained().state_dict())
    assert learn_outputs(student, teacher, batches(128, 3, labelled=True), steps=10) is not student
