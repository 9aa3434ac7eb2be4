"""Re-estimates running statistics of batch norms, over the forwards of all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import calls
from sparsebit.execution.distributed import gather, is_distributed, to_cpu
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.modes import modes_kept


@contextlib.contextmanager
def restarted_statistics(model: nn.Module, if_missing: str) -> Iterator[dict[nn.Module, int]]:
    """Inside, running statistics start from zero and become the plain average over the forwards of all processes.

    A norm that no forward reached, and after an error every norm, gets its old statistics back. Yields the rank of each
    norm's inputs, to be read afterwards. `if_missing`: the error message if the model has no such norm.
    """
    norms = [m for m in model.modules() if is_itself(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise CalibrationError(if_missing)
    before = [({name: buffer.clone() for name, buffer in norm.named_buffers()}, norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average: every batch counts the same
    ranks: dict[nn.Module, int] = {}

    def note(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        ranks[norm] = args[0].dim()

    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    tuned: set[_BatchNorm] = set()
    try:
        with hooked(handles):
            yield ranks
        _merge_across_processes(norms, ranks)
        tuned.update(norm for norm in norms if norm.num_batches_tracked)
        if not tuned:
            raise CalibrationError("no forward was run inside; run a few batches there")
    finally:
        for norm, (buffers, momentum) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm not in tuned:
                norm.load_state_dict(buffers, strict=False)


@torch.no_grad()
def _merge_across_processes(norms: list[_BatchNorm], ranks: dict[nn.Module, int]) -> None:
    """Average the statistics of all processes into each, weighted by their numbers of batches."""
    if not is_distributed():
        return
    own = [(to_cpu(dict(norm.named_buffers())), ranks.get(norm, 0)) for norm in norms]
    for norm, parts in zip(norms, zip(*gather(own), strict=True), strict=True):
        counts = [int(buffers["num_batches_tracked"]) for buffers, _ in parts]
        if not any(counts):
            continue
        for name in ("running_mean", "running_var"):
            weighted = [buffers[name].double() * count for (buffers, _), count in zip(parts, counts, strict=True)]
            norm.get_buffer(name).copy_(torch.stack(weighted).sum(0) / sum(counts))
        norm.get_buffer("num_batches_tracked").fill_(sum(counts))
        ranks[norm] = max(rank for _, rank in parts)


@torch.no_grad()
def reestimate_norms(model: nn.Module, batches: Iterable[Any]) -> None:
    """Re-estimate the running statistics of all batch norms, in place, as the mean over the batches; no labels.

    Only batch norms are in training mode while it runs: dropout stays off.
    """
    device = next((p.device for p in model.parameters()), None)
    missing = "reestimate_norms: the model has no batch norm with running statistics"
    with modes_kept(model.modules()), restarted_statistics(model, missing):
        for module in model.modules():
            module.training = is_itself(module, _BatchNorm)
        for args, kwargs in calls(batches, model, device):
            model(*args, **kwargs)
