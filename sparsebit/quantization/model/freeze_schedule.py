"""`FreezeSchedule`: freezes parts of a model after so many iterations of training."""

from __future__ import annotations

from sparsebit.errors import ConfigError
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.qat.freezing import Part


class FreezeSchedule:
    """Freezes each part of `qmodel` after so many iterations; `step()` must be called at the end of every iteration.

    `observers`: ranges that follow the data; `batchnorm`: running statistics; `scales`: learned scales, zero points and
    thresholds. None: never. Create it after `init_QAT`.

    >>> schedule = FreezeSchedule(qmodel, batchnorm=2000, scales=3000)  # doctest: +SKIP
    """

    def __init__(
        self,
        qmodel: QuantModel,
        *,
        observers: int | None = None,
        batchnorm: int | None = None,
        scales: int | None = None,
    ) -> None:
        given: dict[Part, int | None] = {"observers": observers, "batchnorm": batchnorm, "scales": scales}
        self.qmodel = qmodel
        self.starts: dict[Part, int] = {part: start for part, start in given.items() if start is not None}
        for part, start in self.starts.items():
            if start < 0:
                raise ConfigError(f"FreezeSchedule({part}={start}): the number of iterations before it; 0 or more")
        self.num_steps = 0
        self._frozen: dict[Part, bool] = {}
        self._apply()

    def step(self) -> None:
        """Count one more finished iteration."""
        self.num_steps += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore that iteration; the model's parts are frozen, or not, as they were then."""
        self.num_steps = int(state["num_steps"])
        self._frozen = {}
        self._apply()

    def _apply(self) -> None:
        for part, start in self.starts.items():
            frozen = self.num_steps >= start
            if self._frozen.get(part) is not frozen:
                (self.qmodel.freeze if frozen else self.qmodel.unfreeze)(part)
                self._frozen[part] = frozen
