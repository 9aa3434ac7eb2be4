"""2:4 products through torch's semi-structured tensors against dense ones on the GPU, and what Sparsebit recommends.

    python benchmarks/sparse.py two_four [--shapes 8192x8192x8192,...] [--dtype float16] [--json FILE]
    python benchmarks/sparse.py two_four --device cpu --shapes 64x64x64            # does it run at all?

A shape is rows x out x in. `again`: the ratio of a second, independent measurement, so that a recommendation that came
from noise is seen: nothing that is recommended may be below 1 there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import emit

SHAPES = (
    "8192x8192x8192,4096x4096x4096,2048x2048x2048,1024x1024x1024,512x512x512,"
    "4096x11008x4096,4096x4096x11008,8192x3072x768,8192x768x3072,4096x768x768,256x4096x4096,16x4096x4096,1x4096x4096,"
    "4096x1000x2048"
)


def main(arguments: list[str]) -> None:
    from sparsebit.sparse.two_four import measure_2_4

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    for words in options.shapes.split(","):
        shape = [int(word) for word in words.split("x")]
        first, second = (measure_2_4(*shape, dtype=dtype, device=options.device) for _ in range(2))
        again = second.ratio
        record = {"benchmark": "sparse_two_four", "shape": words, **first.to_dict(), "again": again}
        emit({**record, "ok": not first.use or (again is not None and again >= 1)}, options.json)
