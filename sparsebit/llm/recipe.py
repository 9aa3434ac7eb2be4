"""`Recipe` and `Calibration`: how the linear layers of a language model are quantized, and on which text.

The fields are the options of `sparsebit llm quantize` too: limits, errors and help come from `option(...)`. The command
line imports this file without torch, so imports here must not load it. Everything that decides the numbers belongs
into `Recipe`, because a resumed run compares it (`quantizing/quantization_run.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_kinds import CACHE_KINDS, CALIBRATED, CacheKind
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS, GROUPS, FloatKind
from sparsebit.llm.layers.input_kinds import ACTIVATIONS, SCHEMES, Activations, InputFormat
from sparsebit.option_fields import check_options, option

Method = Literal["rtn", "gptq", "awq", "autoround", "efficientqat", "fp8", "mxfp4", "nvfp4"]
ScaleSearch = Literal["none", "nearest", "gptq"]
CacheScales = Literal["head", "layer"]
METHODS: tuple[Method, ...] = get_args(Method)
BITS = (2, 3, 4, 8)
# Methods that begin with GPTQ, and those that learn codes block by block.
_WITH_GPTQ, _LEARNING = ("gptq", "efficientqat"), ("autoround", "efficientqat")
_OF_GPTQ = ("act_order", "damping", "refit", "sweeps", "input_correction")
_OF_COMPENSATE = tuple(name for name in _OF_GPTQ if name != "refit")  # scales of floats are not fitted
_TUNE = "Method"


@dataclass(frozen=True)
class Calibration:
    """The calibration text of a model: `num_samples` windows of `length` tokens of `text`, drawn with `seed`.

    `text`: one or several; as many windows are drawn from each, so that kinds of text are mixed evenly.
    Files of a folder (2 to 16) count as several. `num_samples`: None for 8 tokens for each column of the widest layer,
    from 32,768 to 131,072 tokens in all: 64 to 256 windows of 512.
    """

    text: Path | Sequence[Path]
    num_samples: int | None = option(None, "Windows of calibration text (64 to 256 by width).", least=1)
    length: int = option(512, "Tokens of a window.", least=2)
    seed: int = option(0, "Which windows are drawn.", least=0)
    chat_template: bool = option(False, "The text is JSON lines with `messages`; use the model's template.")

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def texts(self) -> list[Path]:
        return [Path(self.text)] if isinstance(self.text, str | os.PathLike) else [Path(one) for one in self.text]


@dataclass(frozen=True)
class Recipe:
    """The options of `sparsebit.llm.quantize` that decide the numbers.

    `scale_search`: scales are multiplied by the factor with the smallest error of the layer's output, judged by
    round-to-nearest ("nearest"), by GPTQ itself ("gptq", slower), or not searched ("none"). `method="awq"`: rounding to
    nearest, after channels with large inputs were scaled up, if that can be folded exactly. `"autoround"`: rounding
    and ranges are learned from there. "efficientqat": latent weights, scales and zero points are learned from the
    codes of GPTQ. "fp8", "mxfp4", "nvfp4": weights become floats of 8 or 4 bits; the format fixes
    bits and groups, and scales are searched for the smallest error of the weights, without text; fp8 layers also round
    their inputs, with a scale for each token.

    For `gptq` and `efficientqat`: `act_order`, columns with the largest inputs first (scales stay those of neighbouring
    columns, so that files need no order); `damping`, of the Hessian, as a share of its mean diagonal; `refit`, scales
    fitted to the codes in closed form; `sweeps`, how often codes are improved one by one afterwards;
    `input_correction`, how much of the difference between quantized and float inputs the weight compensates for.

    `end_to_end`: steps of a training of all blocks together, after the last one was quantized: codes, scales and zero
    points learn the predictions of the float model. Held-out windows of the text decide what is kept.

    `rotate`: hidden states are multiplied by Hadamard matrices on blocks as large as a group, folded into the weights;
    a model whose blocks then do not compute the same is an error.

    Mixed bits: with `candidate_bits` (instead of `bits`) and `average_bits`, each layer gets one of the candidates:
    the estimated rise of the loss is smallest, and the mean over all weights is at most `average_bits`.

    `kv_cache`: the number format of cached keys and values. "int8" and "fp8" have constant scales from calibration
    text, in one for each head or each layer (`kv_scales`), which servers read; "int4" has a scale for 32 numbers.

    `activations`: the number format of the layers' inputs. None: fp8 for fp8 weights, else float. "int8" and "fp8" have
    a scale for each token, the static ones one scale from calibration text; "nvfp4" and "mxfp4" are for weights of the
    same format. `compensate`: numbers of fp8, mxfp4 and nvfp4 weights are rounded by GPTQ with its options, on scales
    with the least error of the weights. `smooth`: channels of inputs with large values are scaled down and those of
    weights up, as far as this makes the error of the output smaller and the factor can be folded exactly (SmoothQuant,
    with a searched strength).
    """

    method: Method = option(
        "gptq", "rtn, gptq, awq, autoround, efficientqat, fp8, mxfp4 or nvfp4.", choices=METHODS, metavar="METHOD"
    )
    bits: int = option(4, "Bits of a weight.", choices=BITS)
    group_size: int = option(
        128, "Columns that share a scale; 0: one scale per row.", least=0, usual="128 and 64 are usual, 0: a row"
    )
    symmetric: bool = option(False, "Without zero points.")
    scale_search: ScaleSearch = option(
        "nearest",
        "How each scale is judged: not, by rounding to nearest, by GPTQ.",
        choices=get_args(ScaleSearch),
        panel=_TUNE,
    )
    act_order: bool = option(True, "gptq: columns in their own order.", panel=_TUNE)
    damping: float = option(0.01, "gptq: of the Hessian.", least=0.0, usual="0.01 is usual", panel=_TUNE)
    refit: bool = option(True, "gptq: scales are not fitted to the codes.", panel=_TUNE)
    sweeps: int = option(2, "gptq: how often codes are improved.", least=0, panel=_TUNE)
    input_correction: float = option(
        1.0, "gptq: how much of the error of earlier layers the weight takes up.", least=0.0, most=1.0, panel=_TUNE
    )
    steps: int = option(
        200, "autoround, efficientqat: of learning, for each block.", least=1, usual="200 is usual", panel=_TUNE
    )
    end_to_end: int = option(
        0,
        "Steps of training all blocks together on the float model's predictions, after the last block.",
        least=0,
        usual="0: none, 500 is usual",
        panel=_TUNE,
    )
    rotate: bool = option(False, "Rotate hidden states by Hadamard blocks of a group, folded into weights.")
    candidate_bits: tuple[int, ...] = option((), "Mixed bits: each layer gets one of these.", metavar="N,N,...")
    average_bits: float | None = option(None, "Mixed bits: at most so many in the mean, scales not counted.")
    kv_cache: Literal["float"] | CacheKind = option(
        "float",
        "Keys and values in the cache: float, int8, fp8, int4.",
        choices=("float", *CACHE_KINDS),
        metavar="KIND",
    )
    kv_scales: CacheScales = option(
        "head", "int8, fp8 cache: a scale for each head or layer.", choices=get_args(CacheScales), panel=_TUNE
    )

    activations: Activations | None = option(
        None, f"Inputs of layers: {', '.join(ACTIVATIONS)}.", choices=ACTIVATIONS, metavar="KIND"
    )
    compensate: bool = option(False, "fp8, mxfp4, nvfp4: GPTQ's rounding, by text, instead of to nearest.", panel=_TUNE)
    smooth: bool = option(False, "Move large values of inputs into the weights, where it helps.", panel=_TUNE)

    def __post_init__(self) -> None:
        check_options(self)
        changed = {item.name for item in fields(self) if getattr(self, item.name) != item.default}
        allowed = _OF_GPTQ if self.method in _WITH_GPTQ else _OF_COMPENSATE if self.compensate else ()
        of_gptq = [name for name in _OF_GPTQ if name in changed and name not in allowed]
        own = [name for name in ("bits", "group_size", "candidate_bits") if name in changed and self.float_kind]
        given, candidates = f"method={self.method!r}", set(self.candidate_bits)
        wish = f"candidate_bits={self.candidate_bits}, average_bits={self.average_bits}"
        asks_mixed = bool(candidates) or self.average_bits is not None
        is_known = len(candidates) > 1 and candidates <= set(BITS)
        low, high = min(candidates, default=0), max(candidates, default=0)
        is_within = self.average_bits is not None and low <= self.average_bits <= high
        searches = self.scale_search == "gptq" and not self.uses_gptq
        known, cache = ", ".join(map(str, BITS)), f"kv_cache={self.kv_cache!r}"
        for is_wrong, text in (
            (self.rotate and not self.columns_in_group, "rotate=True: allowed: with groups; give a group_size of 128"),
            (asks_mixed and not is_known, f"{wish}: give two or more different candidates of {known}"),
            (asks_mixed and self.bits != 4, f"bits={self.bits} with {wish}: with candidates, leave bits out"),
            (asks_mixed and not is_within, f"{wish}: give an average from {low} to {high}"),
            (own, f"{', '.join(own)} with {given}: the format has its own bits and groups; leave them out"),
            (self.end_to_end and self.float_kind, f"end_to_end={self.end_to_end} with {given}: for whole numbers only"),
            ("steps" in changed and not self.learns, f"steps with {given}: these are of {' and '.join(_LEARNING)}"),
            (of_gptq, f"{', '.join(of_gptq)} with {given}: these are options of gptq; leave them out"),
            ("kv_scales" in changed and not self.calibrates_cache, f"kv_scales with {cache}: it is for int8 and fp8"),
            (self._input_problem(), f"activations={self.activations!r} with {given}: {self._input_problem()}"),
            (self.compensate and not self.float_kind, f"compensate=True with {given}: it is for fp8, mxfp4 and nvfp4"),
            (self.smooth and self.activations in (None, "float"), "smooth=True: allowed: with rounded activations"),
            (self.smooth and self.method == "awq", f"smooth=True with {given}: awq scales channels itself; use gptq"),
            (searches, f"scale_search='gptq' with {given}: {self.method} does not run GPTQ; use 'nearest' or 'none'"),
        ):
            if is_wrong:
                raise ConfigError(text)

    def _input_problem(self) -> str | None:
        """Why the recipe's weights do not go with its activations in any server; None if they do."""
        wanted, kind = self.activations, self.float_kind
        if wanted is None or (wanted == "float" and kind != "fp8"):
            return None
        if kind is not None:
            allowed = ("fp8", "fp8-static") if kind == "fp8" else ("float", kind)
            return None if wanted in allowed else f"allowed: {' or '.join(allowed)}"
        if wanted in FLOAT_KINDS and wanted != "fp8":
            return f"these need weights of the same format; give method={wanted!r}"
        if not self.symmetric or self.is_mixed or self.bits not in (4, 8):
            return "weights of 4 or 8 bits without zero points are needed; give bits=4 or 8, symmetric=True"
        if self.bits == 8 and wanted.startswith("fp8"):
            return "no server multiplies whole numbers of 8 bits with fp8; give method='fp8', or bits=4"
        if self.bits == 8 and self.group_size:
            return f"group_size={self.group_size} with bits=8: products of 8 bits need one scale per row; group_size=0"
        return None

    @property
    def inputs(self) -> InputFormat | None:
        """How the inputs of layers are rounded; None: as usual for the weights (fp8: for each token; others: not)."""
        is_usual = self.activations is None or (self.method, self.activations) == ("fp8", "fp8")
        return None if is_usual else SCHEMES.get(self.activations or "float")

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
        """The recipe of a layer with this many bits."""
        return replace(self, bits=bits, candidate_bits=(), average_bits=None)

    def without_text(self) -> Recipe:
        """The recipe of a layer without enough text: nearest, with the smallest error of the weights."""
        if self.float_kind is not None:
            return replace(self, compensate=False)
        search: ScaleSearch = "none" if self.scale_search == "none" else "nearest"
        return Recipe("rtn", self.bits, self.group_size, self.symmetric, search, activations=self.activations)

    @property
    def needs_text(self) -> bool:
        """Whether calibration text has any effect."""
        return self.needs_moments or self.smooth

    @property
    def needs_moments(self) -> bool:
        """Whether weights are rounded by second moments of their inputs."""
        searches = self.method != "rtn" or self.scale_search != "none" or self.is_mixed
        return self.compensate if self.float_kind is not None else searches

    @property
    def calibrates_cache(self) -> bool:
        """Whether the scales of the cache come from calibration text."""
        return self.kv_cache in CALIBRATED

    @property
    def learns(self) -> bool:
        """Whether codes are learned block by block."""
        return self.method in _LEARNING

    @property
    def uses_gptq(self) -> bool:
        """Whether GPTQ finds the codes, or those that learning begins with."""
        return self.method in _WITH_GPTQ or self.compensate

    @property
    def needs_float_inputs(self) -> bool:
        return self.learns or (self.uses_gptq and self.input_correction > 0)

    def columns_per_scale(self, in_features: int, name: str) -> int:
        """The group size of a layer with this many columns; a size that does not divide them is an error."""
        size = self.columns_in_group or in_features
        if in_features % size:
            near = ", ".join(str(n) for n in (256, 128, 96, 64, 48, 32, 16) if in_features % n == 0)
            raise ConfigError(
                f"group_size={size} at {name}: it has {in_features} columns, which {size} does not divide; sizes that "
                f"do: {near or 'none of the usual ones'}; 0: one scale per row"
            )
        return size
