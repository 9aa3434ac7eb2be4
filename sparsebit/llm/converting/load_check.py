"""Checks that a written model loads and computes the same logits, before it is kept.

One function for each kind of result: `check_loading` (a quantized folder), `check_transposed` (with `Conv1D` layers),
`check_conversion` (another folder format), `check_gguf`, `check_genai`. Each one runs our reader and the reader of the
format's users on the same tokens in full float32, and raises if logits differ by more than `TOLERANCE` of the largest.
If a reader rounds weights to another type, ours are rounded so too before they are compared.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import DeploymentError
from sparsebit.llm.checkpoint.compressed_tensors import FORMATS
from sparsebit.llm.converting.genai_folder import genai_logits
from sparsebit.llm.gguf.architectures import ARCHITECTURES, text_length, unnamed_settings
from sparsebit.llm.gguf.tensors import GgufTensor, all_values, rounded_values
from sparsebit.llm.layers.float_weight import FloatLinear
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.calibration_batches import IDS, Batch, to_device
from sparsebit.llm.models.hub_classes import auto_class, load_config, package, transformers_module
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.process_group import alone
from sparsebit.llm.running.loading import HALVES, load
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.progress import phase

TOLERANCE = 1e-3
NO_CONV1D = "neither transformers nor vLLM has packed Conv1D layers"
# The packages that transformers needs to load a format.
_PACKAGES = {"compressed-tensors": ("compressed_tensors",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",)}
# From this version on, codes of 3 bits are packed without gaps, as transformers and vLLM expect them.
_DENSE_VERSION = (0, 18)


@dataclass(frozen=True)
class LoadCheck:
    """`difference`: of the logits of `reader` from ours, relative to the largest. `vllm`: why vLLM would reject it.

    For a file with weights rounded again, ours are those of the rounded weights: `from_source` is their distance from
    the logits of the source model, `weight_error` the root mean square of the change by rounding, relative to that
    of the weights.
    """

    difference: float
    vllm: tuple[str, ...]
    reader: str = "transformers"
    from_source: float | None = None
    weight_error: float | None = None


def need_reader(bits: Collection[int] = ()) -> None:
    """Raise, before the work, if the package that reads files of these bits is missing: the check would fail."""
    package("compressed-tensors", "llm", "loading packed models with transformers")
    version = metadata.version("compressed-tensors")
    if 3 in bits and tuple(map(int, version.split(".")[:2])) < _DENSE_VERSION:
        raise DeploymentError(
            f"compressed-tensors {version} expects other files of 3 bits than newer versions, so that transformers "
            "cannot check the result: pip install 'compressed-tensors>=0.18', or skip the check (--no-check)"
        )


@torch.no_grad()
@full_float32()
@phase("checking with transformers")
def check_loading(
    folder: Path, tokens: Tensor | Batch, vllm: tuple[str, ...], *, trust_remote_code: bool = False
) -> LoadCheck:
    """Load the folder with transformers and with `load`, run both on `tokens (1, n)` or a batch in float32."""
    difference = difference_of_transformers(folder, tokens, trust_remote_code=trust_remote_code)
    _need_near(difference, "transformers loads the packed model", "ours; please report the model's architecture")
    return LoadCheck(difference, vllm)


@torch.no_grad()
@full_float32()
def difference_of_transformers(folder: Path, tokens: Tensor | Batch, *, trust_remote_code: bool = False) -> float:
    """The distance of transformers' logits from ours, relative to the largest. It unpacks experts in the type of the
    files, for any type of the model: on our side their weights are rounded to it too.
    """
    theirs = _logits_of_transformers(folder, tokens, trust_remote_code)
    model = load(folder, dtype=torch.float32, kv_cache=_cache_of(folder), trust_remote_code=trust_remote_code)
    for experts in experts_in(model).values():
        _round_weights(experts)
    try:
        ours = model(**_arguments(tokens), use_cache=False).logits
        problem = None if ours.isfinite().all() else "computes logits that are not finite"
    except (AttributeError, TypeError) as error:  # code that reads the weights of its layers directly
        ours, problem = torch.empty(0), f"does not run with packed layers ({error})"
    if problem is not None:
        raise DeploymentError(f"{type(model).__name__} {problem}; the folder is not kept")
    return _difference(theirs, ours, model, folder, tokens)


@torch.no_grad()
@full_float32()
@phase("checking with the layers of transformers")
def check_transposed(folder: Path, source: Path, tokens: Tensor, *, trust_remote_code: bool = False) -> LoadCheck:
    """Compare with transformers' float model with our unpacked weights: it has no packed `Conv1D` layer to load. Inputs
    are float on both sides.
    """
    model = load(folder, dtype=torch.float32, kv_cache="float", trust_remote_code=trust_remote_code)
    for module in model.modules():
        if isinstance(module, QuantLinear | FloatLinear):
            module.inputs = None  # transformers' layers would not round theirs
    ours = model(tokens, use_cache=False).logits
    plain = transformers_module().AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
    )
    for name, theirs in plain.named_parameters():
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        is_packed = isinstance(layer, QuantLinear | FloatLinear) and own == "weight"
        value = layer.packed.dequantize(torch.float32) if is_packed else getattr(layer, own)
        is_transposed = type(plain.get_submodule(path)).__name__ == "Conv1D" and own == "weight"
        theirs.data.copy_(value.t() if is_transposed else value)
    difference = relative_difference(plain.eval()(tokens, use_cache=False).logits, ours)
    _need_near(difference, "the packed model runs", "those of its unpacked weights")
    return LoadCheck(difference, (NO_CONV1D,), f"sparsebit ({NO_CONV1D}: read it with sparsebit.llm.load)")


@torch.no_grad()
@full_float32()
@phase("checking the converted folder")
def check_conversion(
    folder: Path, source: Path, vllm: tuple[str, ...], *, trust_remote_code: bool = False
) -> LoadCheck:
    """Compare a converted folder with the one it was made from, on arbitrary tokens; by transformers too, if it can."""
    tokens, expected = _arbitrary(source, trust_remote_code, _cache_of(folder))
    model = load(folder, dtype=torch.float32, kv_cache=_cache_of(folder), trust_remote_code=trust_remote_code)
    readers = {"sparsebit": relative_difference(model(tokens, use_cache=False).logits, expected)}
    method = str(ModelFolder(folder).config["quantization_config"]["quant_method"])
    if all(find_spec(name) is not None for name in _PACKAGES[method]):
        theirs = _logits_of_transformers(folder, tokens, trust_remote_code)
        readers["transformers"] = _difference(theirs, expected, model, folder, tokens)
    for reader, difference in readers.items():
        _need_converted(reader, difference, source)
    if "transformers" in readers:
        return LoadCheck(max(readers.values()), vllm)
    needed = " and ".join(_PACKAGES[method])
    return LoadCheck(readers["sparsebit"], vllm, f"sparsebit (transformers was not tried: it needs {needed})")


@torch.no_grad()
@full_float32()
@phase("checking the GGUF file")
def check_gguf(path: Path, source: Path, tensors: list[GgufTensor], *, trust_remote_code: bool = False) -> LoadCheck:
    """Load the GGUF file with transformers, and compare its logits with those of the folder it was made from.

    `tensors`: the written ones. If weights were rounded again, the folder's model gets their values before the
    comparison. For architectures that transformers does not read from GGUF files, the weights read by the package gguf
    are put into the model.
    """
    model = load(source, dtype=torch.float32, kv_cache="float", trust_remote_code=trust_remote_code)
    tokens = arbitrary_tokens(model)[:, : text_length(model.config)]
    expected = model(tokens, use_cache=False).logits
    from_source = weight_error = None
    rounded = rounded_values(path, tensors)
    if rounded:
        original = expected
        weight_error = _put_weights(model, rounded)
        expected = model(tokens, use_cache=False).logits
        from_source = relative_difference(expected, original)
    if ARCHITECTURES[model.config.model_type].has_reader:
        unnamed = unnamed_settings(model.config)
        theirs = _logits_of_transformers(path.parent, tokens, trust_remote_code, gguf_file=path.name, **unnamed)
        more = f" (with {', '.join(f'{name}={value}' for name, value in unnamed.items())})" if unnamed else ""
        reader = f"transformers{more}"
    else:
        found = all_values(path, tensors)
        _put_weights(model, found)
        missing = [name for name, _ in model.named_parameters() if name not in found]
        if missing:
            raise DeploymentError(f"{path.name} has no weights for {', '.join(missing)}; it is not kept")
        theirs = model(tokens, use_cache=False).logits
        reader = f"gguf (transformers does not read {model.config.model_type} models from GGUF files)"
    difference = relative_difference(theirs, expected)
    _need_converted(reader.partition(" ")[0], difference, source)
    return LoadCheck(difference, (), reader, from_source, weight_error)


@torch.no_grad()
@full_float32()
@phase("checking with ONNX Runtime GenAI")
def check_genai(folder: Path, source: Path, *, trust_remote_code: bool = False) -> LoadCheck:
    """Run the folder with ONNX Runtime GenAI, and compare its logits with those of the folder it was made from."""
    tokens, expected = _arbitrary(source, trust_remote_code, "float")
    difference = relative_difference(genai_logits(folder, tokens), expected)
    _need_converted("onnxruntime-genai", difference, source)
    return LoadCheck(difference, (), "onnxruntime-genai")


def _put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> float:
    """Put float layers with these weights in place of the packed ones; returns the relative change over all weights."""
    changed, total = 0.0, 1e-30
    for name, value in weights.items():
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if isinstance(module, QuantLinear | FloatLinear) and own == "weight":
            before = module.packed.dequantize(torch.float32)
            model.set_submodule(path, _plain(module, value))
        else:
            before = getattr(module, own).detach().clone()
            getattr(module, own).data.copy_(value)
        changed += float((value - before).square().sum())
        total += float(before.square().sum())
    return float((changed / total) ** 0.5)


def _cache_of(folder: Path) -> str:
    """The cache with which transformers computes the logits of a folder: int4 is only ours."""
    return "folder" if _quantization(folder).get("kv_cache_scheme") else "float"


def _arbitrary(source: Path, trust_remote_code: bool, kv_cache: str) -> tuple[Tensor, Tensor]:
    """Arbitrary tokens, and the logits of the packed model for them."""
    model = load(source, dtype=torch.float32, kv_cache=kv_cache, trust_remote_code=trust_remote_code)
    tokens = arbitrary_tokens(model)
    return tokens, model(tokens, use_cache=False).logits


def arbitrary_tokens(model: Any) -> Tensor:
    """64 tokens, the same for every call."""
    size = int(model.config.get_text_config().vocab_size)
    return torch.randint(0, size, (1, 64), generator=torch.Generator().manual_seed(0))


def _need_converted(reader: str, difference: float, source: Path) -> None:
    _need_near(difference, f"{reader} loads the converted model", f"those of {source}")


def _need_near(difference: float, what: str, expected: str) -> None:
    if not difference <= TOLERANCE:
        raise DeploymentError(
            f"{what}, and its logits differ by {difference:.2g} from {expected} (allowed: {TOLERANCE:g} of the "
            "largest); it is not kept"
        )


def _quantization(folder: Path) -> dict[str, Any]:
    """The settings of a packed folder; empty for the folder of a GGUF file."""
    is_model = (folder / "config.json").is_file()
    return (ModelFolder(folder).config.get("quantization_config") if is_model else None) or {}


def _difference(theirs: Tensor, expected: Tensor, model: nn.Module, folder: Path, tokens: Tensor | Batch) -> float:
    """The distance of transformers' logits from the expected ones. If the config has `dequantize`, transformers 5.23
    unpacks weights in the type of their scales: those of `model` are then rounded so too.
    """
    found = relative_difference(theirs, expected)
    if found <= TOLERANCE or not _quantization(folder).get("dequantize"):
        return found
    _round_weights(model)
    return min(found, relative_difference(theirs, model(**_arguments(tokens), use_cache=False).logits))


def _arguments(tokens: Tensor | Batch) -> dict[str, Tensor]:
    """The arguments of a model, with pixels in float32."""
    return to_device({IDS: tokens} if isinstance(tokens, Tensor) else tokens, "cpu", torch.float32)


def _round_weights(model: nn.Module) -> None:
    """Put plain layers in place of packed ones, with weights rounded to the type of their scales and float inputs."""
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear | FloatLinear)}
    for name, layer in packed.items():
        stored = layer.scales.dtype if isinstance(layer, QuantLinear) else torch.float32
        model.set_submodule(name, _plain(layer, layer.packed.dequantize(stored).float()))


def _plain(layer: QuantLinear | FloatLinear, weight: Tensor) -> nn.Linear:
    """A float layer with this weight and the bias of the packed one."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.register_parameter("bias", None if layer.bias is None else nn.Parameter(layer.bias, False))
    return plain


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number; NaN if there is any."""
    scale = expected.float().abs().max().clamp(min=1e-30)
    return float((found.float() - expected.float()).abs().max() / scale)


def _logits_of_transformers(folder: Path, tokens: Tensor | Batch, trust_remote_code: bool, **how: Any) -> Tensor:
    is_folder = "gguf_file" not in how
    config = load_config(folder, trust_remote_code=trust_remote_code) if is_folder else None
    auto: Any = auto_class(config)
    logged: list[str] = []
    try:
        # Progress bars and remarks of two other packages.
        with alone(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), _collected_log(logged):
            warnings.simplefilter("ignore")
            # compressed-tensors unpacks 4-bit floats to bfloat16, for any type of the model.
            if _quantization(folder).get("format") in (FORMATS["mxfp4"], FORMATS["nvfp4"]):
                how["quantization_config"] = transformers_module().CompressedTensorsConfig(dequantize=True)
            how |= {"trust_remote_code": trust_remote_code, "local_files_only": True, "device_map": "cpu"}
            model = auto.from_pretrained(folder, dtype=torch.float32, **how)
            for parameter in model.parameters():
                if parameter.dtype in HALVES:  # experts and 4-bit floats: their products would be rounded to it too
                    parameter.data = parameter.data.float()
            found: Tensor = model.eval()(**_arguments(tokens), use_cache=False).logits
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = " ".join(next((line for line in logged if "MISMATCH" in line), str(error)).split())
        raise DeploymentError(f"transformers does not load the packed model ({reason}); it is not kept") from error
    return found


@contextlib.contextmanager
def _collected_log(lines: list[str]) -> Iterator[None]:
    """Inside, log messages of transformers are put into `lines`: its errors refer to a report that it prints there."""
    logger, handler = logging.getLogger("transformers"), logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    before = logger.handlers
    logger.handlers = [handler]
    try:
        yield
    finally:
        logger.handlers = before
