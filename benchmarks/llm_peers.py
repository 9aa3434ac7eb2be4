"""Weights of book-llama as other packages round them; `benchmarks/llm.py --peers` starts this file for each of them.

    python benchmarks/llm_peers.py PEER FORMAT --model DIR --tokens FILE --output FILE

Runs with the interpreter of an environment that has the package, and needs nothing of Sparsebit. `FORMAT`: BITSgGROUP,
with an `s` at the end for symmetric. `--tokens`: the calibration windows `(n, length)` as safetensors, those that
Sparsebit is given. Written are the rounded weights of the blocks' linear layers, as float32 safetensors by name, with
the version of the package and the CPU seconds that it took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import torchvision_shim


@dataclass(frozen=True)
class Format:
    """What is wanted. `steps`: of learning, for each block."""

    bits: int
    group: int
    symmetric: bool
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("format")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200, help="of auto-round, for each block")
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    package, round_weights = PEERS[options.peer]
    symmetric = options.format.endswith("s")
    bits, group = map(int, options.format.removesuffix("s").split("g"))
    tokens = load_file(options.tokens)["tokens"]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    before = {name: part.weight.detach().clone() for name, part in layers(model)}
    started = time.process_time()
    model = round_weights(model, options.model, tokens, Format(bits, group, symmetric, options.steps))
    seconds = time.process_time() - started
    after = {name: dense(part) for name, part in layers(model)}
    kept = [name for name, weight in before.items() if name not in after or torch.equal(weight, after[name])]
    if kept:
        raise SystemExit(f"{options.peer} left {len(kept)} layers as they were, {kept[0]} for one")
    notes = {"version": version(package), "cpu_seconds": f"{seconds:.1f}"}
    save_file({f"{name}.weight": weight for name, weight in after.items()}, options.output, metadata=notes)


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The linear layers of the blocks."""
    return [
        (name, part)
        for name, part in model.named_modules()
        if name.rsplit(".", 1)[-1].endswith("_proj") and hasattr(part, "weight")
    ]


@torch.no_grad()
def dense(part: Any) -> Tensor:
    """The weight as the layer multiplies with it."""
    weight = part.weight
    values: Tensor = weight.dequantize() if hasattr(weight, "dequantize") and weight.is_quantized else weight
    return values.detach().float().contiguous().clone()


def by_torchao(model: Any, folder: Path, tokens: Tensor, wanted: Format) -> Any:
    """To nearest, without text."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{wanted.bits}"),
        granularity=PerGroup(wanted.group),
        mapping_type=MappingType.SYMMETRIC if wanted.symmetric else MappingType.ASYMMETRIC,
    )
    quantize_(model, config, lambda part, name: isinstance(part, nn.Linear) and ".layers." in f".{name}")
    for _, part in layers(model):
        part.weight = nn.Parameter(part.weight.dequantize(), requires_grad=False)
    return model


def by_llm_compressor(model: Any, folder: Path, tokens: Tensor, wanted: Format) -> Any:
    """GPTQ with its own settings: static act-order, damping 0.01."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    weights = {
        "num_bits": wanted.bits,
        "type": "int",
        "symmetric": wanted.symmetric,
        "strategy": "group",
        "group_size": wanted.group,
    }
    recipe = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    return oneshot(
        model=model,
        dataset=rows,
        recipe=recipe,
        num_calibration_samples=len(tokens),
        max_seq_length=tokens.shape[1],
        shuffle_calibration_samples=False,
    )


def by_auto_round(model: Any, folder: Path, tokens: Tensor, wanted: Format) -> Any:
    """Learned rounding with its own settings: 8 windows a step; 200 steps for each block are its default."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    tool = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        bits=wanted.bits,
        group_size=wanted.group,
        sym=wanted.symmetric,
        iters=wanted.steps,
        enable_torch_compile=False,  # on a CPU compiling takes longer than it saves
        dataset=list(tokens[:, None]),
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        device_map="cpu",
    )
    found, _ = tool.quantize()
    return found


Rounding = Callable[[Any, Path, Tensor, Format], Any]
PEERS: dict[str, tuple[str, Rounding]] = {
    "torchao": ("torchao", by_torchao),
    "llm-compressor": ("llmcompressor", by_llm_compressor),
    "auto-round": ("auto-round", by_auto_round),
}

if __name__ == "__main__":
    main()
