"""Where the time of a decoded token goes on a CPU, with one thread: float32 against packed weights, in one run.

    python benchmarks/llm_decode_cpu.py MODEL_DIR PACKED_DIR [--activations bfloat16] [--compile]

Milliseconds of CPU time per token, best of `--turns` turns of 24 tokens: `generate` of transformers, a loop around
the model with its growing cache, and with `--compile` `generate` with a compiled step. "no products": the model with
linear layers that compute nothing, which is the bound for any kernel. Then the layers alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from torch import nn

from sparsebit.llm import QuantLinear, compiled_settings, kernel_paths, load

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

NUM_TOKENS = 24
PROMPT = torch.arange(5, 9)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--activations", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    models = {"float32": load(options.model), "packed": load(options.packed, activations=options.activations)}
    models["packed, joined"] = load(options.packed, activations=options.activations, join_layers=True)
    print(kernel_paths(models["packed"]))
    ways: dict[tuple[str, str], Callable[[], None]] = {}
    for name, model in models.items():
        ways[name, "generate"] = lambda model=model: generate(model)
        ways[name, "loop"] = lambda model=model: loop(model)
    show(ways, options.turns)
    if options.compile:
        show(
            {(name, "compiled"): compiled(model) for name, model in models.items() if "joined" not in name},
            options.turns,
        )
    idle = without_products(load(options.model))
    bare = {("no products", "generate"): lambda: generate(idle), ("no products", "loop"): lambda: loop(idle)}
    show(bare, options.turns)
    show_layers(models["packed"])


def show(ways: dict[tuple[str, str], Callable[[], None]], turns: int) -> None:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, run in ways.items():
            best[name] = min(best[name], cpu_seconds(run) / NUM_TOKENS)
    for (model, way), seconds in best.items():
        print(f"{model}, {way}: {1e3 * seconds:.2f} ms a token, {1 / seconds:.1f} tokens per CPU s", flush=True)


def generate(model: Any, **settings: Any) -> None:
    how: dict[str, Any] = {
        "max_new_tokens": NUM_TOKENS,
        "min_new_tokens": NUM_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **how, **settings)


def compiled(model: Any) -> Callable[[], None]:
    """`generate` with a compiled step, as `sparsebit llm generate --compile` runs it."""
    settings, started = compiled_settings(model), time.perf_counter()
    generate(model, **settings)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    return lambda: generate(model, **settings)


def loop(model: Any) -> None:
    from transformers import DynamicCache

    cache, token = DynamicCache(config=model.config), PROMPT
    for _ in range(NUM_TOKENS):
        found = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = found.logits[:, -1:].argmax(-1)


def without_products(model: Any) -> Any:
    """The model with linear layers that give zeros."""
    for part in model.modules():
        if isinstance(part, (nn.Linear, QuantLinear)):
            zeros = torch.zeros(1, PROMPT.shape[1], part.out_features)
            part.forward = lambda x, zeros=zeros: zeros[:, : x.shape[1]]
    return model


def show_layers(model: Any) -> None:
    layers = [part for part in model.modules() if isinstance(part, QuantLinear)]
    inputs = [torch.randn(1, 1, layer.in_features) for layer in layers]
    whole = min(cpu_seconds(lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)]) for _ in range(20))
    print(f"{len(layers)} packed layers: {1e3 * whole:.2f} ms a token")
    head, x = model.get_output_embeddings(), torch.randn(1, 1, model.config.hidden_size)
    print(f"output layer ({head.weight.dtype}): {1e3 * min(cpu_seconds(lambda: head(x)) for _ in range(20)):.2f} ms")


def cpu_seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


if __name__ == "__main__":
    main()
