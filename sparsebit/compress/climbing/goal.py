"""The goal of a search: what the user asks for, how far a file is from it, and which of two files is better.

`read_goal` is the edge: it checks everything that the user gave and returns a `LadderGoal`; the rest of the package
trusts it. There are two kinds of goals: a largest loss (`prefer` is then made small), or a budget (`prefer` is then
"loss": the most accurate file that fits). A limit up to 1 is a share of the float file's cost, above that an amount.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from sparsebit.backends import BACKENDS
from sparsebit.config.fields import nearest
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import ConfigError
from sparsebit.records.ladder import Cost, Judgement, LadderGoal, LadderStep, Verdict

Amount = Literal["latency", "bytes", "macs", "bits"]
Models = Literal["networks", "language models"]
Budget = Mapping[str, float | str]

# The allowed loss in points of the metric if the user gives neither a loss nor a budget.
USUAL_LOSS = 1.0
_UNITS: dict[str, dict[str, float]] = {
    "latency": {"us": 1e-3, "ms": 1.0, "s": 1e3},
    "bytes": {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30},
    "macs": {"k": 1e3, "m": 1e6, "g": 1e9},
    "bits": {},
}
_AMOUNTS: dict[Models, tuple[Amount, ...]] = {
    "networks": ("latency", "bytes", "macs"),
    "language models": ("bytes", "bits"),
}


def read_goal(
    target: str,
    metric: str,
    *,
    max_loss: float | None,
    budget: Budget | None,
    prefer: Amount | None,
    minutes: float,
    models: Models = "networks",
) -> LadderGoal:
    """The checked goal; a ConfigError names what is wrong. `target`: one that the caller knows."""
    amounts = _AMOUNTS[models]
    minutes, max_loss = _number("minutes", minutes), None if max_loss is None else _number("max_loss", max_loss)
    if not minutes > 0:
        raise ConfigError(f"minutes={minutes:g}: how long the search may take, above 0")
    if not isinstance(budget, Mapping | None):
        raise ConfigError(f"budget={budget!r}: give limits by their names, as {{'bytes': 0.12}}")
    if max_loss is not None and not max_loss >= 0:
        raise ConfigError(f"max_loss={max_loss:g}: a loss in the unit of the metric, from 0 on")
    if prefer is not None and prefer not in amounts:
        raise ConfigError(f"prefer={prefer!r}: allowed for {models}: {', '.join(amounts)}")
    if prefer is not None and budget:
        raise ConfigError(
            f"prefer={prefer!r} and a budget: a budget asks for the most accurate file; give one of the two"
        )
    if unknown := [name for name in budget or {} if name not in amounts]:
        raise ConfigError(f"budget {unknown[0]!r}: allowed for {models}: {', '.join(amounts)}")
    limits = {name: read_amount(name, limit) for name, limit in (budget or {}).items()}
    is_timed = models == "networks" and PROFILES[target].timed_in is not None
    if not is_timed and (prefer == "latency" or "latency" in limits):
        raise ConfigError(f"files for {target} do not run here, so their latency is not known; use bytes or macs")
    if limits:
        return LadderGoal(target, metric, max_loss, limits, "loss", minutes)
    loss = USUAL_LOSS if max_loss is None else max_loss
    return LadderGoal(target, metric, loss, {}, prefer or ("latency" if is_timed else "bytes"), minutes)


def need_backend(target: str) -> None:
    """Raise a ConfigError unless the target is a backend of networks."""
    allowed = [name for name in BACKENDS if PROFILES[name].ending == ".onnx" or PROFILES[name].executes]
    if target in BACKENDS and target not in allowed:
        raise ConfigError(
            f"target={target!r}: nothing here runs files for {target}, so candidates cannot be compared; "
            f"allowed: {', '.join(allowed)}. sparsebit.quantize(model, data, {target!r}) makes one {target} file"
        )
    if target not in BACKENDS:
        near = nearest(target, BACKENDS)
        hint = f"; did you mean {near}?" if near else ""
        models = "for a language model, give its folder as the model"
        raise ConfigError(f"target={target!r}: allowed: {', '.join(allowed)}{hint}; {models}")


def read_amount(name: str, limit: float | str) -> float:
    """A limit as a number: up to 1 a share of the float file's, above that milliseconds, bytes, multiplications, bits.

    >>> read_amount("latency", "50 %"), read_amount("bytes", "4 MB"), read_amount("latency", 0.5)
    (0.5, 4000000.0, 0.5)
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(%|[A-Za-z]*)\s*", str(limit))
    units = {"": 1.0, "%": 0.01, **_UNITS[name]}
    try:
        number = float(found[1]) if found else float("nan")
    except ValueError:
        number = float("nan")
    factor = units.get(found[2].lower(), float("nan")) if found else 0.0
    if not 0 < number * factor < float("inf"):
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(f"budget {name}={limit!r}: a number above 0, as 0.5, or with a unit: {known}")
    if name == "bits" and number * factor < 1:
        raise ConfigError(f"budget bits={limit!r}: bits of a weight with its scales, as 4.3")
    if found and found[2] == "%" and number > 100:
        raise ConfigError(f"budget {name}={limit!r}: a share of the float file's is at most 100 %")
    if found and found[2] not in ("", "%") and number * factor <= 1:
        raise ConfigError(f"budget {name}={limit!r}: limits up to 1 are shares of the float file's; give a share")
    return number * factor


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: give a number") from None


def used(goal: LadderGoal, cost: Cost) -> dict[str, float]:
    """The share of each budget that the file uses: 1 is all of it."""
    return {name: _amount(name, cost, absolute=limit > 1) / limit for name, limit in goal.budget.items()}


def is_over(goal: LadderGoal, cost: Cost) -> bool:
    """Whether the file takes more than a budget."""
    return any(share > 1 for share in used(goal, cost).values())


def verdict_of(judged: Judgement | None, allowed: float | None) -> Verdict:
    """Whether the measured loss is within the allowed one."""
    return "within" if judged is not None and (allowed is None or judged.loss <= allowed) else "too much loss"


def rank(goal: LadderGoal, step: LadderStep) -> tuple[float, ...]:
    """A sort key, the best step first: steps that keep the goal by their cost, the others by how far they are off."""
    if step.cost is None:
        return (2.0,)
    over = max([0.0, *(share - 1 for share in used(goal, step.cost).values())])
    loss = float("inf") if step.selection is None else step.selection.loss
    if step.verdict == "within":
        return (0.0, loss) if goal.prefer == "loss" else (0.0, _amount(goal.prefer, step.cost), loss)
    return (1.0, over, loss)


def cost_of(goal: LadderGoal, cost: Cost) -> float:
    """The cost that the search makes small, as a share of the float file's; with budgets, that of the tightest one."""
    if goal.prefer != "loss":
        return _amount(goal.prefer, cost)
    name = max(used(goal, cost).items(), key=lambda item: item[1])[0]
    return _amount(name, cost)


def pareto(goal: LadderGoal, steps: tuple[LadderStep, ...]) -> tuple[str, ...]:
    """The names of the judged steps that no other step beats in both loss and cost, the cheapest first."""
    judged = [
        (cost_of(goal, step.cost), step.selection.loss, step.name) for step in steps if step.cost and step.selection
    ]
    found: list[tuple[float, float, str]] = []
    for one in sorted(judged):
        if not found or one[1] < found[-1][1]:
            found.append(one)
    return tuple(name for _, _, name in found)


def _amount(name: Any, cost: Cost, *, absolute: bool = False) -> float:
    found = {
        "latency": (cost.latency, cost.milliseconds),
        "bytes": (cost.bytes_ratio, cost.num_bytes),
        "macs": (cost.macs_ratio, cost.macs),
        "bits": (cost.bits, cost.bits),
    }[name][absolute]
    assert found is not None  # `read_goal` raises for a latency that cannot be measured
    return float(found)
