"""The attention of one token to a cache of fixed size on a GPU: ours against torch's ways, in one run.

    python benchmarks/token_attention.py [--places 1024,8192] [--batches 1,8] [--json token_attention.jsonl]

32 heads of 128 channels share 8 heads of the cache, in bfloat16, with a mask that admits a part of the places
(`filled`). Each way is one CUDA graph over 32 caches, as the layers of a model are, so that the cache of the GPU holds
none of them; microseconds of one. `repeated`: what transformers does, `gqa`: torch's option for shared heads.
`limit_us`: the bytes of the admitted places at the speed of a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import emit
from llm_decode import copy_speed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsebit.kernels.token_attention import definition, token_attention

HEADS, SHARED, WIDTH, LAYERS, TURNS = 32, 8, 128, 32, 20
SCALE = WIDTH**-0.5


def gqa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


WAYS: dict[str, Callable[..., Tensor]] = {"sparsebit": token_attention, "repeated": definition, "gqa": gqa}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default="1024,8192")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("token_attention measures a GPU; none is here")
    speed = copy_speed()
    for batch in map(int, options.batches.split(",")):
        for places in map(int, options.places.split(",")):
            for filled in (places // 8, places):
                emit(measured(batch, places, filled, speed), options.json)


@torch.no_grad()
def measured(batch: int, places: int, filled: int, speed: float) -> dict[str, object]:
    query = torch.randn(batch, HEADS, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(LAYERS, 2, batch, SHARED, places, WIDTH, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(places, device="cuda") < filled).view(1, 1, 1, places)
    found = {}
    for name, way in WAYS.items():
        torch.testing.assert_close(
            way(query, *caches[0], mask, SCALE), definition(query, *caches[0], mask, SCALE), rtol=2e-2, atol=2e-2
        )
        found[name] = round(microseconds(way, query, caches, mask), 1)
    read = 2 * batch * SHARED * filled * WIDTH * 2
    return {
        "benchmark": "token_attention",
        "batch": batch,
        "places": places,
        "filled": filled,
        **{f"{name}_us": value for name, value in found.items()},
        "limit_us": round(1e6 * read / speed, 2),
        "ratio": round(found["sparsebit"] / min(found["repeated"], found["gqa"]), 2),
    }


def microseconds(way: Callable[..., Tensor], query: Tensor, caches: Tensor, mask: Tensor) -> float:
    """Of one layer, in a CUDA graph of all of them, the least of `TURNS`."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        way(query, *caches[0], mask, SCALE)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for key, value in caches:
            way(query, key, value, mask, SCALE)
    least = float("inf")
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end))
    return 1e3 * least / LAYERS


if __name__ == "__main__":
    main()
