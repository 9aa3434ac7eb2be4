"""Structured pruning of many architectures, and accuracies of pruned CIFAR models.

    python benchmarks/sparse.py [--only GLOB] [--json FILE]      every architecture of the zoo, random weights
    python benchmarks/sparse.py accuracy [--json FILE]           CIFAR models, 5,000 images, no fine-tuning

The first removes 30 % of the channels that the groups allow (L1), shrinks, and compares the small model with the masked
one: the relative difference, the share of MACs that is left, the number of groups, and the reasons for what is spared.
Torch-Pruning, where it is importable, prunes the same model by 30 % and must still run.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import emit
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from zoo import spread
from zoo_models import ZOO
from zoo_runner import run_zoo

RATIO = 0.3


def examine(name: str) -> dict[str, Any]:
    from sparsebit.sparse import SparseModel

    torch.manual_seed(0)
    model, batch = ZOO[name]()
    model.eval()
    spread(model)
    start = time.perf_counter()
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": RATIO}}
    smodel = SparseModel(model, config, batch).eval()
    smodel.calc_params()
    small = smodel.shrink()
    seconds = time.perf_counter() - start
    difference = _difference(outputs(smodel.model, batch), outputs(small, batch))
    left = macs(small, batch) / macs(model, batch)
    reasons = Counter(entry.reason for entry in smodel.groups.spared if entry.dim < 2)
    return {
        "model": name,
        "ok": difference <= 1e-5 and left <= 0.8,
        "difference": difference,
        "macs_left": round(left, 3),
        "groups": len(smodel.groups.groups),
        "units": len(smodel.groups.units),
        "spared": [f"{count} axes: {reason[:160]}" for reason, count in reasons.most_common(6)],
        "seconds": round(seconds, 1),
        "torch_pruning": _torch_pruning(model, batch),
    }


def _torch_pruning(model: nn.Module, batch: Any) -> str | float:
    """The share of MACs that Torch-Pruning leaves; why not, where it fails."""
    try:
        import torch_pruning
    except ImportError:
        return "not installed"
    try:
        pruned = copy.deepcopy(model)
        heads = [m for m in pruned.modules() if isinstance(m, nn.Linear)][-1:]
        pruner = torch_pruning.pruner.MagnitudePruner(
            pruned, batch, importance=torch_pruning.importance.MagnitudeImportance(p=1), pruning_ratio=RATIO,
            ignored_layers=heads,
        )  # fmt: skip
        pruner.step()
        before, after = outputs(model, batch), outputs(pruned, batch)
        if [x.shape for x in before] != [x.shape for x in after]:
            return "other output shapes"
        return round(macs(pruned, batch) / macs(model, batch), 3)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"


def macs(model: nn.Module, batch: Any) -> float:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its operators are not counted
    try:
        with FlopCounterMode(display=False) as counter:
            outputs(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    return float(counter.get_total_flops())


@torch.no_grad()
def outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)


# Each with the share of the MACs that may be left where ratios are chosen for it; None: as the config says.
SPARSERS: dict[str, tuple[tuple[dict[str, Any], float | None], ...]] = {
    "resnet20": (
        ({"TYPE": "unstructured", "RATIO": 0.5, "SCOPE": "global"}, None),
        ({"TYPE": "unstructured", "GRANULARITY": "2:4"}, None),
        ({"TYPE": "structured", "RATIO": 0.21}, None),
        ({"TYPE": "structured"}, 0.7),
    ),
    "mobilenetv2": (
        ({"TYPE": "unstructured", "RATIO": 0.5, "SCOPE": "global"}, None),
        ({"TYPE": "structured", "RATIO": 0.195}, None),
    ),
}


def accuracy(options: argparse.Namespace) -> None:
    """CIFAR models without fine-tuning: pruned, with new batch-norm statistics, and reconstructed; no labels."""
    from models import cifar

    from sparsebit.sparse import SparseModel, reestimate_norms

    for name in options.model or SPARSERS:
        task = cifar(name, options.images, options.calibration)
        example = task.calibration[0][:2]
        dense, _ = task.evaluate(task.model.eval())
        row = {"benchmark": "sparse_accuracy", "model": name, "images": options.images, "float": dense}
        for sparser, budget in SPARSERS[name]:
            smodel = SparseModel(task.model, {"DEVICE": "cpu", "SPARSER": sparser}, example).eval()
            if budget is not None:
                smodel.choose_ratios({"macs": budget}, task.calibration[:1])
            smodel.calc_params()
            is_structured = sparser["TYPE"] == "structured"
            pruned = smodel.shrink() if is_structured else smodel.masked_model()
            result = {"sparser": sparser, "budget": budget, "pruned": task.evaluate(pruned.eval())[0]}
            reestimate_norms(pruned, task.calibration)
            result["new_norm_statistics"] = task.evaluate(pruned.eval())[0]
            start = time.perf_counter()
            smodel.reconstruct(task.calibration)
            result |= {"calibration": options.calibration, "seconds": round(time.perf_counter() - start, 1)}
            pruned = smodel.shrink() if is_structured else smodel.masked_model()
            result["reconstructed"] = task.evaluate(pruned.eval())[0]
            if is_structured:
                result["macs_left"] = round(macs(pruned, example) / macs(task.model, example), 3)
            emit({**row, **result}, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["accuracy"]:
        parser = argparse.ArgumentParser(description=accuracy.__doc__)
        parser.add_argument("--images", type=int, default=5000)
        parser.add_argument("--calibration", type=int, default=512, help="training images, without labels")
        parser.add_argument("--model", action="append", choices=SPARSERS, help="again for more; default: all")
        parser.add_argument("--json", type=Path)
        accuracy(parser.parse_args(sys.argv[2:]))
    else:
        run_zoo("sparse", examine, __doc__)
