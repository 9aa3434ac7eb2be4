"""A bench with a small trained net, as `compress` makes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsebit.compress.judging.judges import judge_of
from sparsebit.compress.judging.metrics import NOISE
from sparsebit.compress.judging.samples import split
from sparsebit.compress.networks.bench import Bench, example_of, float_cost, stopwatch_for, write_float
from tests.compress.made import goal
from tests.compress.nets import batches, trained


def bench(folder: Path, target: str = "onnxruntime", model: nn.Module | None = None, **given: Any) -> Bench:
    """128 samples: 64 calibrate, 32 select, 32 are for the end. Judged by the noise of the outputs."""
    net, wanted = model or trained(), goal(target, **given)
    samples = split(batches(128, 3), None, needs_samples=True)
    with torch.no_grad():
        example = example_of(net, samples.calibration)
    file = folder / "float.onnx"
    example = replace(example, axes=write_float(net, example, file))
    stopwatch = stopwatch_for(wanted, example, net)
    cost = float_cost(file, net, example, stopwatch)
    judge = judge_of(NOISE, net, samples.selection, samples.final)
    return Bench(net, wanted, samples.calibration, example, judge, stopwatch, file, cost)
