"""Distillation: a quantized student learns the outputs of its float teacher (Hinton et al., 2015)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.option_fields import Option

TaskLoss = Callable[[Tensor, Tensor], Tensor]
_LIMITS = {
    "alpha": Option("the weight of the teacher", least=0, most=1),
    "temperature": Option("of the softmaxes", above=0),
    "distance": Option("of the outputs", choices=("kl", "mse")),
}


class DistillationLoss:
    """`loss_fn(qmodel(x), x, labels)`: `(1 - alpha) * task_loss + alpha * distance(student, teacher)`.

    `distance`: "kl" is the Kullback-Leibler divergence of both softmaxes over `dim` at `temperature` T, times T², so
    that T does not change the size of gradients; "mse" the mean squared difference of the outputs, for features and
    embeddings. Without labels only the distance counts.

    `x` is anything that the teacher accepts: a tensor, a tuple of arguments, a mapping of keywords. Outputs may be
    tensors, have or contain `logits` (Hugging Face), or begin with them. The teacher is put into eval mode and on
    the student's device, and is run without gradients; otherwise it is not changed.
    """

    def __init__(
        self,
        teacher: nn.Module,
        temperature: float = 4.0,
        alpha: float = 0.9,
        *,
        distance: Literal["kl", "mse"] = "kl",
        task_loss: TaskLoss = F.cross_entropy,
        dim: int = -1,
    ) -> None:
        given = {"alpha": alpha, "temperature": temperature, "distance": distance}
        for name, limits in _LIMITS.items():
            if not limits.allows(given[name]):
                raise ConfigError(f"{name}={given[name]!r}; allowed: {limits.allowed()}")
        self.teacher, self.temperature, self.alpha = teacher, temperature, alpha
        self.distance, self.task_loss, self.dim = distance, task_loss, dim

    def __call__(self, output: Any, x: Any, labels: Tensor | None = None) -> Tensor:
        """`output`: the student's on `x`."""
        student = logits_of(output)
        teacher = self.teacher_logits(x, student.device)
        is_mse = self.distance == "mse"
        loss = F.mse_loss(student.float(), teacher.float()) if is_mse else self._divergence(student, teacher)
        if labels is None:
            return loss
        return (1 - self.alpha) * self.task_loss(student, labels) + self.alpha * loss

    @torch.no_grad()
    def teacher_logits(self, x: Any, device: torch.device) -> Tensor:
        if self.teacher.training:
            self.teacher.eval()
        first = next(self.teacher.parameters(), None)
        if first is not None and first.device != device:
            self.teacher.to(device)
        args, kwargs = as_call(x, self.teacher)
        return logits_of(self.teacher(*to_device(args, device), **to_device(kwargs, device)))

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        # In float32: in half precision a softmax at a high temperature loses the small differences to learn from.
        one, other = (F.log_softmax(logits.float() / self.temperature, self.dim) for logits in (student, teacher))
        divergence = F.kl_div(one, other, log_target=True, reduction="none").sum(self.dim)
        return divergence.mean() * self.temperature**2


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: itself, `.logits`, `["logits"]`, or the first of a tuple or mapping."""
    found = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        found = output["logits"] if "logits" in output else next(iter(output.values()), None)
    elif isinstance(output, Tensor):
        found = output
    elif found is None and isinstance(output, (tuple, list)):
        found = next(iter(output), None)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"no logits in an output of type {type(output).__name__}; give DistillationLoss a tensor, an output with "
            "logits, or a tuple that begins with them"
        )
    return found
