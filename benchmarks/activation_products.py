"""Products of layers whose inputs are rounded to 8 bits, on a GPU: ratio of their time to bfloat16's.

`python benchmarks/activation_products.py [--output FILE]`. Rounding the inputs and scaling the outputs are included;
"product" is torch's product of ready codes alone. Times are of CUDA graphs, the smallest of five.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import emit

from sparsebit.llm import FloatLinear, QuantLinear
from sparsebit.llm.layers.float_weight import round_to_floats
from sparsebit.llm.layers.input_kinds import SCHEMES, Activations
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.packed_weight import PackedWeight

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672))
ROWS = (1, 16, 64, 256, 2048, 8192)
_REPEATS = 20


def microseconds(run: Callable[[], Any]) -> float:
    """The smallest time of five, each of a CUDA graph with twenty calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            run()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / _REPEATS)
    return min(times)


def layers(out_features: int, in_features: int) -> dict[str, Any]:
    """A layer of each scheme, prepared for bfloat16."""
    dense = 0.02 * torch.randn(out_features, in_features, device="cuda")
    codes = torch.randint(0, 256, dense.shape, device="cuda").to(torch.uint8)
    packed = PackedWeight.from_codes(codes, torch.full((out_features, 1), 1e-4, device="cuda"), None, 8)
    found: dict[str, Any] = {}
    for name in ("int8", "int8-static", "fp8", "fp8-static"):
        rounding = InputRounding(SCHEMES[_as_scheme(name)], 0.02)
        if name.startswith("int8"):
            layer = QuantLinear(packed, inputs=rounding)
            layer.prepare(torch.bfloat16)
            found[name] = layer
        else:
            weight = round_to_floats(dense, "fp8", search=False, stored=torch.bfloat16).to("cuda")
            found[name] = FloatLinear(weight, inputs=rounding)
    assert {layer.path for layer in found.values()} == {"int_mm", "scaled_mm"}, [
        (n, one.path_reason) for n, one in found.items()
    ]
    return found | {"bf16": dense.bfloat16()}


def _as_scheme(name: str) -> Activations:
    return next(key for key in SCHEMES if key == name)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    options = parser.parse_args()
    for out_features, in_features in SHAPES:
        every = layers(out_features, in_features)
        dense = every.pop("bf16")
        for rows in options.rows:
            x = torch.randn(rows, in_features, device="cuda").bfloat16()
            times = {"bf16": microseconds(lambda x=x, dense=dense: F.linear(x, dense))}
            times |= {name: microseconds(lambda x=x, one=one: one(x)) for name, one in every.items()}
            codes = torch.randint(-9, 9, (max(rows, 17), in_features), device="cuda").to(torch.int8)
            words = every["int8"].qweight
            times["int8 product"] = microseconds(lambda codes=codes, words=words: torch._int_mm(codes, words.t()))
            eights, ones = codes[:rows].float().to(torch.float8_e4m3fn), torch.ones(rows, 1, device="cuda")
            weight = every["fp8"].packed
            scales = weight.scales.t().float().contiguous()
            times["fp8 product"] = microseconds(
                lambda a=eights, s=ones, w=weight, t=scales: torch._scaled_mm(
                    a, w.qweight.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16
                )
            )
            shape = [out_features, in_features]
            record = {"benchmark": "activation_products", "shape": shape, "size": rows}
            emit(record | {f"{name} us": round(value, 2) for name, value in times.items()}, options.output)


if __name__ == "__main__":
    main()
