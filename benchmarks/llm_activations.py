"""Perplexity of book-llama with rounded inputs, for each scheme of `--activations`, computed as files define it.

`python benchmarks/llm_activations.py [--device cuda] [--schemes NAME ...]`. The weights are quantized with the text of
the training set; the figures are of the first 60 windows of 512 tokens of the held-out books, in float32, on the packed
model: inputs are rounded as compressed-tensors does. The divergence (Kullback-Leibler, nats) of the predictions from
those of the float model is a finer measure than perplexity. `--as-vllm` measures dynamic int8 again with its divisor
of 127, and W4A8 in fp8 with its scales. A line of `results/llm_activations.jsonl` for each scheme.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import ROOT, data_folder, emit
from torch import Tensor

from sparsebit.kernels import eight_bits
from sparsebit.llm import Calibration, QuantLinear, Recipe, load, perplexity, quantize, token_stream, windows
from sparsebit.llm.layers.input_rounding import InputRounding

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

INT8: dict[str, Any] = {"bits": 8, "group_size": 0, "symmetric": True}
INT4: dict[str, Any] = {"bits": 4, "group_size": 128, "symmetric": True}
# Each with the float inputs of the same weights beside it.
SCHEMES: dict[str, Recipe] = {
    "W8A16 int8": Recipe("gptq", **INT8),
    "W8A8 int8, tokens": Recipe("gptq", **INT8, activations="int8"),
    "W8A8 int8, tokens, smooth": Recipe("gptq", **INT8, activations="int8", smooth=True),
    "W8A8 int8, static": Recipe("gptq", **INT8, activations="int8-static"),
    "W8A8 int8, static, smooth": Recipe("gptq", **INT8, activations="int8-static", smooth=True),
    "W8A8 fp8, tokens": Recipe("fp8"),
    "W8A8 fp8, static": Recipe("fp8", activations="fp8-static"),
    "W4A16": Recipe("gptq", **INT4),
    "W4A8 int8, tokens": Recipe("gptq", **INT4, activations="int8"),
    "W4A8 int8, tokens, smooth": Recipe("gptq", **INT4, activations="int8", smooth=True),
    "W4A8 fp8, tokens": Recipe("gptq", **INT4, activations="fp8"),
    "W4A16 nvfp4": Recipe("nvfp4"),
    "W4A4 nvfp4": Recipe("nvfp4", activations="nvfp4"),
    "W4A16 nvfp4, compensate": Recipe("nvfp4", compensate=True),
    "W4A4 nvfp4, compensate": Recipe("nvfp4", activations="nvfp4", compensate=True),
    "W4A4 nvfp4, compensate, smooth": Recipe("nvfp4", activations="nvfp4", compensate=True, smooth=True),
    "W4A16 mxfp4": Recipe("mxfp4"),
    "W4A4 mxfp4": Recipe("mxfp4", activations="mxfp4"),
    "W4A16 mxfp4, compensate": Recipe("mxfp4", compensate=True),
    "W4A4 mxfp4, compensate": Recipe("mxfp4", activations="mxfp4", compensate=True),
    "W4A4 mxfp4, compensate, smooth": Recipe("mxfp4", activations="mxfp4", compensate=True, smooth=True),
    "W4A4 mxfp4, compensate, rotated": Recipe("mxfp4", activations="mxfp4", compensate=True, rotate=True),
}


@contextlib.contextmanager
def divided_by_127() -> Iterator[None]:
    """Inside, int8 scales of tokens are those of vLLM's kernel."""
    own, takes = InputRounding._per_token, eight_bits.takes

    def per_token(self: InputRounding, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = own(self, x)
        return (scale * (127.5 / 127) if self.format.kind == "int8" else scale), zero

    InputRounding._per_token = per_token  # type: ignore[method-assign]
    eight_bits.takes = lambda x: False  # the kernel has compressed-tensors' divisor
    try:
        yield
    finally:
        InputRounding._per_token = own  # type: ignore[method-assign]
        eight_bits.takes = takes


@torch.no_grad()
def divergence(model: Any, packed: Any, tokens: Tensor) -> float:
    """The mean divergence of the packed model's predictions from those of the float model."""
    total = 0.0
    for batch in tokens.split(4):
        wanted, found = (
            one(input_ids=batch.to(one.device), use_cache=False).logits.float().log_softmax(-1)
            for one in (model, packed)
        )
        total += float((wanted.exp() * (wanted - found)).sum())
    return total / tokens.numel()


def round_scales(model: Any) -> None:
    """Round the scales of groups as vLLM does for its kernel: to fp8, relative to a scale of the row."""
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            row = layer.scales.float().amax(1, keepdim=True) / 448
            layer.scales.copy_((layer.scales.float() / row).to(torch.float8_e4m3fn).float() * row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--num-windows", type=int, default=60)
    parser.add_argument("--as-vllm", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON lines file")
    options = parser.parse_args()
    torchvision_shim.install()
    from transformers import AutoTokenizer

    data = data_folder()
    source = data / "book_llama"
    text = token_stream(data / "text" / "books_heldout.txt", AutoTokenizer.from_pretrained(source))
    heldout = windows(text, 512, options.num_windows)
    calibration = Calibration(data / "text" / "books_calibration.txt", num_samples=options.num_samples)
    how: dict[str, Any] = {"device": options.device, "dtype": torch.float32}
    model = load(source, **how)
    floats = perplexity(model, heldout).value
    print(f"float: perplexity {floats:.2f}", flush=True)
    for name in options.schemes:
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            made = quantize(
                *(source, Path(folder) / "packed", SCHEMES[name], calibration),
                device=options.device,
                check=find_spec("compressed_tensors") is not None,
            )
            seconds = time.process_time() - started
            packed = load(made.folder, **how)
            found = {name: (perplexity(packed, heldout).value, divergence(model, packed, heldout))}
            if options.as_vllm and "int8, tokens" in name:
                with divided_by_127():
                    value = perplexity(packed, heldout).value, divergence(model, packed, heldout)
                    found[f"{name}, divided by 127"] = value
            if options.as_vllm and name == "W4A8 fp8, tokens":
                round_scales(packed)
                value = perplexity(packed, heldout).value, divergence(model, packed, heldout)
                found[f"{name}, scales of groups in fp8"] = value
        for what, (value, distance) in found.items():
            record = {"recipe": what, "perplexity": round(value, 4), "divergence": round(distance, 5), "float": floats}
            record |= {"cpu_s": round(seconds), "smoothed": sum(one.alpha > 0 for one in made.scaled_inputs.values())}
            emit({"benchmark": "llm_activations", **record, "device": options.device}, options.output)


if __name__ == "__main__":
    main()
