"""Every way of `packed_linear` at every number of rows, and the cuts of its kernels: what the tables in it stand on.

    python benchmarks/packed_linear_ways.py few [--shapes 6144x4096,4096x14336] [--rows 1] [--bits 4]
    python benchmarks/packed_linear_ways.py ways [--rows 32,64,128] [--bits 4,3,2,8]
    python benchmarks/packed_linear_ways.py tiles [--rows 256,512]

`few`: the cuts of `few_rows` (tiles, warps, resident blocks, groups ahead, scales ahead), fastest first. `ways`: time
of cuBLAS in bfloat16 by that of each way. `tiles`: the cuts of `many_rows`. Each product is captured in a CUDA graph,
with three copies of the weight in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import emit
from benchmarks.packed_linear import COPIES, GROUP, microseconds
from sparsebit.kernels.packed_linear import FragmentWeight, Product, fragment_weight
from sparsebit.kernels.packed_linear_tiles import FewRowsCut, ManyRowsCut

CUTS = [
    FewRowsCut(height, warps, resident, depth, ahead)
    for height, warps, resident in (
        (1, 4, 1),
        (1, 8, 1),
        (1, 8, 2),
        (1, 16, 1),
        (1, 12, 1),
        (2, 4, 2),
        (2, 6, 2),
        (2, 8, 1),
        (2, 8, 2),
        (2, 16, 1),
        (4, 6, 2),
        (4, 12, 1),
        (4, 8, 1),
    )
    for depth, ahead in ((1, False), (1, True), (2, True), (3, True), (4, True))
    if depth == 1 or height < 4
]
TILES = [
    ManyRowsCut(height, groups, times, staged)
    for height, groups, times in (
        (400, 2, 1),
        (384, 2, 1),
        (352, 2, 1),
        (320, 2, 1),
        (288, 2, 1),
        (256, 2, 1),
        (224, 2, 1),
        (208, 2, 1),
        (192, 2, 1),
        (160, 2, 1),
        (192, 3, 1),
        (128, 4, 1),
        (128, 2, 2),
        (128, 2, 1),
        (64, 2, 4),
        (64, 2, 2),
    )
    for staged in (False, True)
    if staged or height <= 256
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("few", "ways", "tiles"))
    parser.add_argument("--shapes", default="6144x4096,4096x4096,28672x4096,4096x14336,8192x28672")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        for bits in map(int, options.bits.split(",")):
            codes = torch.randint(0, 1 << bits, (outputs, inputs), device="cuda")
            scales = (torch.rand(outputs, inputs // GROUP, device="cuda") * 0.01 + 0.005).bfloat16()
            weights = [fragment_weight(codes, scales, bits=bits) for _ in range(COPIES)]
            dense = [Product(scales.new_empty(0, inputs), weights[0]).dense() for _ in range(COPIES)]
            del codes
            for num_rows in map(int, options.rows.split(",")):
                x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
                calls = WAYS[options.what](x, weights)
                calls[CUBLAS] = lambda turn, x=x, dense=dense: x @ dense[turn].t()
                found = times(calls, x, dense[0], threads=16)
                cublas = found.pop(CUBLAS)
                best = sorted(found.items(), key=lambda item: item[1])
                emit(
                    {
                        "benchmark": f"packed_linear_{options.what}",
                        "outputs": outputs,
                        "inputs": inputs,
                        "bits": bits,
                        "rows": num_rows,
                        "cublas_us": round(cublas, 1),
                        "us": {name: round(value, 1) for name, value in best[:16]},
                        "ratio": {name: round(cublas / value, 2) for name, value in best[:16]},
                    },
                    options.output,
                )


Calls = dict[str, Callable[[int], Tensor]]


def few(x: Tensor, weights: list[FragmentWeight]) -> Calls:
    calls: Calls = {"default": lambda turn: Product(x, weights[turn]).few_rows()}
    for cut in CUTS:
        if weights[0].scales.shape[1] // 16 % cut.height == 0:
            calls[str(astuple(cut))] = lambda turn, cut=cut: Product(x, weights[turn]).few_rows(cut)
    return calls


def ways(x: Tensor, weights: list[FragmentWeight]) -> Calls:
    calls: Calls = {
        "chosen": lambda turn: Product(x, weights[turn]).compute(),
        "dequantized": lambda turn: Product(x, weights[turn]).dequantized(),
    }
    if len(x) <= 128:
        calls["some_rows"] = lambda turn: Product(x, weights[turn]).some_rows()
    if len(x) <= 16:
        calls["few_rows"] = lambda turn: Product(x, weights[turn]).few_rows()
    else:
        calls["many_rows"] = lambda turn: Product(x, weights[turn]).many_rows()
    return calls


def tiles(x: Tensor, weights: list[FragmentWeight]) -> Calls:
    calls: Calls = {"dequantized": lambda turn: Product(x, weights[turn]).dequantized()}
    for tile in TILES:
        if weights[0].scales.shape[1] % tile.width == 0:
            calls[str(astuple(tile))] = lambda turn, tile=tile: Product(x, weights[turn]).many_rows(tile)
    return calls


CUBLAS = "cublas"
WAYS: dict[str, Callable[[Tensor, list[FragmentWeight]], Calls]] = {"few": few, "ways": ways, "tiles": tiles}


def times(calls: Calls, x: Tensor, dense: Tensor, threads: int) -> dict[str, float]:
    """Microseconds of each call that runs and is right; compiled by several threads first."""
    expected = x.float() @ dense.float().t()

    def is_right(call: Callable[[int], Tensor]) -> str:
        torch.zeros(1, device="cuda")  # gives the thread the context of the GPU
        try:
            error = float((call(0).float() - expected).norm() / expected.norm())
        except (RuntimeError, KeyError) as reason:  # more registers or shared memory than there are
            return str(reason).splitlines()[0][:80]
        return "" if error < 5e-3 else f"{error:.2g} off"

    with ThreadPoolExecutor(threads) as pool:
        wrong = dict(zip(calls, pool.map(is_right, calls.values()), strict=True))
    for name, reason in wrong.items():
        if reason:
            print(f"{name}: {reason}", flush=True)
    return microseconds({name: call for name, call in calls.items() if not wrong[name]})


if __name__ == "__main__":
    main()
