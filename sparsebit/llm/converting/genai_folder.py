"""Writes a packed model for ONNX Runtime GenAI, by the model builder of the package onnxruntime-genai.

The builder reads GPTQ files and makes a MatMulNBits node of each packed layer and a GroupQueryAttention node of each
attention. It gets separate GPTQ files: version 1, with zero points minus one modulo 2^bits, to which it adds one
again modulo 2^bits, and with scales in float32, which it does not round. It does not get the output layer, which it
would round itself. The accuracy level is fixed at 1, products in float32; by default MatMulNBits
would round its inputs to int8 on a CPU.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError
from sparsebit.llm.checkpoint import gptq
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.hub_classes import package
from sparsebit.numerics.packing import WORD
from sparsebit.progress import phase

log = logging.getLogger(__name__)
ACCURACY_LEVEL = 1
_BITS = (2, 4, 8)
_SMALLEST_BLOCK = 16
_OPTIONS = (
    f"accuracy_level={ACCURACY_LEVEL}",
    "nodes_to_exclude=/lm_head/MatMul",
    "shared_embeddings=false",  # the embedding would be rounded with the output layer
    "hf_token=false",
)

_TEXTS = ("The ship left the harbour", "It's 12,345.67%  of\n\tx = f(y);", "Ünïcödé: naïve café — 日本 हिन्दी 🙂")


def genai_package() -> Any:
    """The package onnxruntime-genai."""
    package("onnx-ir", "genai", "models for ONNX Runtime GenAI")  # the builder needs it
    return package("onnxruntime-genai", "genai", "models for ONNX Runtime GenAI")


def need_architecture(config: Any) -> None:
    """Raise for an architecture that is not in the code of the installed model builder, if there is one."""
    spec = find_spec("onnxruntime_genai")
    if spec is None or spec.origin is None:
        return
    builder = Path(spec.origin).with_name("models") / "builder.py"
    known = set(re.findall(r"""architectures\[0\] == ["'](\w+)["']""", builder.read_text(encoding="utf-8")))
    wanted = (config.architectures or ("",))[0]
    if known and wanted not in known:
        raise DeploymentError(
            f"the model builder of onnxruntime-genai does not know {wanted or config.model_type}; it knows "
            f"{', '.join(sorted(known))}"
        )


def why_not(layers: Mapping[str, LayerFormat], columns: Mapping[str, int]) -> str | None:
    """Why MatMulNBits does not hold these layers; None, if it does. `columns`: inputs of each layer."""
    for name, layer in layers.items():
        size = layer.group_size or columns[name]
        if layer.kind != "int":
            return f"layer {name} has {layer.kind} weights: MatMulNBits holds whole numbers"
        if layer.bits not in _BITS:
            return f"layer {name} has {layer.bits} bits: MatMulNBits has kernels for 2, 4 and 8; use one of them"
        if size < _SMALLEST_BLOCK or size & (size - 1):
            return f"layer {name} has groups of {size}: MatMulNBits needs a power of two from {_SMALLEST_BLOCK} on"
    return None


def builder_tensors(name: str, packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a layer in the GPTQ files that the builder reads."""
    if packed.in_features % WORD or packed.out_features % WORD:
        shape = f"{packed.out_features} x {packed.in_features}"
        raise DeploymentError(f"layer {name} has the shape {shape}: onnxruntime-genai needs multiples of {WORD}")
    zeros = (gptq.zero_points(packed).to(torch.int16) - 1 & (1 << packed.bits) - 1).to(torch.uint8)
    return gptq.file_tensors(name, packed, zeros, torch.float32)


@phase("building the ONNX model")
def run_builder(files: Path, target: Path, bits: int, *, trust_remote_code: bool = False) -> None:
    """Make the folder `target` from the GPTQ folder `files`, in a separate process: the builder sets global state."""
    options = [*_OPTIONS, *(["hf_remote=true"] if trust_remote_code else [])]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(files), "-o", str(target)]
    command += ["-p", "int8" if bits == 8 else "int4", "-e", "cpu", "-c", str(files), "--extra_options", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not (target / "genai_config.json").is_file():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DeploymentError(f"the model builder of onnxruntime-genai failed ({last[0]}); nothing is kept")


def genai_logits(folder: Path, tokens: Tensor) -> Tensor:
    """The logits `(1, n, vocabulary)` that ONNX Runtime GenAI computes for `tokens (1, n)`."""
    genai = genai_package()
    try:
        model = genai.Model(str(folder))
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=tokens.shape[1] + 1)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(tokens.to(torch.int32).numpy())
        return torch.from_numpy(generator.get_output("logits").copy())
    except RuntimeError as error:  # its errors come from C++
        raise DeploymentError(f"onnxruntime-genai does not load the model ({error}); it is not kept") from error


def warn_of_tokens(folder: Path, tokenizer: Any) -> None:
    """Warn if ONNX Runtime GenAI splits text into other tokens than `tokenizer`, the model's own."""
    genai = genai_package()
    try:
        other = genai.Tokenizer(genai.Model(str(folder)))
        other.update_options(add_special_tokens=True)
        differing = [text for text in _TEXTS if list(other.encode(text)) != tokenizer(text)["input_ids"]]
    except RuntimeError as error:
        text = "%s: ONNX Runtime GenAI does not read the tokenizer (%s): split text with transformers"
        log.warning(text, folder.name, error)
        return
    if differing:
        log.warning(
            "%s: the tokenizer of ONNX Runtime GenAI, with add_special_tokens=True, splits %r into other tokens than "
            "that of the model: split text with transformers",
            *(folder.name, differing[0]),
        )
