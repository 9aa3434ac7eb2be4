"""`Tuning`: how adapters are trained; a frozen value.

The command line creates its options from these fields without torch, so imports here must not import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sparsebit.option_fields import check_options, option

TooLong = Literal["error", "cut", "drop"]
Schedule = Literal["cosine", "linear", "constant"]
Optimizer = Literal["auto", "adamw", "adamw8bit", "paged_adamw8bit"]
_ADAPTER, _STEPS = "Adapter", "Steps"


@dataclass(frozen=True)
class Tuning:
    """The options of `sparsebit.llm.finetune` that decide the numbers.

    Adapters: `rank`, `alpha` (the update is `alpha / rank * B @ A`), `dropout` of their inputs, `targets` (ends of the
    names of the layers that get one; all linear layers of the blocks without any).

    Data: rows of up to `length` tokens; `packing` puts several samples into one row, separate from each other.
    `chat_template`: prompts become messages of the model's template. `too_long`: "error", "cut" or "drop" samples that
    do not fit into a row. `batch_size`: rows of a step, over all processes; `micro_batch_size`: rows at once.

    Steps: `num_epochs`, at most `max_steps`; AdamW with `learning_rate`, which rises over the first `warmup` (a share
    of all steps) and then follows `schedule`; gradients are clipped to `max_grad_norm` (0: not). `optimizer`: "adamw",
    "adamw8bit" or "paged_adamw8bit" of bitsandbytes; "auto" selects the paged one on a GPU with bitsandbytes installed.
    `gradient_checkpointing`: blocks are recomputed in the backward instead of keeping their inner values.
    """

    rank: int = option(16, "Of the updates.", least=1, usual="8 to 64 are usual", panel=_ADAPTER)
    alpha: int = option(
        32, "Updates are alpha / rank * B @ A.", least=1, usual="twice the rank is usual", panel=_ADAPTER
    )
    dropout: float = option(0.0, "Of their inputs.", least=0, below=1, panel=_ADAPTER)
    targets: tuple[str, ...] = option(
        (), "Layers by the ends of their names, such as q_proj,v_proj; all.", metavar="NAME,NAME", panel=_ADAPTER
    )
    length: int = option(512, "Tokens of a row at most.", least=2)
    packing: bool = option(True, "One sample a row.")
    chat_template: bool = option(False, "Prompts and responses become messages of the model's template.")
    too_long: TooLong = option("error", "What happens to samples that fit no row.", choices=get_args(TooLong))
    num_epochs: int = option(1, "Times that each sample is learned.", least=1, name="--epochs")
    max_steps: int | None = option(None, "Steps at most.", least=1)
    batch_size: int = option(16, "Rows of a step, over all processes.", least=1, panel=_STEPS)
    micro_batch_size: int = option(1, "Rows at once.", least=1, panel=_STEPS)
    learning_rate: float = option(
        2e-4, "The highest one.", above=0, below=math.inf, usual="1e-4 to 3e-4 are usual", panel=_STEPS
    )
    warmup: float = option(
        0.03, "Share of the steps in which it rises.", least=0, below=1, usual="a share of the steps", panel=_STEPS
    )
    schedule: Schedule = option("cosine", "Then.", choices=get_args(Schedule), panel=_STEPS)
    weight_decay: float = option(0.0, "Of AdamW.", least=0, panel=_STEPS)
    max_grad_norm: float = option(
        1.0, "Gradients are clipped to it; 0: not.", least=0, usual="0: no clipping", panel=_STEPS
    )
    optimizer: Optimizer = option(
        "auto",
        "auto: the paged one on a GPU where bitsandbytes is installed.",
        choices=get_args(Optimizer),
        panel=_STEPS,
    )
    gradient_checkpointing: bool = option(
        True, "Keep activations instead of computing blocks again.", name="--no-checkpointing", panel=_STEPS
    )
    seed: int = option(0, "Of adapters, order and dropout.", least=0)

    def __post_init__(self) -> None:
        check_options(self)

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
