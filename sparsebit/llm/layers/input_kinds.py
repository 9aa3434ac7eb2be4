"""`InputFormat`: how the inputs of a layer are rounded, and `SCHEMES`, by name; without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

InputKind = Literal["int8", "fp8", "nvfp4", "mxfp4"]
Activations = Literal["float", "int8", "int8-static", "fp8", "fp8-static", "nvfp4", "mxfp4"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)


@dataclass(frozen=True)
class InputFormat:
    """How a layer's inputs are rounded. `dynamic`: with scales computed from each input, else with one constant scale.

    nvfp4 has scales from each input, relative to a constant one: it is dynamic, and `is_calibrated` too.
    """

    kind: InputKind
    dynamic: bool
    symmetric: bool = True

    @property
    def is_calibrated(self) -> bool:
        """Whether a scale comes from calibration text."""
        return self.kind == "nvfp4" or not self.dynamic


SCHEMES: dict[Activations, InputFormat] = {
    "int8": InputFormat("int8", dynamic=True),
    "int8-static": InputFormat("int8", dynamic=False),
    "fp8": InputFormat("fp8", dynamic=True),
    "fp8-static": InputFormat("fp8", dynamic=False),
    "nvfp4": InputFormat("nvfp4", dynamic=True),
    "mxfp4": InputFormat("mxfp4", dynamic=True),
}
