"""The likely causes of a layer's error, from its numbers: a sentence each, and what to try.

A table of rules, each a function of one quantized tensor. Thresholds are where the effect is known to matter: below
`GOOD_DB` a tensor's error is visible in most networks, a range that one channel sets alone wastes three bits, and so
on. Rules look at recorded numbers only, so a cause is likely, not proved; the user finds out by trying the remedy.
"""

from __future__ import annotations

from collections.abc import Callable

from sparsebit.report.page_data import HEIGHTS, Cause, Layer, Tensor

GOOD_DB = 30.0  # no cause is sought above it; 8 bits of a normal distribution reach about 40 dB
_DOMINANT = 8.0  # the largest channel over the median one: at 8, the median channel loses 3 bits
_CLIPPED = 0.005  # a share of the values; a calibrated range clips less than 0.1 %
_TAIL_BINS = 0.5  # the share of the range that hardly any value uses
_APART = 4.0  # the ratio of the ranges of two summands: at 4, the smaller one loses 2 bits
_FEW_BITS = 4

Rule = Callable[[Tensor], Cause | None]


def causes_of(layer: Layer) -> tuple[Cause, ...]:
    """Why the layer is in float, then the first rule that fits each tensor with a visible error."""
    found: list[Cause] = []
    if layer.why_float and layer.arithmetic in ("float", "unknown"):
        found.append(Cause(f"It is computed in float: {layer.why_float}.", _sentence(layer.remedy)))
    for tensor in layer.tensors:
        if tensor.sqnr_db is not None and tensor.sqnr_db < GOOD_DB:
            found += filter(None, [next(filter(None, (rule(tensor) for rule in RULES)), None)])
    return (*found, *_of_summands(layer))


def _clipped(tensor: Tensor) -> Cause | None:
    if tensor.clipped is None or tensor.clipped < _CLIPPED:
        return None
    return Cause(
        f"{tensor.clipped:.1%} of the values of its {tensor.role} are outside of the range and are clipped.",
        "Try a wider range: the observer minmax, or percentile with a smaller ALPHA.",
    )


def _dominated(tensor: Tensor) -> Cause | None:
    """One channel is much larger than most, and all share one scale."""
    ratio = _spread(tensor.peaks)
    if ratio is None or ratio < _DOMINANT or (tensor.num_scales or 0) != 1:
        return None
    if tensor.role == "weight":
        return Cause(
            f"One channel of the weight is {ratio:.0f} times as large as the median one and sets the only scale.",
            "Try a scale per channel: W.QSCHEME: per-channel-symmetric; or ALGORITHMS: [equalize].",
        )
    return Cause(
        f"Outlier channels: the largest of the {tensor.role} is {ratio:.0f} times as large as the median one.",
        "Try smoothing, which moves the factor into the weight: ALGORITHMS: [smooth].",
    )


def _few_values(tensor: Tensor) -> Cause | None:
    """Hardly any value lies in most of the range."""
    used = None if tensor.float_bins is None else _used_share(tensor)
    if used is None or used > 1 - _TAIL_BINS:
        return None
    return Cause(
        f"Few samples set the range: nearly all values of its {tensor.role} are in {used:.0%} of it.",
        "Try an observer that leaves them out: OBSERVER.TYPE: percentile or mse.",
    )


def _few_bits(tensor: Tensor) -> Cause | None:
    if tensor.bits is None or tensor.bits > _FEW_BITS:
        return None
    if tensor.role == "weight":
        return Cause(
            f"The weight has {tensor.bits} bits.",
            "Try learned rounding (ALGORITHMS: [gptq] or [reconstruct]), groups of scales, or more bits here.",
        )
    return Cause(f"Its {tensor.role} has {tensor.bits} bits.", "Try more bits here, or training with quantization.")


def _one_sided(tensor: Tensor) -> Cause | None:
    """A symmetric range around values of one sign leaves half of the codes unused."""
    ends = tensor.low, tensor.high, tensor.clip_low, tensor.clip_high
    if None in ends or tensor.role == "weight":
        return None
    low, high, clip_low, clip_high = (end or 0.0 for end in ends)
    width = clip_high - clip_low
    if width <= 0 or (high - low) > 0.6 * width:
        return None
    return Cause(
        f"The values of its {tensor.role} use {max(high - low, 0.0) / width:.0%} of the range.",
        "Try an affine range (A.QSCHEME: per-tensor-affine), or calibration data that is nearer to the real one.",
    )


RULES: tuple[Rule, ...] = (_clipped, _dominated, _few_values, _few_bits, _one_sided)


def _of_summands(layer: Layer) -> list[Cause]:
    """A sum or concatenation whose inputs have very different ranges."""
    if not layer.op.lower().startswith(("add", "cat", "concat", "integeradd")):
        return []
    inputs = [tensor for tensor in layer.tensors if tensor.role.startswith(("input", "shared"))]
    widths = [t.clip_high - t.clip_low for t in inputs if t.clip_high is not None and t.clip_low is not None]
    if len(widths) < 2 or min(widths) <= 0 or max(widths) / min(widths) < _APART:
        return []
    ratio = max(widths) / min(widths)
    return [
        Cause(
            f"It joins values of two scales, one {ratio:.0f} times the other.",
            "Try equalization before it (ALGORITHMS: [equalize]), or share one scale between its inputs.",
        )
    ]


def _spread(peaks: tuple[float, ...]) -> float | None:
    """The largest channel over the median one."""
    if len(peaks) < 3:
        return None
    median = sorted(peaks)[len(peaks) // 2]
    return max(peaks) / median if median > 0 else None


def _used_share(tensor: Tensor) -> float | None:
    """The share of the histogram's bins that hold nearly all values: those above 1/1,000 of the fullest one."""
    assert tensor.float_bins is not None
    heights = [HEIGHTS.index(char) for char in tensor.float_bins.heights]
    if len(heights) < 8:
        return None
    full = [place for place, height in enumerate(heights) if height > 2]  # (2 / 63)² is about 1/1,000
    return (full[-1] - full[0] + 1) / len(heights) if full else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
