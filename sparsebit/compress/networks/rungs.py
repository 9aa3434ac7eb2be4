"""The rungs of networks: each proposes the next candidate from what is known, or None if it has nothing to add.

A rung sees the goal and all steps so far (`Known`), and starts from one of them: the best, or the first with 4 or 8
bits. Cheap and promising rungs have small orders. The search asks every rung in order, again and again, until none has
a new candidate; a candidate whose recipe was tried already counts as none, so a rung may propose it again.

Sizes before quantization are estimated from measured files (`_weights_of`, `_share_under_budget`): a file also holds
its graph, scales and float layers, so the share that is asked for is corrected by what the last files took.
"""

from __future__ import annotations

from typing import Any

from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.compress.climbing.rung import LADDERS, register_rung
from sparsebit.compress.climbing.sizes import SizeLine, bracket
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.config.schema import QuantConfig
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.quantization.effort import with_effort
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records.ladder import Cost, LadderStep
from sparsebit.sparse.sparse_config import parse_sconfig

RUNGS = LADDERS["networks"]
_MOST_BITS_TRIES, _MOST_JOINT_TRIES = 4, 3
_SPARE = 0.015  # the unused share of a budget of bytes above which another try is worth its time
_FEWEST_LEARNING_STEPS = 100  # fewer steps gain nothing
_TRAINING_STEPS = 500  # of 4-bit weights: the search has other candidates to try in its time


@register_rung("eight bits", order=10)
def eight_bits(known: Known) -> Candidate | None:
    """8 bits in the formats of the target's profile."""
    if known.of("eight bits") or (_cannot_fit(known, 8) and set(known.goal.budget) == {"bytes"}):
        return None
    why = f"8 bits in the formats that {known.goal.target} runs cost little accuracy and are the fastest"
    return Candidate("w8", why, Recipe(as_qconfig(known.goal.target)))


@register_rung("measured placement", order=20)
def measured_placement(known: Known) -> Candidate | None:
    """Layers that are slower in integers stay float: measured on this machine."""
    wants_time = known.goal.prefer == "latency" or "latency" in known.goal.budget
    best = known.best
    if best is None or not wants_time or PROFILES[known.goal.target].timed_in is None:
        return None
    recipe = known.recipe(best)
    if recipe.placement != "default" or best.verdict == "too much loss":
        return None
    why = f"some layers of {best.name} may be slower in integers than in float on this machine"
    return Candidate(f"{_base(best)}-placed", why, recipe.replace(placement="measured"))


@register_rung("ranges", order=30)
def ranges(known: Known) -> Candidate | None:
    """Ranges that clip outliers, instead of the extremes of the calibration data."""
    best = known.best
    if best is None or not known.loses:
        return None
    for kind in ("mse", "percentile"):
        name = f"{_base(best)}-{kind}"
        recipe = known.recipe(best)
        changed = _with_observers(recipe.config, kind)
        if changed is not None and not _is_tried(known, recipe.replace(config=changed)):
            why = f"{best.name} {_loss(best)}; ranges chosen by {kind} clip rare large values"
            return Candidate(name, why, recipe.replace(config=changed))
    return None


@register_rung("rescaling", order=40)
def rescaling(known: Known) -> Candidate | None:
    """Smoothing moves outlier channels of activations into the weights; equalization evens out depthwise weights."""
    best = known.best
    if best is None or not known.loses:
        return None
    recipe = known.recipe(best)
    if recipe.config.A.QUANTIZER.DISABLE:
        return None
    ways = [("smooth", known.study.has_linears()), ("equalize", known.study.has_depthwise())]
    for step, fits in ways:
        present = [entry.to_entry() for entry in recipe.config.ALGORITHMS]
        if not fits or step in present:
            continue
        changed = recipe.replace(config=recipe.config.replace("ALGORITHMS", [step, *present]))
        if not _is_tried(known, changed):
            what = "outlier channels of activations" if step == "smooth" else "depthwise weights of different size"
            return Candidate(f"{_base(best)}-{step}", f"{best.name} {_loss(best)}; {step} evens out {what}", changed)
    return None


@register_rung("float layers", order=50)
def float_layers(known: Known) -> Candidate | None:
    """The layers that cost the most accuracy stay float: 1, 2, 4, then 8 of them."""
    tried = known.of("float layers")
    base = next((step for step in reversed(known.steps) if step.rung != "float layers" and step.cost), None)
    best = known.best
    if not known.loses or known.goal.prefer == "loss" or best is None or base is None or len(tried) >= 4:
        return None
    start = min((s for s in known.steps if s.cost and s.rung != "float layers"), key=lambda s: _loss_of(s))
    names, count = known.study.worst_layers(start), 2 ** len(tried)
    if count > max(len(names), 1) * 2 or not names:
        return None
    recipe, chosen = known.recipe(start), names[:count]
    config = _with_float(recipe.config, chosen)
    why = f"{start.name} {_loss(start)}; the outputs lose most at {', '.join(chosen[:3])}"
    return Candidate(f"{_base(start)}-float{len(chosen)}", why, recipe.replace(config=config, placement="default"))


@register_rung("four bits", order=60)
def four_bits(known: Known) -> Candidate | None:
    """4-bit weights, rounded by GPTQ, then trained; rounded to nearest where only the size of the file matters."""
    if not known.wants_small or not _needs_fewer_bytes(known) or 4 not in known.study.low_bits:
        return None
    done, config = known.of("four bits"), known.study.low_bit_config
    if not done and _cannot_fit(known, 4):
        why = "its file shows what everything but the weights takes; its weights alone are over the budget"
        return Candidate("w4-nearest", why, Recipe(config))
    if not done:
        why = "4-bit weights take half the bytes of 8; GPTQ rounds them so that errors cancel"
        return Candidate("w4-gptq", why, Recipe(with_effort(config, "good")))
    first = done[0]
    if len(done) == 1 and first.cost is None:
        why = f"{first.name} {_loss(first)}; rounding to nearest needs no graph of the whole model"
        return Candidate("w4-nearest", why, Recipe(config))
    is_enough = first.verdict == "within" and known.goal.prefer != "loss"
    if len(done) > 1 or first.selection is None or is_enough:  # training changes the loss, not the size
        return None
    why = f"{first.name} {_loss(first)}; the whole network learns the float model's outputs"
    return Candidate("w4-best", why, Recipe(with_effort(config, "best", steps=_TRAINING_STEPS)))


@register_rung("mixed bits", order=70)
def mixed_bits(known: Known) -> Candidate | None:
    """2, 4 or 8 bits per layer, by sensitivity: as few bytes as keep the loss, or the least loss in the budget."""
    four, eight = known.first("four bits"), known.first("eight bits")
    tried, bits = [step for step in known.of("mixed bits") if step.cost is not None], known.study.low_bits
    if four is None or len(known.of("mixed bits")) >= _MOST_BITS_TRIES:
        return None
    most = 1.0 if eight is None else _size(eight)
    # One bit of every weight is 1/32 of the float file's weights.
    least = _size(four) - (4 - bits[0]) / 32
    if "bytes" in known.goal.budget:
        share = _share_under_budget(known, tried)
    else:  # the fewest bits are taken to lose too much, and 8 bits to keep the loss, until they are measured
        made = (four, *tried)
        kept = [most, *(_size(step) for step in made if step.verdict == "within")]
        bounds = bracket(kept, [least, *(_size(step) for step in made if step.verdict != "within")])
        share = None if bounds is None else sum(bounds) / 2
    if share is None or not least < share < most:
        return None
    asked = _weights_of(four).asked_for(share)
    # GPTQ needs a graph of the whole model: where a candidate with it could not be made, none has it.
    is_possible = all(step.cost for name in ("four bits", "mixed bits") for step in known.of(name))
    effort = "good" if is_possible else "fast"
    config = known.study.bits_under(with_effort(known.study.low_bit_config, effort), asked, bits)
    listed = " or ".join(map(str, bits))
    why = f"{four.name} {_loss(four)}; {listed} bits by how much each layer loses, at {share:.3f} of the float bytes"
    return Candidate(f"mixed-{share:.3f}", why, Recipe(config))


@register_rung("channels and bits", order=80)
def channels_and_bits(known: Known) -> Candidate | None:
    """Removes channels and chooses bits together, for a budget of bytes that fewer bits do not reach, or not well."""
    four = known.first("four bits")
    tried = [step for step in known.of("channels and bits") if step.cost is not None]
    if "bytes" not in known.goal.budget or four is None or len(known.of("channels and bits")) >= _MOST_JOINT_TRIES:
        return None
    limit, share = _limit(known, "bytes"), _share_under_budget(known, tried)
    if share is None or limit > _size(four) * 1.5:
        return None
    config = known.study.low_bit_config
    asked = max(_weights_of(four).asked_for(share), 0.01)
    found = known.study.channels_and_bits(config, asked, known.study.low_bits)
    why = f"the budget of {limit:.3f} of the bytes, against {_size(four):.3f} with 4 bits: channels go too"
    return Candidate(f"joint-{share:.3f}", why, Recipe(with_effort(found.qconfig, "good"), sconfig=found.sconfig))


@register_rung("channels", order=90)
def channels(known: Known) -> Candidate | None:
    """Removes channels for a budget of latency or multiplications that 8 bits alone do not reach."""
    tried = known.of("channels")
    wanted = {name: known.over(name) for name in ("latency", "macs") if known.over(name) > 1}
    if not wanted or len(tried) >= _MOST_JOINT_TRIES:
        return None
    name = max(wanted, key=lambda key: wanted[key])
    eight = known.first("eight bits")
    if eight is None or eight.cost is None:
        return None
    # The quantized file takes `before` of the float amount; channels save the rest, each try 5 % more than the last.
    before = {"latency": eight.cost.latency, "macs": 1.0}[name] or 1.0
    share = min(0.95, _limit(known, name) / before * 0.97 * 0.95 ** len(tried))
    sconfig, round_to = known.study.channels({name: share})
    why = f"8 bits take {before:.2f} of the float {name}; without some channels it is about {share * before:.2f}"
    recipe = Recipe(as_qconfig(known.goal.target), sconfig=parse_sconfig(sconfig), round_to=round_to)
    return Candidate(f"channels-{share:.2f}", why, recipe)


@register_rung("learning", order=100)
def learning(known: Known) -> Candidate | None:
    """The best pruned candidate learns the outputs of the float model before it is quantized."""
    best = known.best
    if best is None or best.verdict == "over budget" or not known.loses:
        return None
    recipe, steps = known.recipe(best), known.study.learning_steps(known.goal.minutes)
    if recipe.sconfig is None or recipe.learning_steps or steps < _FEWEST_LEARNING_STEPS:
        return None
    why = f"{best.name} {_loss(best)}; the pruned model learns the float model's outputs in {steps} steps"
    return Candidate(f"{_base(best)}-learned", why, recipe.replace(learning_steps=steps))


def _is_tried(known: Known, recipe: Recipe) -> bool:
    return any(step.recipe and known.recipe(step).key == recipe.key for step in known.steps)


def _base(step: LadderStep) -> str:
    """The name without the number that the search puts in front."""
    return step.name.split("-", 1)[1] if step.name[:2].isdigit() else step.name


def _loss(step: LadderStep) -> str:
    return str(step.selection) if step.selection is not None else f"is {step.verdict}"


def _loss_of(step: LadderStep) -> float:
    return float("inf") if step.selection is None else step.selection.loss


def _with_observers(config: QuantConfig, kind: str) -> QuantConfig | None:
    """The config with ranges chosen by `kind`; None if they are already, or no quantizer has a range to choose."""
    changes: list[Any] = []
    for part in ("W", "A"):
        section = getattr(config, part)
        if section.QUANTIZER.DISABLE or (part == "W" and kind == "percentile") or kind == section.OBSERVER.TYPE:
            continue
        changes += [f"{part}.OBSERVER.TYPE", kind]
    return config.replace(*changes) if changes else None


def _with_float(config: QuantConfig, layers: list[str]) -> QuantConfig:
    for part in ("W", "A"):
        own = [{name: ["QUANTIZER.DISABLE", True]} for name in layers]
        present = [override.to_entry() for override in getattr(config, part).SPECIFIC]
        config = config.replace(f"{part}.SPECIFIC", [*own, *present])
    return config


def _limit(known: Known, name: str) -> float:
    """A budget as a share of the float file's amount."""
    limit = known.goal.budget[name]
    if limit <= 1:
        return limit
    cost: Cost = known.study.bench.float_cost
    whole = {"bytes": cost.num_bytes, "macs": cost.macs, "latency": cost.milliseconds or 1.0}[name]
    return limit / whole


def _needs_fewer_bytes(known: Known) -> bool:
    """Whether 8 bits are too large, or smaller is better."""
    is_over = any(step.verdict == "over budget" for step in known.of("eight bits"))
    return known.goal.prefer == "bytes" or is_over or _cannot_fit(known, 8)


def _cannot_fit(known: Known, bits: int) -> bool:
    """Whether the weights alone, at this many bits, exceed the budget of bytes."""
    return "bytes" in known.goal.budget and _limit(known, "bytes") < bits / 32


def _share_under_budget(known: Known, tried: list[LadderStep]) -> float | None:
    """The share to ask for so that the file just fits, corrected by how far earlier files missed it; None: it fits."""
    limit = _limit(known, "bytes")
    spares = [limit - _size(step) for step in tried]
    if spares and 0 <= spares[-1] < _SPARE * limit:
        return None
    # An excess is corrected by more than itself and a rest by less, so that the next file stays below the limit.
    return limit + sum(spare * (1.1 if spare < 0 else 0.9) for spare in spares)


def _weights_of(four: LadderStep) -> SizeLine:
    """The share of the file's bytes over the share of the weights': a file also holds its graph and scales."""
    weights = 4 / 32  # of 4-bit weights, by the float ones
    return SizeLine(weights, max(weights, _size(four)), 1.0)


def _size(step: LadderStep) -> float:
    """The share of the float file's bytes that a file takes."""
    assert step.cost is not None
    return step.cost.bytes_ratio
