"""Tokens per second of a whole Llama-shaped model, one sequence: packed weights against bfloat16, in one run.

    python benchmarks/llm_decode.py [--shape 8b|tiny] [--bits 4,3,2] [--json results/llm_decode.jsonl]

Weights are random: only sizes matter. The step of one token runs with a static cache, compiled by torch and captured
in a CUDA graph, for both. `limit_ms`: the bytes of the weights that a step reads, at the speed of a copy. Packed layers
are measured apart, and with q, k and v and gate and up in one product (`joined_groups`), as `sparsebit.llm.load` runs
them. `attention`: "sdpa" is transformers' own way, "token" the one of `sparsebit.llm.load`; bfloat16 is measured with
both, and `ratio` is against transformers' own.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import emit
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from sparsebit.llm import PackedWeight, QuantLinear, kernel_paths
from sparsebit.llm.layers.quant_linear import join_parallel_layers, separate_parallel_layers
from sparsebit.llm.layers.token_attention import use_token_attention

GROUP, CACHE, WARM, STEPS = 128, 1024, 16, 64
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512},
}
WAYS = {"apart": (False, "sdpa"), "joined": (True, "sdpa"), "loaded": (True, "token")}
HEADS = {"8b": (32, 8), "tiny": (4, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--bits", default="4")
    parser.add_argument(
        "--attention", default="sdpa,token", help="of bfloat16; the first one is what ratios are against"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of the packed model, of: {', '.join(WAYS)}")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, in a CUDA graph all the same")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("llm_decode measures a GPU; none is here")
    torch.set_grad_enabled(False)
    base: dict[str, Any] = {"benchmark": "llm_decode", "shape": options.shape, "compiled": not options.eager}
    model = random_model(options.shape)
    dense = 0.0
    for attention in options.attention.split(","):
        set_attention(model, attention)
        seconds = seconds_of_a_token(model, compiled=not options.eager)
        dense = dense or seconds
        told = {"attention": attention, "ratio": round(dense / seconds, 2)}
        emit({**base, "weights": "bfloat16", **figures(model, seconds), **told}, options.json)
    for bits in map(int, options.bits.split(",")):
        pack(model, bits)
        for joined, attention in [WAYS[way] for way in options.ways.split(",")]:
            set_attention(model, attention)
            separate_parallel_layers(model)
            groups = join_parallel_layers(model) if joined else 0
            packed = seconds_of_a_token(model, compiled=not options.eager)
            told = {"attention": attention, "ratio": round(dense / packed, 2)}
            told |= {"kernels": kernel_paths(model), "joined_groups": groups}
            emit({**base, "weights": f"W{bits} g{GROUP}", **figures(model, packed), **told}, options.json)


def set_attention(model: LlamaForCausalLM, attention: str) -> None:
    model.set_attn_implementation("sdpa")
    if attention == "token" and not use_token_attention(model):
        raise SystemExit("this model does not take token_attention")


def random_model(shape: str) -> LlamaForCausalLM:
    heads, shared = HEADS[shape]
    config = LlamaConfig(
        **SHAPES[shape], num_attention_heads=heads, num_key_value_heads=shared, max_position_embeddings=CACHE
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def pack(model: nn.Module, bits: int) -> None:
    """Every linear layer but the head gets a random packed weight of `bits`."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, (nn.Linear, QuantLinear)) or name == "lm_head":
            continue
        shape = module.out_features, module.in_features
        codes = torch.randint(0, 1 << bits, shape, device="cuda", dtype=torch.uint8)
        scales = torch.full((shape[0], shape[1] // GROUP), 0.02 / (1 << bits), device="cuda", dtype=torch.bfloat16)
        layer = QuantLinear(PackedWeight.from_codes(codes, scales, None, bits))
        layer.prepare(torch.bfloat16)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
        del module, codes
    gc.collect()
    torch.cuda.empty_cache()


def seconds_of_a_token(model: LlamaForCausalLM, *, compiled: bool) -> float:
    torch._dynamo.reset()
    cache = static_cache(model)
    token = torch.ones(1, 1, dtype=torch.long, device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")

    def step(token: Tensor, position: Tensor) -> Tensor:
        answer = model(
            input_ids=token, position_ids=position[None], cache_position=position, past_key_values=cache, use_cache=True
        )
        return answer.logits[:, -1:].argmax(-1)

    run: Callable[[Tensor, Tensor], Tensor] = torch.compile(step, fullgraph=True) if compiled else step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(token, position)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        token.copy_(run(token, position))
        position.add_(1)
    for _ in range(WARM):
        graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def static_cache(model: LlamaForCausalLM) -> StaticCache:
    try:
        return StaticCache(config=model.config, max_cache_len=CACHE)
    except TypeError:  # transformers 4
        return StaticCache(
            config=model.config, max_batch_size=1, max_cache_len=CACHE, device="cuda", dtype=torch.bfloat16
        )


def figures(model: nn.Module, seconds: float) -> dict[str, Any]:
    read = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    read -= model.get_input_embeddings().weight.nbytes  # one row of it is read
    return {
        "tokens_per_s": round(1 / seconds, 1),
        "ms": round(1e3 * seconds, 3),
        "limit_ms": round(1e3 * read / copy_speed(), 3),
        "gigabytes": round(read / 1e9, 2),
    }


def copy_speed() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(8):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 8 * 2 * source.numel() / (start.elapsed_time(end) * 1e-3)


if __name__ == "__main__":
    main()
