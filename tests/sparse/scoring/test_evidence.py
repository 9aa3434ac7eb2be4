"""Evidence over several processes is that of all data in one, and padded tokens are no part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.sparse.scoring.criteria import Evidence, Need
from sparsebit.sparse.scoring.evidence import gather_evidence
from tests.two_ranks import assert_two_ranks_agree

SCRIPT = """
import torch
import torch.distributed as dist
from sparsebit.sparse import SparseModel
from tests.sparse.nets import Chain

# Neither half alone gives the masks of both: the second rank's images are larger.
batches = [torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(i)) * (1 + 3 * (i % 2)) for i in range(4)]
for batch in batches[1::2]:
    batch[:, 0] *= 5
STRATEGIES = ("fisher", "wanda", "sparsegpt", "apoz", "hrank")  # one for each kind of statistics, and two of outputs


def masks(strategy, own, kind):
    torch.manual_seed(0)
    sparser = {"TYPE": kind, "STRATEGY": strategy, "RATIO": 0.5}
    smodel = SparseModel(Chain(), {"DEVICE": "cpu", "SPARSER": sparser}, batches[0]).eval()
    smodel.calc_params(own, lambda outputs, batch: outputs.square().mean())
    smodel.reconstruct(own)
    return {**smodel.masks, **dict(smodel.model.named_parameters())}


wanted = {(s, k): masks(s, batches, k) for s in STRATEGIES for k in ("unstructured",)}
alone = {(s, k): masks(s, batches[::2], k) for s, k in wanted}
dist.init_process_group("gloo")
rank = dist.get_rank()
for (strategy, kind), whole in wanted.items():
    found = masks(strategy, batches[rank::2], kind)
    for name, value in whole.items():
        if value.dtype == torch.bool:
            assert torch.equal(found[name], value), (rank, strategy, name)
    parts = [None, None]
    dist.all_gather_object(parts, {name: value.detach() for name, value in found.items()})
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in found), (strategy, "ranks differ")
    if strategy != "hrank":
        assert any(not torch.equal(alone[strategy, kind][name], value) for name, value in whole.items()), strategy
dist.destroy_process_group()
print("rank", rank, "agrees")
"""


@pytest.mark.slow
def test_two_processes_give_the_masks_of_one(tmp_path: Path) -> None:
    assert_two_ranks_agree(tmp_path, SCRIPT)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("need", ["inputs", "moments", "signs", "ranks"])
def test_padded_tokens_do_not_count(need: Need) -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(2, 5, 4)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    padded = torch.where(real[..., None] == 1, x, 100.0)
    with_mask = gather_evidence(model, need, [{"x": padded, "attention_mask": real}], None, "test")
    tokens_alone = gather_evidence(model, need, [{"x": x[real == 1][None]}], None, "test")
    without_mask = gather_evidence(model, need, [{"x": padded}], None, "test")
    for name in ("a.weight", "b.weight"):
        found, wanted, wrong = (_statistic(e[name], need) for e in (with_mask, tokens_alone, without_mask))
        torch.testing.assert_close(found, wanted)
        assert need == "ranks" or not torch.allclose(found, wrong)


def _statistic(evidence: Evidence, need: Need) -> Tensor:
    if need == "moments":
        assert evidence.moments is not None
        return evidence.moments.hessian
    found = evidence.input_norms if need == "inputs" else evidence.outputs
    assert found is not None
    return found
