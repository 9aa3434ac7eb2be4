"""A linear layer with a packed weight against cuBLAS in bfloat16 and torch's own int4 product, in one run.

    python benchmarks/packed_linear.py [--shapes 8192x28672] [--rows 1,16,64] [--bits 4,3,2]
        [--output results/packed_linear.jsonl]

Shapes are outputs x inputs; group size 128. Each product is captured 12 times in a CUDA graph, with three copies of
the weight in turn, so that none is read from the cache. `ratio`: time of cuBLAS by ours, with the graphs replayed in
turns; `alone_ratio`: each graph replayed until the clock has settled, then measured. They differ where a GPU is at the
limit of its power: its clock then depends on what ran just before. `limit_us`: the bytes of the packed weight at the
speed of a copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import emit
from sparsebit.kernels.packed_linear import FragmentWeight, fragment_weight, packed_linear

GROUP, COPIES, CALLS, TURNS = 128, 3, 12, 9
SETTLING_MS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x28672,28672x8192,4096x4096,14336x4096")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    speed = copy_speed()
    for shape in options.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        for bits in map(int, options.bits.split(",")):
            for num_rows in map(int, options.rows.split(",")):
                emit({**measure(outputs, inputs, bits, num_rows, speed)}, options.output)


def measure(outputs: int, inputs: int, bits: int, num_rows: int, speed: float) -> dict[str, Any]:
    torch.manual_seed(0)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), device="cuda")
    scales = (torch.rand(outputs, inputs // GROUP, device="cuda") * 0.01 + 0.005).bfloat16()
    weights = [fragment_weight(codes, scales, bits=bits) for _ in range(COPIES)]
    grouped = (codes.view(outputs, -1, GROUP) - (1 << bits - 1)).bfloat16() * scales[..., None]
    dense = [grouped.flatten(1).clone() for _ in range(COPIES)]
    x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[int], object]] = {
        "cublas": lambda turn: x @ dense[turn].t(),
        "sparsebit": lambda turn: packed_linear(x, weights[turn]),
    }
    if num_rows <= 64 and bits == 4:  # above, it is slower still
        calls["torch_int4"] = tinygemm(codes, scales, x)
    times, settled = microseconds(calls), microseconds(calls, settling_ms=SETTLING_MS)
    num_bytes = _num_bytes(weights[0])
    exact = x.double() @ dense[0].double().t()
    found = packed_linear(x, weights[0]).double()
    return {
        "benchmark": "packed_linear",
        "outputs": outputs,
        "inputs": inputs,
        "bits": bits,
        "rows": num_rows,
        "us": {name: round(value, 1) for name, value in times.items()},
        "ratio": {name: round(times["cublas"] / value, 2) for name, value in times.items() if name != "cublas"},
        "alone_us": {name: round(value, 1) for name, value in settled.items()},
        "alone_ratio": {
            name: round(settled["cublas"] / value, 2) for name, value in settled.items() if name != "cublas"
        },
        "limit_us": round(num_bytes / speed * 1e6, 1),
        "error": float(f"{float((found - exact).norm() / exact.norm()):.1e}"),
    }


def tinygemm(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Torch's own 4-bit product."""
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    words = [torch.ops.aten._convert_weight_to_int4pack(pairs, 8) for _ in range(COPIES)]
    numbers = torch.stack([scales.t(), torch.zeros_like(scales.t())], -1).contiguous()
    return lambda turn: torch.ops.aten._weight_int4pack_mm(x, words[turn], GROUP, numbers)


def microseconds(calls: Mapping[str, Callable[[int], object]], settling_ms: float = 0) -> dict[str, float]:
    """Of each call: in turns, since a GPU that works hard becomes slower for all of them then; or each after itself."""
    graphs = {name: captured(call) for name, call in calls.items()}
    if settling_ms:
        found = {name: alone(graph, settling_ms) for name, graph in graphs.items()}
    else:
        turns = [{name: replayed(graph) for name, graph in graphs.items()} for _ in range(TURNS)]
        found = {name: [turn[name] for turn in turns] for name in graphs}
    return {name: statistics.median(values) / CALLS * 1000 for name, values in found.items()}


def alone(graph: torch.cuda.CUDAGraph, settling_ms: float) -> list[float]:
    passed = 0.0
    while passed < settling_ms:
        passed += replayed(graph)
    return [replayed(graph) for _ in range(TURNS)]


def captured(function: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    for turn in range(COPIES):
        function(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            function(call % COPIES)
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def copy_speed() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 4 * source.numel() / (microseconds({"copy": lambda turn: target.copy_(source)})["copy"] * 1e-6)


def _num_bytes(weight: FragmentWeight) -> int:
    return weight.words.numel() * 4 + weight.scales.numel() * 2


if __name__ == "__main__":
    main()
