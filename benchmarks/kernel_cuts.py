"""How the Triton kernels are cut into tiles: every cut in reach against the device's own copy, best first.

    python benchmarks/kernel_cuts.py [--only rows_backward] [--batch 256] [--output build/kernel_cuts.jsonl]

Use it to tune `sparsebit.kernels.fake_quant.WHOLE` and `HALF` for another GPU. `ratio_to_limit` is as in
`fake_quant.py`: the kernel's time over that in which a copy moves as many bytes. Look at small batches too: with many
programs, each of which leaves a sum, the last sum takes longer than the pass.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.common import emit
from benchmarks.fake_quant import gpu_times
from sparsebit.kernels import fake_quant
from sparsebit.kernels.fake_quant import UNLIMITED, Cut, Cuts

IMAGE = (256, 64, 64)
REACH: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    # tile, warps, programs, stages
    "rows_forward": ((1024, 2048, 4096), (2, 4, 8), (UNLIMITED,), (1,)),
    "rows_backward": ((1024, 2048), (2, 4), (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15), (1, 2, 3)),
    "columns_forward": ((2048, 4096, 8192), (4, 8), (1 << 11, 1 << 13, UNLIMITED), (1, 2)),
    "columns_backward": ((1024, 2048, 4096), (4, 8), (1 << 11, 1 << 13, 1 << 15), (1, 2, 3)),
}


def cuts(kernel: str) -> Iterator[Cut]:
    """Those that give a thread 4 to 32 elements of a tile."""
    for tile, warps, programs, stages in itertools.product(*REACH[kernel]):
        if 4 <= tile // (warps * 32) <= 32:
            yield Cut(tile, warps, programs, stages, fewest=programs)


def work(kernel: str, per_channel: bool, dtype: torch.dtype, batch: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """A tensor in the layout that the kernel is for, and the call that runs it."""
    by_columns = kernel.startswith("columns")
    layout = torch.channels_last if by_columns else torch.contiguous_format
    x, grad = (torch.randn(batch, *IMAGE, device="cuda").to(dtype).contiguous(memory_format=layout) for _ in range(2))
    scale = torch.full((IMAGE[0] if per_channel else 1,), 0.2, device="cuda")
    arguments = (x, scale, torch.zeros_like(scale), 1 if per_channel else None, 0, -8, 7)
    if kernel.endswith("forward"):
        return x, lambda: fake_quant.fake_quantize(*arguments)
    return x, lambda: fake_quant.backward(grad, *arguments, "lsq", True, True, False)


def measure(kernel: str, per_channel: bool, dtype: torch.dtype, batch: int, rounds: int) -> list[dict[str, Any]]:
    x, call = work(kernel, per_channel, dtype, batch)
    target = torch.empty_like(x)
    name = "WHOLE" if x.itemsize == 4 else "HALF"
    before: Cuts = getattr(fake_quant, name)
    moves = 2 if kernel.endswith("forward") else 3
    in_use: Cut = getattr(before, kernel)
    found = []
    try:
        for cut in track([in_use, *cuts(kernel)], f"{kernel} {dtype}", transient=True):
            setattr(fake_quant, name, before._replace(**{kernel: cut}))
            fake_quant._tiles.cache_clear()
            times = gpu_times(kernel, {"copy": lambda: target.copy_(x), "kernel": call}, rounds)
            ratio = times["kernel"] / (times["copy"] / 2 * moves)
            found.append({"cut": cut._asdict(), "in_use": cut is in_use, "ratio_to_limit": ratio})
    finally:
        setattr(fake_quant, name, before)
        fake_quant._tiles.cache_clear()
    return sorted(found, key=lambda record: float(record["ratio_to_limit"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=REACH, action="append", help="these kernels")
    parser.add_argument("--batch", type=int, default=256, help="of 256 x 64 x 64 numbers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are cut for a GPU, and torch sees none here")
    for kernel in options.only or REACH:
        for dtype, per_channel in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            if kernel.startswith("columns") and not per_channel:
                continue
            for record in measure(kernel, per_channel, dtype, options.batch, options.rounds):
                about = {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "per_channel": per_channel}
                about["batch"] = options.batch
                record["ratio_to_limit"] = round(record["ratio_to_limit"], 3)
                emit({"benchmark": "kernel_cuts", **about, **record}, options.output)


if __name__ == "__main__":
    main()
