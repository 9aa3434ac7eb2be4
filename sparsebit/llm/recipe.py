"""`Recipe`: how the linear layers of a language model are quantized; a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from sparsebit.errors import ConfigError
from sparsebit.llm.float_weight import FLOAT_KINDS, GROUPS, FloatKind
from sparsebit.numerics.scale_search_math import ScaleSearch

Method = Literal["rtn", "gptq", "awq", "autoround", "fp8", "mxfp4", "nvfp4"]
METHODS: tuple[Method, ...] = get_args(Method)
BITS = (2, 3, 4, 8)
_OF_GPTQ = ("act_order", "damping", "refit", "sweeps", "input_correction")


@dataclass(frozen=True)
class Recipe:
    """The options of `sparsebit.llm.quantize` that decide the numbers.

    `group_size`: columns that share a scale; 0: one scale per row. `symmetric`: without zero points. `scale_search`:
    scales are multiplied by the factor with the smallest error of the layer's output, judged by round-to-nearest
    ("nearest"), by GPTQ itself ("gptq", slower), or not searched ("none"). `method="awq"`: rounding to nearest, after
    channels with large inputs were scaled up, where that can be folded exactly. `"autoround"`: rounding
    and ranges are learned from there in `steps` steps for each block. "fp8", "mxfp4", "nvfp4": weights become
    floats of 8 or 4 bits, whose bits and groups the format gives, and whose scales are searched for the smallest error
    of the weights, without text; fp8 layers round their inputs too, with a scale for each token. The rest is of
    `gptq`: `act_order`, columns with the largest inputs first (scales stay those of neighbouring columns, so that files
    need no order);
    `damping`, of the Hessian, as a share of its mean diagonal; `refit`, scales fitted to the codes in closed form;
    `sweeps`, how often codes are improved one by one afterwards; `input_correction`, from 0 to 1, how much of the
    difference between quantized and float inputs the weight takes up.

    `rotate`: hidden states are multiplied by Hadamard matrices on blocks as large as a group, folded into the weights;
    a model whose blocks do not compute the same then is refused.

    Mixed bits: with `candidate_bits` (instead of `bits`) and `average_bits`, each layer gets one of the candidates:
    the estimated rise of the loss is smallest, and the mean over all weights is at most `average_bits`.
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    scale_search: ScaleSearch = "nearest"
    act_order: bool = True
    damping: float = 0.01
    refit: bool = True
    sweeps: int = 2
    input_correction: float = 1.0
    steps: int = 200
    rotate: bool = False
    candidate_bits: tuple[int, ...] = ()
    average_bits: float | None = None

    def __post_init__(self) -> None:
        allowed = {
            "method": (self.method in METHODS, ", ".join(METHODS)),
            "bits": (self.bits in BITS, ", ".join(map(str, BITS))),
            "group_size": (self.group_size >= 0, "0 (one scale per row) or more; 128 and 64 are usual"),
            "scale_search": (self.scale_search in ("none", "nearest", "gptq"), "none, nearest, gptq"),
            "damping": (self.damping >= 0, "0 or more; 0.01 is usual"),
            "sweeps": (self.sweeps >= 0, "0 or more"),
            "rotate": (not self.rotate or self.columns_in_group > 0, "with groups; give a group_size such as 128"),
            "steps": (self.steps >= 1, "1 or more; 200 is usual"),
            "input_correction": (0 <= self.input_correction <= 1, "0 to 1"),
        }
        for name, (is_good, words) in allowed.items():
            if not is_good:
                raise ConfigError(f"{name}={getattr(self, name)!r}: allowed: {words}")
        self._check_mixed()
        self._check_floats()
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        unused = [name for name in changed if name in _OF_GPTQ]
        given = f"method={self.method!r}"
        if self.method != "autoround" and "steps" in changed:
            raise ConfigError(f"steps with {given}: these are of autoround; leave them out")
        if self.method != "gptq" and unused:
            raise ConfigError(f"{', '.join(unused)} with {given}: these are options of gptq; leave them out")
        if self.method != "gptq" and self.scale_search == "gptq":
            raise ConfigError(
                f"scale_search='gptq' with {given}: {self.method} does not run GPTQ; use 'nearest' or 'none'"
            )

    def _check_mixed(self) -> None:
        if not self.candidate_bits and self.average_bits is None:
            return
        given = f"candidate_bits={self.candidate_bits}, average_bits={self.average_bits}"
        known = ", ".join(map(str, BITS))
        if len(set(self.candidate_bits)) < 2 or not set(self.candidate_bits) <= set(BITS):
            raise ConfigError(f"{given}: give two or more different candidates of {known}")
        if self.bits != 4:
            raise ConfigError(f"bits={self.bits} with {given}: with candidates, leave bits out")
        low, high = min(self.candidate_bits), max(self.candidate_bits)
        if self.average_bits is None or not low <= self.average_bits <= high:
            raise ConfigError(f"{given}: give an average from {low} to {high}")

    def _check_floats(self) -> None:
        if self.float_kind is None:
            return
        given = {"bits": self.bits != 4, "group_size": self.group_size != 128, "candidate_bits": self.is_mixed}
        unused = [name for name, is_given in given.items() if is_given]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} with method={self.method!r}: the format has its own bits and groups; leave them "
                "out"
            )

    @property
    def columns_in_group(self) -> int:
        """Columns that share a scale; 0: all of a row."""
        return self.group_size if self.float_kind is None else GROUPS[self.float_kind]

    @property
    def float_kind(self) -> FloatKind | None:
        """The kind of float numbers that weights become; None, if they become whole numbers."""
        return next((kind for kind in FLOAT_KINDS if kind == self.method), None)

    @property
    def is_mixed(self) -> bool:
        return bool(self.candidate_bits)

    def with_bits(self, bits: int) -> Recipe:
        """The recipe of a layer that got so many bits."""
        return replace(self, bits=bits, candidate_bits=(), average_bits=None)

    def without_text(self) -> Recipe:
        """The recipe of a layer that too little text has reached: nearest, with the smallest error of the weights."""
        search: ScaleSearch = "none" if self.scale_search == "none" else "nearest"
        return Recipe("rtn", self.bits, self.group_size, self.symmetric, search)

    @property
    def needs_text(self) -> bool:
        """Whether calibration text decides anything."""
        if self.float_kind is not None:
            return False
        return self.method != "rtn" or self.scale_search != "none" or self.is_mixed

    @property
    def needs_float_inputs(self) -> bool:
        return self.method == "autoround" or (self.method == "gptq" and self.input_correction > 0)

    def columns_per_scale(self, in_features: int, name: str) -> int:
        """The group size of a layer of so many columns; a size that does not divide them is refused."""
        size = self.columns_in_group or in_features
        if in_features % size:
            near = [n for n in (256, 128, 96, 64, 48, 32, 16) if in_features % n == 0]
            raise ConfigError(
                f"group_size={size} at {name}: it has {in_features} columns, which {size} does not divide; "
                f"sizes that do: {', '.join(map(str, near)) or 'none of the usual ones'}; 0: one scale per row"
            )
        return size
