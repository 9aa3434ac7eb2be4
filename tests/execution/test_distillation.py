from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization import DistillationLoss
from tests.quantization.tiny_training import Net, data, ready


class Named(nn.Module):
    """Takes keywords and has dropout, as text models do."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, scale: Tensor | None = None) -> Any:
        logits = self.fc(self.dropout(input_ids))
        return SimpleNamespace(logits=logits if scale is None else logits * scale)


def test_the_formula() -> None:
    teacher, x, labels = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3
    student = torch.randn(6, 3)
    p, q = (F.softmax(logits / 2.0, -1) for logits in (teacher(x), student))
    divergence = (p * (p / q).log()).sum(-1).mean() * 4
    expected = 0.3 * F.cross_entropy(student, labels) + 0.7 * divergence
    torch.testing.assert_close(DistillationLoss(teacher, temperature=2.0, alpha=0.7)(student, x, labels), expected)
    torch.testing.assert_close(DistillationLoss(teacher, temperature=2.0)(student, x), divergence)


def test_mse_of_features() -> None:
    teacher, x, student = nn.Linear(4, 3), torch.randn(6, 4), torch.randn(6, 3)
    loss = DistillationLoss(teacher, distance="mse")(student, x)
    torch.testing.assert_close(loss, F.mse_loss(student, teacher(x)))


def test_other_axes_and_tasks() -> None:
    teacher, x = nn.Conv2d(2, 5, 1), torch.randn(2, 2, 3, 3)
    student = teacher(x) + torch.randn(2, 5, 1, 1)
    expected = DistillationLoss(nn.Linear(2, 5))  # the same layer, applied to pixels as rows
    expected.teacher.weight, expected.teacher.bias = (
        nn.Parameter(p.flatten(1) if p.ndim > 1 else p) for p in teacher.parameters()
    )
    rows = [t.permute(0, 2, 3, 1).reshape(18, -1) for t in (student, x)]
    torch.testing.assert_close(DistillationLoss(teacher, dim=1)(student, x), expected(*rows))
    loss = DistillationLoss(teacher, alpha=0.0, task_loss=F.mse_loss, dim=1)(student, x, student + 2)
    torch.testing.assert_close(loss, torch.tensor(4.0))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: logits,
        lambda logits: SimpleNamespace(logits=logits),
        lambda logits: OrderedDict(loss=torch.zeros(()), logits=logits),
        lambda logits: {"last_hidden_state": logits},
        lambda logits: (logits, None),
    ],
    ids=["tensor", "output", "dict", "other dict", "tuple"],
)
def test_forms_of_outputs(wrap: Any) -> None:
    logits, x = torch.randn(2, 3), torch.randn(2, 4)
    teacher = nn.Linear(4, 3)
    assert torch.equal(DistillationLoss(teacher)(wrap(logits), x), DistillationLoss(teacher)(logits, x))


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_forms_of_inputs(form: str) -> None:
    teacher, x = Named(), torch.randn(2, 4)
    given = {"tensor": x, "tuple": (x, torch.zeros(2)), "mapping": {"input_ids": x, "labels": torch.zeros(2)}}[form]
    student = torch.randn(2, 3)
    loss = DistillationLoss(teacher, distance="mse")(student, given)
    torch.testing.assert_close(loss, F.mse_loss(student, teacher.fc(x)))


def test_the_teacher_is_in_eval_mode_and_learns_nothing() -> None:
    teacher, x = Named().train(), torch.randn(2, 4)
    loss_fn = DistillationLoss(teacher)
    student = torch.randn(2, 3, requires_grad=True)
    teacher.train()  # a loop over all models may do so
    losses = [loss_fn(student, x) for _ in range(2)]
    assert torch.equal(*losses) and not teacher.training
    losses[0].backward()
    assert student.grad is not None and all(p.grad is None and p.requires_grad for p in teacher.parameters())


def test_the_teacher_comes_to_the_student() -> None:
    loss = DistillationLoss(nn.Linear(4, 3))(torch.empty(2, 3, device="meta"), torch.randn(2, 4))
    assert loss.device.type == "meta"


def test_half_precision_is_left_for_the_softmax() -> None:
    teacher, x, student = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    loss = DistillationLoss(teacher)(student.bfloat16(), x)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, DistillationLoss(teacher)(student.bfloat16().float(), x))


def test_a_student_comes_nearer_to_its_teacher() -> None:
    torch.manual_seed(0)
    teacher, qmodel = Net(), ready("lsq")
    loss_fn = DistillationLoss(teacher, temperature=2.0)
    x, labels = data()
    optimizer = torch.optim.Adam(qmodel.parameter_groups(0.02))
    losses = []
    for _ in range(15):
        loss = loss_fn(qmodel(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert loss_fn(qmodel(x), x, labels).isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"alpha": 1.5}, "alpha=1.5"), ({"temperature": 0}, "temperature=0"), ({"distance": "l1"}, "kl, mse")],
)
def test_faults(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillationLoss(nn.Linear(1, 1), **settings)


def test_no_logits() -> None:
    with pytest.raises(ConfigError, match="no logits in an output of type str"):
        DistillationLoss(nn.Linear(4, 3))("nothing", torch.randn(2, 4))
