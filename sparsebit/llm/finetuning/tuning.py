"""`Tuning`: how adapters are trained; a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.instructions import TOO_LONG, TooLong
from sparsebit.llm.finetuning.optimizers import OPTIMIZERS

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Tuning:
    """The options of `sparsebit.llm.finetune` that decide the numbers.

    Adapters: `rank`, `alpha` (the update is `alpha / rank * B @ A`), `dropout` of their inputs, `targets` (ends of the
    names of the layers that get one; all linear layers of the blocks without any).

    Data: rows of up to `length` tokens; `packing` puts several samples into one row, and none of them sees another.
    `chat_template`: prompts become messages of the model's template. `too_long`: "error", "cut" or "drop" samples that
    do not fit into a row. `batch_size`: rows of a step, over all processes; `micro_batch_size`: rows at once.

    Steps: `num_epochs`, at most `max_steps`; AdamW with `learning_rate`, which rises over the first `warmup` (a share
    of all steps) and then follows `schedule`; gradients are clipped to `max_grad_norm` (0: not). `optimizer`: "adamw",
    "adamw8bit" or "paged_adamw8bit" of bitsandbytes; "auto" takes the paged one on a GPU where bitsandbytes is there.
    `gradient_checkpointing`: blocks are computed again in the backward instead of keeping what is inside of them.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    length: int = 512
    packing: bool = True
    chat_template: bool = False
    too_long: TooLong = "error"
    num_epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 16
    micro_batch_size: int = 1
    learning_rate: float = 2e-4
    warmup: float = 0.03
    schedule: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: str = "auto"
    gradient_checkpointing: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "rank": (self.rank >= 1, "1 or more; 8 to 64 are usual"),
            "alpha": (self.alpha > 0, "more than 0; twice the rank is usual"),
            "dropout": (0 <= self.dropout < 1, "0 to below 1"),
            "length": (self.length >= 2, "2 or more"),
            "too_long": (self.too_long in TOO_LONG, ", ".join(TOO_LONG)),
            "num_epochs": (self.num_epochs >= 1, "1 or more"),
            "max_steps": (self.max_steps is None or self.max_steps >= 1, "1 or more"),
            "batch_size": (self.batch_size >= 1, "1 or more"),
            "micro_batch_size": (self.micro_batch_size >= 1, "1 or more"),
            "learning_rate": (0 < self.learning_rate < math.inf, "more than 0; 1e-4 to 3e-4 are usual"),
            "warmup": (0 <= self.warmup < 1, "0 to below 1, a share of the steps"),
            "schedule": (self.schedule in SCHEDULES, ", ".join(SCHEDULES)),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "max_grad_norm": (self.max_grad_norm >= 0, "0 (no clipping) or more"),
            "optimizer": (self.optimizer in ("auto", *OPTIMIZERS), ", ".join(("auto", *OPTIMIZERS))),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (is_good, words) in allowed.items():
            if not is_good:
                raise ConfigError(f"{name}={getattr(self, name)!r}: allowed: {words}")

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> tuning = Tuning(learning_rate=1.0, warmup=0.5, schedule="linear")
        >>> [tuning.learning_rate_at(step, 4) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
        """
        rising = math.ceil(self.warmup * num_steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(num_steps - rising, 1)
        factor = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[self.schedule]
        return self.learning_rate * factor
