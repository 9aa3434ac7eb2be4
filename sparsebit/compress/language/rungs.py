"""The rungs of language models: each proposes the next candidate from what is known, or None.

Every candidate starts from the target's usual recipe with the largest group that fits (`_candidate`) and changes a few
options. Sizes can be computed before a candidate is made, so the mixed bits aim at a budget directly (`_bits_wanted`);
losses cannot, so without a budget they are found by bisection between candidates that kept the loss and those that did
not. `networks/rungs.py` is the same for networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.compress.climbing.rung import LADDERS, register_rung
from sparsebit.compress.climbing.sizes import SizeLine, bracket
from sparsebit.compress.language.recipe import LanguageRecipe
from sparsebit.llm.converting.targets import TARGETS, Target
from sparsebit.records.ladder import LadderStep

LANGUAGE_RUNGS = LADDERS["language models"]
_MOST_MIXED = 4
_CLOSE = 0.02  # bits: a mix that differs by less is not worth its time


@register_rung("eight bits", order=10, models="language models")
def eight_bits(known: Known) -> Candidate | None:
    """8 bits, rounded to nearest: they lose hardly anything."""
    if known.of("eight bits") or 8 not in _row(known).bits:
        return None
    return _candidate(known, "w8", "8 bits rounded to nearest lose hardly anything", {"method": "rtn", "bits": 8})


@register_rung("four bits", order=20, models="language models")
def four_bits(known: Known) -> Candidate | None:
    """4 bits by GPTQ: half of the bytes of 8."""
    if known.of("four bits"):
        return None
    return _candidate(known, "w4-gptq", "4 bits take half of the bytes of 8; GPTQ rounds so that errors cancel", {})


@register_rung("scales", order=30, models="language models")
def scales(known: Known) -> Candidate | None:
    """Scales are chosen by the error after GPTQ, not after rounding to nearest."""
    four = _losing_four_bits(known, "scales")
    if four is None:
        return None
    why = f"{four.name} {four.selection}; scales judged by the error after GPTQ instead of rounding to nearest"
    return _candidate(known, "w4-scales", why, {"scale_search": "gptq"})


@register_rung("small groups", order=40, models="language models")
def small_groups(known: Known) -> Candidate | None:
    """The smallest usual groups: each scale then serves fewer weights."""
    four = _losing_four_bits(known, "small groups")
    groups = [size for size in known.study.groups(known.goal.target) if size >= 32]
    if four is None or len(groups) < 2:
        return None
    why = f"{four.name} {four.selection}; groups of {min(groups)} have a scale for fewer weights"
    return _candidate(known, f"w4-groups{min(groups)}", why, {**_best_options(known), "group_size": min(groups)})


@register_rung("learned rounding", order=50, models="language models")
def learned_rounding(known: Known) -> Candidate | None:
    """Rounding and ranges learned block by block."""
    four = _losing_four_bits(known, "learned rounding")
    if four is None:
        return None
    why = f"{four.name} {four.selection}; autoround learns rounding and ranges block by block"
    return _candidate(known, "w4-autoround", why, {"method": "autoround"})


@register_rung("mixed bits", order=60, models="language models")
def mixed_bits(known: Known) -> Candidate | None:
    """Bits for each layer: as many as the budget allows, or as few as keep the loss."""
    row, tried = _row(known), [step for step in known.of("mixed bits") if step.cost is not None]
    made = [step for step in known.steps if step.cost is not None and step.cost.bits is not None]
    if len(row.bits) < 2 or not made or len(known.of("mixed bits")) >= _MOST_MIXED:
        return None
    wanted = _bits_wanted(known, made)
    low, high = min(row.bits), max(row.bits)
    if wanted is None or not low < wanted < high:
        return None
    if tried and abs(float(known.recipe(tried[-1]).options["average_bits"]) - wanted) < _CLOSE:
        return None
    why = f"the layers that lose most get more bits, {wanted:.2f} in the mean"
    options = {"candidate_bits": row.bits, "average_bits": round(wanted, 3)}
    return _candidate(known, f"mixed-{wanted:.2f}", why, options)


@register_rung("fewer bits", order=70, models="language models")
def fewer_bits(known: Known) -> Candidate | None:
    """3, then 2 bits, while they keep the loss or the budget asks for them."""
    below = [bits for bits in sorted(_row(known).bits, reverse=True) if bits < 4]
    done, four = known.of("fewer bits"), known.first("four bits")
    if len(done) >= len(below) or four is None:
        return None
    last = done[-1] if done else four
    if last.verdict == "too much loss" or (known.goal.prefer == "loss" and last.verdict != "over budget"):
        return None
    bits = below[len(done)]
    why = f"{last.name} is {last.verdict}; {bits} bits are smaller"
    return _candidate(known, f"w{bits}", why, {"bits": bits, "scale_search": "gptq", "group_size": _small_group(known)})


def _candidate(known: Known, name: str, why: str, options: Mapping[str, Any]) -> Candidate:
    groups = known.study.groups(known.goal.target)
    usual = {"group_size": groups[0] if groups else 0}
    chosen = {**usual, **{key: value for key, value in options.items() if value is not None}}
    return Candidate(name, why, LanguageRecipe(known.goal.target, chosen))


def _row(known: Known) -> Target:
    return TARGETS[known.goal.target]


def _losing_four_bits(known: Known, rung: str) -> LadderStep | None:
    """The first candidate of 4 bits, if more accuracy is wanted and this rung has not tried to get it."""
    return known.first("four bits") if known.loses and not known.of(rung) else None


def _best_options(known: Known) -> dict[str, Any]:
    """The options of the better 4-bit candidate so far."""
    steps = [step for name in ("four bits", "scales") for step in known.of(name) if step.selection is not None]
    best = min(steps, key=lambda step: step.selection.loss if step.selection else 0.0, default=None)
    return {} if best is None else dict(known.recipe(best).options)


def _small_group(known: Known) -> int | None:
    """Groups of 64 weights, for very few bits; None if the target or the model does not allow them."""
    return 64 if 64 in known.study.groups(known.goal.target) else None


def _bits_wanted(known: Known, made: list[LadderStep]) -> float | None:
    """Mean bits of the codes that just fit the budget; without one, halfway between kept and exceeded loss.

    0.01 bits are left as a margin, since layers take whole numbers of bits.
    """
    scales_bits = min(step.cost.bits - _mean_bits(known, step) for step in made if step.cost and step.cost.bits)
    if "bits" in known.goal.budget:
        return known.goal.budget["bits"] - scales_bits - 0.01
    if "bytes" in known.goal.budget:
        return _bits_for_bytes(known, made)
    bits = [(step.verdict, _mean_bits(known, step)) for step in made]
    bounds = bracket((b for v, b in bits if v == "within"), (b for v, b in bits if v == "too much loss"))
    return None if bounds is None or bounds[1] - bounds[0] < 4 * _CLOSE else sum(bounds) / 2


def _bits_for_bytes(known: Known, made: list[LadderStep]) -> float | None:
    """Bytes grow linearly with bits: the line goes through the candidates with the fewest and the most bits."""
    limit = known.goal.budget["bytes"]
    size = limit * known.study.float_bytes if limit <= 1 else limit
    apart = {_mean_bits(known, step): step.cost.num_bytes for step in made if step.cost}
    (bits, total), (more_bits, more) = min(apart.items()), max(apart.items())
    if more <= total:  # one candidate, or smaller groups, whose scales take what fewer bits save
        return None
    return SizeLine(bits, total, (more - total) / (more_bits - bits)).asked_for(size) - 0.01


def _mean_bits(known: Known, step: LadderStep) -> float:
    """The mean bits of the codes, without scales."""
    recipe = known.recipe(step).recipe
    return float(recipe.average_bits if recipe.is_mixed else recipe.bits)
