"""Structured pruning of one architecture of the zoo, and Torch-Pruning's beside it: the rows of `sparse.py zoo`."""

from __future__ import annotations

import contextlib
import copy
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from zoo import spread
from zoo_models import ZOO

RATIO = 0.3
PEER_SECONDS = 100
Record = dict[str, Any]


def examine(name: str) -> Record:
    """30 % of the channels that the groups allow are removed (L1); the small model must be the masked one."""
    from sparsebit.sparse import SparseModel, model_size

    torch.manual_seed(0)
    model, batch = ZOO[name]()
    model.eval()
    spread(model)
    outputs(model, batch)
    memory = _peak_mib()
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": RATIO}}
    smodel = SparseModel(model, config, batch).eval()
    groups = smodel.groups
    smodel.calc_params()
    start = time.perf_counter()
    small = smodel.shrink()
    surgery = time.perf_counter() - start
    peak = _peak_mib() - memory
    difference = _difference(smodel.model, small, batch)
    precise = difference if difference <= 1e-5 else _double_difference(smodel.masked_model(), small, batch)
    before, after = model_size(model, batch), model_size(small, batch)
    reasons = Counter(entry.reason for entry in groups.spared if entry.dim < 2)
    return {
        "model": name,
        # Rounding alone can exceed 1e-5 in float32 where a net amplifies it: then float64 is the judge.
        "ok": min(difference, precise) <= 1e-5 and after.macs <= 0.8 * before.macs,
        "difference": difference,
        "difference_float64": precise,
        "macs": before.macs,
        "macs_after": after.macs,
        "macs_left": round(after.macs / before.macs, 3),
        "parameters_left": round(after.parameters / before.parameters, 3),
        "groups_found": groups.cost.num_found,
        "groups_proved": len(groups.groups),
        "units": len(groups.units),
        "spared_axes": sum(reasons.values()),
        "spared": [f"{count} axes: {reason[:160]}" for reason, count in reasons.most_common(6)],
        "notes": list(groups.notes)[:3],
        "seconds_finding": round(groups.cost.finding_seconds, 1),
        "seconds_proof": round(groups.cost.proof_seconds, 1),
        "seconds_surgery": round(surgery, 1),
        "peak_mib": round(peak),
        "torch_pruning": _torch_pruning(model, batch, _returned(groups), before.macs),
    }


def summary(records: list[Record]) -> str:
    """How many shrink, how many are equal, and the peer beside them."""
    ran = [record for record in records if "error" not in record]
    small = [record for record in ran if record["macs_left"] <= 0.8]
    equal = [record for record in ran if record["difference"] <= 1e-5]
    precise = [record for record in ran if min(record["difference"], record["difference_float64"]) <= 1e-5]
    peer = [record["torch_pruning"] for record in ran if record["torch_pruning"]["ran"]]
    less = sum(entry["macs_left"] <= 0.8 for entry in peer)
    lines = [
        f"{len(records)} architectures, {len(ran)} ran",
        f"  20 % of the MACs or more are gone: {len(small)}; and ok: {sum(record['ok'] for record in records)}",
        f"  equal to the masked model to 1e-5: {len(equal)} in float32, {len(precise)} in float32 or float64",
        f"  Torch-Pruning: {len(peer)} ran, {less} of them with 20 % of the MACs gone or more",
    ]
    for record in records:
        if "error" in record:
            lines.append(f"  failed: {record['model']}: {record['error'][:100]}")
        elif not record["ok"]:
            what = f"{record['macs_left']:.2f} of the MACs, difference {record['difference']:.1e}"
            lines.append(f"  short:  {record['model']}: {what}")
    return "\n".join(lines)


def _returned(groups: Any) -> list[str]:
    """The layers whose outputs the model returns, which Torch-Pruning must be told."""
    return sorted({
        entry.tensor.rpartition(".")[0]
        for entry in groups.spared
        if entry.dim == 0 and entry.reason == "the model returns them"
    })  # fmt: skip


def _torch_pruning(model: nn.Module, batch: Any, returned: list[str], macs: float) -> Record:
    """What Torch-Pruning leaves of the MACs, used as its own examples do; why not, where it fails."""
    from sparsebit.sparse import model_size

    try:
        import torch_pruning
    except ImportError:
        return {"ran": False, "error": "not installed"}
    start = time.perf_counter()
    try:
        with _time_limit(PEER_SECONDS):
            pruned = copy.deepcopy(model)
            kept = [m for m in pruned.modules() if isinstance(m, nn.Linear)][-1:]
            layers = [pruned.get_submodule(path) for path in returned]
            kept += [m for m in layers if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
            attentions = [m for m in pruned.modules() if hasattr(m, "qkv") and isinstance(m.qkv, nn.Linear)]
            heads = {m.qkv: m.num_heads for m in attentions if hasattr(m, "num_heads")}
            pruner = torch_pruning.pruner.MagnitudePruner(
                pruned, batch, importance=torch_pruning.importance.MagnitudeImportance(p=1), pruning_ratio=RATIO,
                ignored_layers=kept, num_heads=heads,
            )  # fmt: skip
            pruner.step()
            for module in attentions:
                if module.qkv in heads:
                    module.num_heads = pruner.num_heads[module.qkv]
                    module.head_dim = module.qkv.out_features // (3 * module.num_heads)
            before, after = outputs(model, batch), outputs(pruned, batch)
            if [x.shape for x in before] != [x.shape for x in after]:
                return {"ran": False, "error": "other output shapes"}
            left = round(model_size(pruned, batch).macs / macs, 3)
        return {"ran": True, "macs_left": left, "seconds": round(time.perf_counter() - start, 1)}
    except Exception as error:
        text = str(error).splitlines()[0][:100] if str(error) else ""
        return {"ran": False, "error": f"{type(error).__name__}: {text}"}


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so long, so that a slow peer does not cost the row."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _difference(one: nn.Module, other: nn.Module, batch: Any) -> float:
    """The largest difference of the outputs, relative to the largest value."""
    pairs = zip(outputs(one, batch), outputs(other, batch), strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _double_difference(one: nn.Module, other: nn.Module, batch: Any) -> float:
    batch = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    try:
        return _difference(copy.deepcopy(one).double(), copy.deepcopy(other).double(), batch)
    except RuntimeError:
        return float("inf")  # it does not run in float64
