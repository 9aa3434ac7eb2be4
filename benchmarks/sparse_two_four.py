"""2:4 products through torch's semi-structured tensors against dense ones on the GPU, and what Sparsebit recommends.

    python benchmarks/sparse.py two_four [--shapes 8192x8192x8192,...] [--dtype float16] [--graph] [--json FILE]
    python benchmarks/sparse.py two_four --device cpu --shapes 64x64x64            # does it run at all?

A shape is rows x out x in. `again`: the ratio of a second, independent measurement, so that a recommendation that came
from noise is seen: nothing that is recommended may be below 1 there. `--graph`: each product in a CUDA graph, so that
only kernels are timed; without it, as Python launches them. Measure alone: other work on the GPU hides the difference.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from common import emit

SHAPES = (
    "8192x8192x8192,4096x4096x4096,2048x2048x2048,1024x1024x1024,512x512x512,"
    "4096x11008x4096,4096x4096x11008,8192x3072x768,8192x768x3072,4096x768x768,256x4096x4096,16x4096x4096,1x4096x4096,"
    "4096x1000x2048"
)


ROUNDS, SAMPLE_S, WARM_S = 25, 10e-3, 1.0


def graph_times(runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of one call: each run several times in a CUDA graph, replayed in turns, after a second of warming up."""
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:  # clocks fall when a GPU gets warm
        for run in runs.values():
            run()
        torch.cuda.synchronize()
    graphs = {}
    for name, run in runs.items():
        calls = max(1, math.ceil(SAMPLE_S / max(_elapsed(run), 1e-6)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graphs[name] = (graph, calls)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(ROUNDS):
        for name in runs if done % 2 == 0 else reversed(list(runs)):
            graph, calls = graphs[name]
            found[name].append(_elapsed(graph.replay) / calls)
    return found


def _elapsed(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def main(arguments: list[str]) -> None:
    from sparsebit.sparse.two_four import measure_2_4

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graph", action="store_true", help="time kernels alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    for words in options.shapes.split(","):
        shape = [int(word) for word in words.split("x")]
        timer = graph_times if options.graph else None
        first, second = (measure_2_4(*shape, dtype=dtype, device=options.device, timer=timer) for _ in range(2))
        again = second.ratio
        record = {
            "benchmark": "sparse_two_four",
            "shape": words,
            "graph": options.graph,
            **first.to_dict(),
            "again": again,
        }
        emit({**record, "ok": not first.use or (again is not None and again >= 1)}, options.json)
