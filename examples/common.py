"""What the examples share: their options, the exported file run as a model, and the tables at the end."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from sparsebit import PROFILES, Audit, DeploymentError, Parity, Tolerance, audit, open_session
from sparsebit.quantization import QuantModel

CONFIGS = Path(__file__).resolve().parent / "configs"
_BESIDE = CONFIGS.parents[2] / "shared" / "data"  # weights and data beside the checkout, where someone has put them
_KEPT = _BESIDE if _BESIDE.is_dir() else Path.home() / ".cache" / "sparsebit-examples"
DATA = Path(os.environ.get("SPARSEBIT_DATA", _KEPT))

Batch = torch.Tensor | Mapping[str, torch.Tensor]
Scores = Mapping[str, Mapping[str, float]]
"""What was scored ("float", "quantized", "file") -> metric -> its value."""


def arguments(description: str | None, limit: str, config: str) -> argparse.ArgumentParser:
    """A parser with the options that every example takes; `limit`: what `--limit` counts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = config or "the recipe of the model"
    parser.add_argument("--config", default=config, help=f"what to quantize, and how ({shown})")
    parser.add_argument("--data", type=Path, default=DATA, help="the data folder (%(default)s)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"a quick look: calibrate and score on at most N {limit}"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--export", type=Path, metavar="FILE", help="the file to write (MODEL-quantized.onnx)")
    target.add_argument("--no-export", action="store_true", help="write no file: score the simulation only")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the quantized model there, to load it again")
    parser.add_argument("--json", action="store_true", help="a record on stdout; the tables then go to stderr")
    return parser


def existing(path: Path) -> Path:
    if not path.exists():
        sys.exit(f"{path} does not exist; name the data folder with --data or SPARSEBIT_DATA")
    return path


def sqnr_db(quantized: torch.Tensor, original: torch.Tensor) -> float:
    """10·log10 of signal over error energy: one more bit is six more decibels."""
    error = (quantized - original).double().square().sum()
    return float(10 * torch.log10(original.double().square().sum() / error)) if error else math.inf


class FileModel(nn.Module):
    """An exported file in its runtime, called as the model is that it came from; it answers on the CPU.

    A file for no runtime of this machine (`BACKEND: virtual` or `tensorrt`) runs node by node, as it is written.
    """

    def __init__(self, file: Path, backend: str) -> None:
        super().__init__()
        runtime = PROFILES[backend].executes
        self.session = open_session(file, runtime or "onnxruntime", optimize=runtime is not None)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        given = dict(zip(self.session.inputs, args, strict=False)) | kwargs
        found = self.session.run({name: tensor.cpu().numpy() for name, tensor in given.items()})
        outputs = tuple(map(torch.from_numpy, found))
        return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True)
class Exported:
    """A written file. `model` runs it; `float_bytes`: of the float weights; `audit`: None where `untimed` says why."""

    file: Path
    model: FileModel
    parity: Parity
    float_bytes: int
    audit: Audit | None
    untimed: str = ""

    @property
    def num_bytes(self) -> int:
        return self.file.stat().st_size

    def facts(self) -> dict[str, str]:
        share = f"{self.num_bytes / self.float_bytes:.2f} of the float weights' {_megabytes(self.float_bytes)}"
        found = {"file": str(self.file), "parity": str(self.parity), "size": f"{_megabytes(self.num_bytes)}: {share}"}
        if self.audit is None:
            return found | {"speed": f"not timed: {self.untimed}"}
        if latency := self.audit.latency:
            times = f"{latency['quantized'].cpu_ms:.3g} ms, {latency['float'].cpu_ms:.3g} ms in float"
            shapes = ", ".join(dict.fromkeys(words.removesuffix(", given") for words in self.audit.feeds.values()))
            found["speed"] = f"{self.audit.ratio:.2f} of float: {times} (CPU time, 1 thread, {shapes})"
        where = f"{self.audit.runtime} {self.audit.runtime_version}, {self.audit.cpu}"
        return found | {"runs": self.audit.verdict, "runtime": where}

    def to_dict(self) -> dict[str, Any]:
        sizes = {"num_bytes": self.num_bytes, "float_bytes": self.float_bytes}
        record = {"file": str(self.file), "parity": self.parity.to_dict(), **sizes}
        if self.audit is None:
            return record | {"untimed": self.untimed}
        left_out = ("layers", "leftovers", "feeds", "warnings")  # the long parts: `sparsebit audit FILE` tells them
        return {key: value for key, value in self.audit.to_dict().items() if key not in left_out} | record


def export(
    qmodel: QuantModel,
    options: argparse.Namespace,
    name: str,
    *,
    example: Batch,
    free: Mapping[int, str],
    check: Any,
    sample: Batch | None = None,
    tolerance: Tolerance | None = None,
) -> Exported | None:
    """Write the file, pass the parity gate on `check`, time it against float; None with `--no-export`.

    `example`: a batch, a tensor or keyword arguments, whose axes `free` may have any size in the file. `sample`: what
    is timed, by default the first one of `example`.
    """
    if options.no_export:
        return None
    target = options.export or Path(f"{name}-quantized.onnx")
    names = list(example) if isinstance(example, Mapping) else ["input"]
    parity = qmodel.export_onnx(
        _rows(example, 2),  # of one alone torch.export would take the size for fixed
        target,
        input_names=None if isinstance(example, Mapping) else names,
        dynamic_axes=dict.fromkeys(names, free),
        check=check,
        tolerance=tolerance,
    )
    assert parity is not None
    model = FileModel(target, qmodel.config.BACKEND)
    timed = sample if sample is not None else _rows(example, 1)
    tensors = timed if isinstance(timed, Mapping) else {names[0]: timed}
    feeds = {key: tensor.cpu().numpy() for key, tensor in tensors.items()}
    float_bytes = sum(weight.numel() * weight.element_size() for weight in qmodel.parameters())
    budget_s = 1.0 if options.limit else 5.0
    try:
        found = audit(target, runtime=model.session.runtime, feeds=feeds, budget_s=budget_s)
        return Exported(target, model, parity, float_bytes, found)
    except DeploymentError as error:  # nodes that are right one by one, and that the optimized graph has no kernels for
        return Exported(target, model, parity, float_bytes, None, str(error).splitlines()[0])


def finish(
    qmodel: QuantModel, batch: Any, scores: Scores, options: argparse.Namespace, exported: Exported | None = None
) -> None:
    """Tell the scores, what is quantized, the three layers that lose most on `batch`, and what the file is like."""
    errors = qmodel.get_quantization_error(batch, checker=sqnr_db)
    worst = sorted(errors.items(), key=lambda item: item[1])[:3]
    saved = None if options.save is None else qmodel.save(options.save)
    console = Console(stderr=options.json)
    console.print(_score_table(scores, f"{qmodel.config.BACKEND} on {qmodel.config.DEVICE}"))
    console.print("coverage:", str(qmodel.coverage).splitlines()[0])
    console.print("worst layers:", Text(", ".join(f"{layer} ({decibels:.1f} dB)" for layer, decibels in worst)))
    if exported is not None:
        console.print(_fact_table(exported.facts()))
    if saved is not None:
        console.print("saved:", saved)
    if options.json:
        record = {"config": str(options.config), "backend": qmodel.config.BACKEND, "scores": scores}
        record |= {"coverage": str(qmodel.coverage).splitlines()[0], "worst_layers": dict(worst)}
        record |= {"export": exported and exported.to_dict(), "saved": saved and str(saved)}
        print(json.dumps(record, indent=2))


def _score_table(scores: Scores, title: str) -> Table:
    """A row per metric, a column per thing scored; the loss is that of the last column against float."""
    last = list(scores)[-1]
    table = Table("metric", *scores, "loss", title=title)
    for metric in scores[last]:
        values = [column.get(metric) for column in scores.values()]
        shown = ["" if value is None else f"{value:.4g}" for value in values]
        before = scores["float"].get(metric)
        table.add_row(metric, *shown, "" if before is None else f"{before - scores[last][metric]:.4g}")
    return table


def _fact_table(facts: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, words in facts.items():
        table.add_row(name, Text(words))  # not markup: names may have brackets
    return table


def _rows(batch: Batch, count: int) -> Batch:
    """The first `count` (1 or 2) samples; a single one twice where two are wanted."""
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch, batch])[:count]
    return {name: torch.cat([tensor, tensor])[:count] for name, tensor in batch.items()}


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
