"""`GradientCheck`: the result of `verify_training`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class GradientCheck:
    """Which gradients of a training step equal those of the model's own code, from `verify_training`.

    `not_compared`: parameters without a counterpart, since a norm was folded into them or they were split.
    `own_code`: modules that run their own code from now on, since their gradients differed, with the reason.
    """

    compared: tuple[str, ...]
    not_compared: tuple[str, ...] = ()
    own_code: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{len(self.compared)} gradients equal those of the model's own code"]
        if self.not_compared:
            lines.append(f"  not compared: {', '.join(self.not_compared)}")
        lines += [f"  own code     {path or '(model)'}: {why}" for path, why in self.own_code.items()]
        return "\n".join(lines)
