"""Calls of a model in a row, and how those of a copy may differ from them."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.config.schema import QuantConfig
from sparsebit.quantization import parse_qconfig
from tests.fuzz.noise import Noise
from tests.fuzz.program import Compiled
from tests.fuzz.values import error, first_difference, frozen

EXACT = 1e-5  # of the range: sums in another order
CLOSE = 1e-2  # of the range, at 16 bits
CLOSE_GRADIENT = 5e-2
UNSTABLE = 20  # times the effect of 16-bit noise on the float model: no fault of the copy

Leaves = list[tuple[str, Any]]


def exact_limit(compiled: Compiled) -> float:
    """`EXACT`; where the program rounds to a short type, a step of that: the last place of a sum decides it."""
    steps = [step for name, step in (("half", 2.0**-11), ("bfloat16", 2.0**-8)) if f".{name}" in compiled.text]
    return max([EXACT, *steps])


class Different(Exception):
    """The copy is another function than the model."""


class Invalid(Exception):
    """The model itself does not run."""


class Told(Exception):
    """The copy differs and its coverage says so."""


def _config(**schedule: bool) -> QuantConfig:
    quantizer = {"QUANTIZER": {"BIT": 16}}
    inputs = {**quantizer, "QADD": {"ENABLE_QUANT": True}}
    return parse_qconfig({"BACKEND": "virtual", "DEVICE": "cpu", "W": quantizer, "A": inputs, "SCHEDULE": schedule})


FOLDING, KEEPING = _config(FUSE_BN=True), _config(FUSE_BN=False)


def seed(call: int) -> None:
    torch.default_generator.manual_seed(100 + call % 2)
    random.seed(100 + call % 2)


def run_call(compiled: Compiled, model: nn.Module, call: int) -> Leaves:
    """Outputs of one call, what it left in its inputs, and what hooks recorded."""
    args, kwargs = compiled.inputs(call)
    compiled.log.clear()
    seed(call)
    with torch.no_grad():
        output = model(*args, **kwargs)
    return frozen({"output": output, "inputs": (args, kwargs), "hooks": list(compiled.log)})


def reference(compiled: Compiled, count: int) -> list[Leaves]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = compiled.make()
            return [run_call(compiled, model, call) for call in range(count)]
    except Exception as fault:
        raise Invalid(f"{type(fault).__name__}: {fault}") from fault


def disturbed(compiled: Compiled, count: int) -> list[list[Leaves]]:
    """The same calls with noise of 16 bits, a few times."""
    runs = []
    for seed in range(4):
        noise = Noise(seed)
        model = noise.disturb(compiled.make())
        with noise:
            runs.append([run_call(compiled, model, call) for call in range(count)])
    return runs


def compare(call: int, expected: Leaves, got: Leaves, limit: float, what: str) -> None:
    found = first_difference(expected, got, limit, floor(expected))
    if found:
        raise Different(f"call {call}, {what}: {found}")


def without_hooks(outcome: Leaves) -> Leaves:
    return [(path, value) for path, value in outcome if not path.startswith("['hooks']")]


def floor(expected: Leaves) -> float:
    """A range below which a tensor counts as zero.

    For gradients a share of the largest: that of a bias in front of a batch norm is zero but for rounding.
    """
    sizes = [float(x.abs().max()) for path, x in expected if "gradient" in path and isinstance(x, Tensor) and x.numel()]
    return 0.05 * max(sizes, default=0.0) or 1e-3


def sensitivity(expected: Leaves, runs: list[Leaves]) -> float:
    """How far 16-bit noise moves the outputs; infinite where it changes their structure."""
    worst = 0.0
    for run in runs:
        for (path, a), (other, b) in zip(expected, run, strict=False):
            if path != other or isinstance(a, Tensor) != isinstance(b, Tensor):
                return float("inf")
            if isinstance(a, Tensor) and a.is_floating_point():
                worst = max(worst, error(a, b, floor(expected)) if a.shape == b.shape else float("inf"))
    return worst
