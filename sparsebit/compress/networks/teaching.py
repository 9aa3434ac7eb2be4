"""`learn_outputs`: distillation without labels: a pruned model learns the outputs of the dense one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.compress.judging.metrics import inputs_of
from sparsebit.compress.judging.samples import pieces_of
from sparsebit.execution.image_views import image_view, is_images
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.progress import track

log = logging.getLogger(__name__)

BATCH = 32
_HELD = 8  # every eighth piece is held out, to decide whether the result is kept
# The rate relative to a parameter's root mean square: Adam moves each weight by about its rate, so one value fits all.
_RATE, _LEAST_RATE = 0.004, 1e-5


def learn_outputs(student: nn.Module, teacher: nn.Module, batches: Sequence[Any], steps: int) -> nn.Module:
    """A copy of the student after this many steps; the student itself if that is worse on held-out samples.

    Norms use their running statistics, and images are mirrored and shifted. The same data leads to the same weights.
    """
    pieces = pieces_of(batches, BATCH)
    held, learned = (pieces[::_HELD], [piece for place, piece in enumerate(pieces) if place % _HELD])
    if not learned:
        held = learned = pieces
    trained = copy.deepcopy(student).eval()
    _train(trained, teacher, learned, steps)
    before, after = (_distance(model, teacher, held) for model in (student, trained))
    log.info("learning the outputs: noise on held-out samples %.4f -> %.4f", before, after)
    return trained if after < before else student


def _train(student: nn.Module, teacher: nn.Module, pieces: Sequence[Any], steps: int) -> None:
    parameters = [parameter for parameter in student.parameters() if parameter.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    groups = [
        {"params": [one], "lr": max(_LEAST_RATE, _RATE * float(one.detach().norm()) / one.numel() ** 0.5)}
        for one in parameters
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in track(range(steps), "learning the outputs"):
        piece = pieces[int(torch.randint(len(pieces), (), generator=generator))]
        call = map_nested(Tensor, lambda t: image_view(t, generator) if is_images(t) else t, inputs_of(piece, student))
        with torch.enable_grad():
            loss = _noise(student, teacher, call)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    for parameter in parameters:
        parameter.requires_grad_(False)


@torch.no_grad()
def _distance(student: nn.Module, teacher: nn.Module, pieces: Sequence[Any]) -> float:
    found = [float(_noise(student, teacher, inputs_of(piece, student))) for piece in pieces]
    return sum(found) / len(found)


def _noise(student: nn.Module, teacher: nn.Module, call: Any) -> Tensor:
    """The energy of the error over that of the teacher's outputs."""
    args, kwargs = call
    with torch.no_grad():
        wanted = [one for one in tensors_of(teacher(*args, **kwargs)) if one.is_floating_point()]
    found = [one for one in tensors_of(student(*args, **kwargs)) if one.is_floating_point()]
    error = torch.stack([(ours - theirs).square().sum() for ours, theirs in zip(found, wanted, strict=True)]).sum()
    return error / torch.stack([one.square().sum() for one in wanted]).sum().clamp_min(1e-30)
