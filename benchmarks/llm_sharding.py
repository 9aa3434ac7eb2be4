"""What a process keeps in memory between the steps of a fine-tuning, whole and sharded (FSDP2).

    torchrun --nproc-per-node 2 benchmarks/llm_sharding.py PACKED_DIR [--device cpu|cuda]

A packed Llama, with adapters of rank 16 on all layers of the blocks and the state of AdamW after two steps; the bytes
are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT

from sparsebit.llm import Tuning, finetune
from sparsebit.llm.finetuning import training_loop
from sparsebit.llm.finetuning.distributed import sharded_training
from sparsebit.llm.process_group import joined

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    torch.set_num_threads(1)
    seen: list[dict[str, int]] = []

    def watched(self: Any, step: int) -> None:
        original(self, step)
        seen[-1:] = [kept_bytes(self)]

    with joined(options.device) as rank, tempfile.TemporaryDirectory() as own:
        folder = Path(rank.from_first(lambda: own))
        if rank.is_first:
            rows = [{"prompt": "The ship left", "response": f" the harbour {number} times."} for number in range(32)]
            (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        tuning = Tuning(length=64, batch_size=4, max_steps=2, rank=16)
        original = training_loop.TrainingLoop.step
        training_loop.TrainingLoop.step = watched  # type: ignore[method-assign]
        for parallel in ("ddp", "fsdp"):
            seen.append({})
            made = finetune(
                options.model, folder / "data.jsonl", folder / parallel, tuning, device=rank.device, parallel=parallel
            )
            if rank.is_first:
                sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in seen[-1].items())
                print(f"{parallel}, {rank.count} processes: {sizes}; losses {made.losses}", flush=True)


def kept_bytes(training: Any) -> dict[str, int]:
    """Of the model and of the optimizer's state; `largest_block`: what is gathered at a time, if blocks are sharded."""
    blocks = training.model.model.layers
    inner = {id(one) for block in blocks for one in [*block.parameters(), *block.buffers()]}
    sizes = {"blocks": 0, "rest": 0, "optimizer": 0, "largest_block": 0}
    for one in {id(each): each for each in [*training.model.parameters(), *training.model.buffers()]}.values():
        sizes["blocks" if id(one) in inner else "rest"] += sharded_training.local(one).nbytes
    for entry in training.optimizer.state.values():
        sizes["optimizer"] += sum(sharded_training.local(one).nbytes for one in entry.values() if torch.is_tensor(one))
    sizes["largest_block"] = max(
        sum(one.numel() * one.element_size() for one in [*block.parameters(), *block.buffers()]) for block in blocks
    )
    return sizes


if __name__ == "__main__":
    main()
