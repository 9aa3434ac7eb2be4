"""GPTQ of some blocks of a random Llama-8B-shaped model: time, memory, and what they say about the whole model.

    python benchmarks/llm_gptq_slice.py --device cuda [--blocks 2] [--samples 128] [--length 2048] [--bits 4]

A model folder with one block more than are measured is written, so that each measured block also computes what the
next one reads; then its blocks are quantized as `sparsebit.llm.quantize` does it, files of finished blocks included.
`extrapolated_s`: seconds a block times 32. Embeddings are small here, and no check by transformers runs.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import ROOT, emit

from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.run_folder import RunFolder
from sparsebit.llm import Recipe
from sparsebit.llm.models.architectures import architecture_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import joined
from sparsebit.llm.quantizing import block_rounding, quantization_run
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.quantization_run import QuantizationRun
from sparsebit.numerics.rounding import gptq_math

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
}
NUM_BLOCKS, VOCABULARY = 32, 1024
PHASES: dict[str, tuple[Any, str]] = {
    "reading": (Skeleton, "fill"),
    "digest": (quantization_run, "digest"),
    "float forward": (BlockWalk, "run_float"),
    "second moments": (BlockWalk, "moments"),
    "forward of the next input": (BlockWalk, "advance"),
    "files": (RunFolder, "write"),
    "rounding": (block_rounding, "round_weights"),
    "rounding: factor": (gptq_math.InverseFactor, "__init__"),
    "rounding: scale search": (gptq_math, "search_scale"),
    "rounding: columns": (gptq_math, "_round_lines"),
    "rounding: sweeps": (gptq_math, "_descend_lines"),
    "rounding: refit": (gptq_math, "_refit_lines"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--memory-mib", type=int, default=8192, help="hidden states in memory, as --memory-budget")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the blocks")
    parser.add_argument("--phases", action="store_true", help="seconds of each phase of the last block")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torchvision_shim.install()  # transformers imports torchvision where it is installed
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", options)
        emit({"benchmark": "llm_gptq_slice", **vars(options), **measure(Path(folder), options)}, options.output)


def write_model(folder: Path, options: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[options.shape],
        num_hidden_layers=options.blocks + 1,
        vocab_size=VOCABULARY,
        max_position_embeddings=options.length,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    if options.device.startswith("cuda"):
        del model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    is_cuda = options.device.startswith("cuda")
    tokens = torch.randint(0, VOCABULARY, (options.samples, options.length), generator=torch.Generator().manual_seed(0))
    seconds: list[float] = []
    with joined(options.device) as rank:
        skeleton = Skeleton(ModelFolder(folder / "model"), dtype=getattr(torch, options.dtype), device=rank.device)
        row = architecture_of(skeleton.model)
        run = QuantizationRun(
            skeleton, row, Recipe(bits=options.bits), tokens, options.batch_size, options.memory_mib * MIB, rank
        )
        kept = RunFolder(folder / "partial", run.settings()).open()
        for number in range(options.blocks):
            started = time.perf_counter()
            is_last = number == options.blocks - 1
            with timed_phases(options.device, options.phases and is_last) as phases:
                run.block(number, kept, is_run=True)
            wait(options.device)
            seconds.append(time.perf_counter() - started)
            print(f"block {number}: {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    peak = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0
    return {
        "output": None,
        "phases": dict(sorted(phases.items(), key=lambda item: -item[1][0])),
        "seconds_of_blocks": [round(value, 2) for value in seconds],
        "extrapolated_s": round(sum(seconds) / len(seconds) * NUM_BLOCKS, 1),
        "gpu_peak_gb": round(max([peak, *(one for _, one in phases.values())]), 2) if is_cuda else None,
        "host_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


@contextlib.contextmanager
def timed_phases(device: str, is_wanted: bool) -> Iterator[dict[str, list[float]]]:
    """Inside, seconds of each phase are summed, and its peak of GPU memory in GB is noted.

    Those of "rounding" hold the ones behind it, but its peak is that of the rest. Waiting costs some time.
    """
    found: dict[str, list[float]] = {}
    is_cuda = device.startswith("cuda")

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            wait(device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            wait(device)
            seconds, peak = found.get(name, [0.0, 0.0])
            now = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0
            found[name] = [round(seconds + time.perf_counter() - started, 3), round(max(peak, now), 2)]
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in PHASES.items() if is_wanted else ():
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield found


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
