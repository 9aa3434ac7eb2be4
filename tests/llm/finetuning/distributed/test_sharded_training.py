"""Sharded training (FSDP2) with two gloo processes: the results of one, and each keeps half of the blocks."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from sparsebit.errors import ConfigError
from sparsebit.llm import finetune, load, load_adapter, resident_bytes
from sparsebit.llm.finetuning.distributed.sharded_training import ShardedTraining, local
from sparsebit.llm.process_group import Rank, joined
from tests.llm.finetuning.tasks import TUNING, instructions, packed_model
from tests.two_ranks import torchrun

# Three micro-batches a step: one of two processes has none in the second round.
UNEVEN = replace(TUNING, batch_size=3, micro_batch_size=1)


def in_two_processes(folder: Path, rank: Rank) -> None:
    model, data = folder / "packed-llama-4", folder / "data.jsonl"
    step = ShardedTraining.step

    def dying(self: ShardedTraining, number: int) -> None:
        if number == 2:
            sizes = {"blocks": 0, "rest": 0}
            for one in [*self.model.parameters(), *self.model.buffers()]:
                sizes["blocks" if isinstance(one, DTensor) else "rest"] += local(one).nbytes
            found = {**sizes, "dtypes": [str(one.dtype) for one in self.model.parameters() if isinstance(one, DTensor)]}
            (folder / f"rank-{rank.number}.json").write_text(json.dumps(found), encoding="utf-8")
            raise InterruptedError
        step(self, number)

    ShardedTraining.step = dying  # type: ignore[method-assign]
    with contextlib.suppress(InterruptedError):
        finetune(model, data, folder / "two", UNEVEN, parallel="fsdp", save_every=1)
    ShardedTraining.step = step  # type: ignore[method-assign]
    assert finetune(model, data, folder / "two", UNEVEN, parallel="fsdp", save_every=1).num_resumed == 2


@pytest.mark.slow  # two processes that import torch and transformers
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, data = packed_model(tmp_path, num_hidden_layers=2), instructions(tmp_path)
    one = finetune(model, data, tmp_path / "one", UNEVEN)
    torchrun(__file__, tmp_path)
    losses = json.loads((tmp_path / "two" / "training.json").read_text())["losses"]
    assert losses == pytest.approx(one.losses, rel=1e-5)
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        ours, theirs = (load_adapter(load(model), tmp_path / name)(tokens).logits for name in ("two", "one"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    # Packed words are among the shards, and both shares are the blocks with their adapters.
    shares = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    packed = load(model)
    inside = sum(resident_bytes(block) for block in packed.model.layers)
    adapters = sum(value.nbytes for value in expected.values())
    assert "torch.int32" in shares[0]["dtypes"]
    assert shares[0]["blocks"] + shares[1]["blocks"] == pytest.approx(inside + adapters, rel=0.01)
    assert max(share["blocks"] for share in shares) < 0.55 * (inside + adapters)
    assert shares[0]["rest"] == pytest.approx(resident_bytes(packed) - inside, rel=0.01)


@pytest.mark.parametrize("parallel", ["fsdp", "pipeline"])
def test_one_process_is_told(parallel: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, data = packed_model(tmp_path), instructions(tmp_path)
    with pytest.raises(ConfigError, match="start several with torchrun"):
        finetune(model, data, tmp_path / "out", TUNING, parallel=parallel)


def test_ways_and_optimizers_that_do_not_exist(tmp_path: Path) -> None:
    wrong: Any = "tensor"
    with pytest.raises(ConfigError, match="allowed: ddp, fsdp, pipeline"):
        finetune(tmp_path, tmp_path, tmp_path / "out", parallel=wrong)
    with pytest.raises(ConfigError, match="bitsandbytes takes no shards"):
        ShardedTraining(None, [], replace(TUNING, optimizer="adamw8bit"), Rank(0, 2, torch.device("cpu")), 0, "")


if __name__ == "__main__":
    from tests import torchvision_shim

    torchvision_shim.install()
    with joined("cpu") as this:
        in_two_processes(Path(sys.argv[1]), this)
