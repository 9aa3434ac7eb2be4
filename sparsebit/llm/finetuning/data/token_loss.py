"""The loss of learned tokens without all logits in memory: blocks of rows, forward and backward at once.

With a vocabulary of 128,000 the logits of 2,048 tokens and their gradients take more memory than a packed model of 1 B
parameters. The output layer is frozen, so only the gradient of the hidden states is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebit.graph.state.modes import evaluating
from sparsebit.llm.finetuning.data.sample_packing import IGNORED, Batch

log = logging.getLogger(__name__)
# Logits at once: 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24
LossOfBatch = Callable[[Any, Batch], Tensor]


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """The sum of the negative log-likelihoods of the batch's targets, in float32, by the model's own logits."""
    logits = forward(model, batch).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def summed_loss_in_blocks(model: Any, batch: Batch) -> Tensor:
    """The same from the hidden states before a linear output layer, with few logits in memory."""
    head, hidden = model.get_output_embeddings(), forward(model.base_model, batch).last_hidden_state
    is_target = batch.targets != IGNORED
    rows, targets = hidden[is_target], batch.targets[is_target]
    found: Tensor = _BlockLoss.apply(rows, head.weight, head.bias, targets)  # type: ignore[no-untyped-call]
    return found


def forward(model: Any, batch: Batch) -> Any:
    """The model's output for the batch. Positions are left out if they are those that the model assumes."""
    plain = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    positions = batch.positions
    # After the last target of a row nothing is learned: padding may have any position.
    matters = (batch.targets != IGNORED).flip(1).cumsum(1).flip(1) > 0
    is_plain = bool(((positions == plain) | ~matters).all())
    return model(input_ids=batch.tokens, use_cache=False, **({} if is_plain else {"position_ids": positions}))


@torch.no_grad()
def choose_loss(model: Any, batch: Batch) -> LossOfBatch:
    """`summed_loss_in_blocks`, if that is the model's own loss; some models change logits after the output layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.requires_grad or model.base_model is model:
        return summed_loss
    with evaluating(model):
        ours, theirs = summed_loss_in_blocks(model, batch), summed_loss(model, batch)
    tolerance = 1e-4 if head.weight.dtype == torch.float32 else 5e-3
    is_same = bool((ours - theirs).abs() <= tolerance * theirs.abs().clamp(min=1e-6))
    if not is_same:
        log.info("%s changes its logits after the output layer: the loss takes them whole", type(model).__name__)
    return summed_loss_in_blocks if is_same else summed_loss


class _BlockLoss(torch.autograd.Function):
    """The summed loss of `hidden (rows, channels)`; its gradient is computed in the forward, and only that is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        count = max(_BLOCK_ELEMENTS // weight.shape[0], 1)
        for start in range(0, len(hidden), count):
            rows = slice(start, start + count)
            logits = F.linear(hidden[rows], weight, bias).float()
            wanted = targets[rows, None]
            peak = logits.amax(1, keepdim=True)
            logits -= peak
            at_target = logits.gather(1, wanted)
            logits.exp_()
            sums = logits.sum(1, keepdim=True)
            total += (sums.log() - at_target).sum()
            if gradient is not None:
                logits /= sums
                logits.scatter_add_(1, wanted, torch.full_like(at_target, -1.0))
                gradient[rows] = logits.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None
