"""The "will it load" gate: the rules of servers, then plain transformers loads the folder and must compute the same."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.llm.checkpoint.float_formats import FORMATS
from sparsebit.llm.float_linear import FloatLinear
from sparsebit.llm.genai_folder import genai_logits
from sparsebit.llm.gguf_architectures import ARCHITECTURES, text_length, unnamed_settings
from sparsebit.llm.gguf_tensors import GgufTensor, all_values, rounded_values
from sparsebit.llm.half_weights import HALVES
from sparsebit.llm.hub_classes import transformers_module
from sparsebit.llm.loading import load
from sparsebit.llm.model_folder import ModelFolder
from sparsebit.llm.process_group import alone
from sparsebit.llm.quant_linear import QuantLinear
from sparsebit.llm.separate_experts import experts_in
from sparsebit.numerics.full_float32 import full_float32

TOLERANCE = 1e-3
# What transformers needs to load a format.
_PACKAGES = {"compressed-tensors": ("compressed_tensors",), "gptq": ("gptqmodel", "optimum")}
# From this version on codes of 3 bits are packed without gaps, as transformers and vLLM expect them.
_DENSE_VERSION = (0, 18)


@dataclass(frozen=True)
class LoadCheck:
    """`difference`: of the logits of `reader` from ours, relative to the largest. `vllm`: why vLLM would refuse.

    Of a file that rounds weights again, ours are those of the rounded weights: `from_source` is how far they are from
    those of the model it was made from, `weight_error` the root mean square of what rounding changed, relative to that
    of the weights.
    """

    difference: float
    vllm: tuple[str, ...]
    reader: str = "transformers"
    from_source: float | None = None
    weight_error: float | None = None


def need_reader(bits: Collection[int] = ()) -> None:
    """Refuses to begin where the package that reads files of these bits is missing: the check at the end would fail."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError:
        raise MissingExtraError("compressed-tensors", "llm", "loading packed models with transformers") from None
    if 3 not in bits:
        return
    version = metadata.version("compressed-tensors")
    if tuple(map(int, version.split(".")[:2])) < _DENSE_VERSION:
        raise DeploymentError(
            f"compressed-tensors {version} expects other files of 3 bits than newer versions, so that transformers "
            "cannot check the result: pip install 'compressed-tensors>=0.18', or skip the check (--no-check)"
        )


@torch.no_grad()
@full_float32()
def check_loading(folder: Path, tokens: Tensor, vllm: tuple[str, ...], *, trust_remote_code: bool = False) -> LoadCheck:
    """Load the folder with transformers and with `load`, run both on `tokens (1, n)` in float32, and compare.

    A difference above `TOLERANCE` is an error. transformers unpacks experts in the type of the files, whichever type
    the model has: their weights are rounded to it on our side too.
    """
    theirs = _logits_of_transformers(folder, tokens, trust_remote_code)
    model = load(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    _round_experts(model)
    try:
        ours = model(tokens, use_cache=False).logits
    except (AttributeError, TypeError) as error:  # code that reads the weights of its layers itself
        raise DeploymentError(
            f"{type(model).__name__} does not run with packed layers ({error}); the folder is not kept"
        ) from error
    difference = relative_difference(theirs, ours)
    if not ours.isfinite().all():
        raise DeploymentError("the logits of the packed model are not finite; the folder is not kept")
    if not difference <= TOLERANCE:
        raise DeploymentError(
            f"transformers loads the packed model, and its logits differ by {difference:.2g} from ours (allowed: "
            f"{TOLERANCE:g} of the largest); the folder is not kept: please report the model's architecture"
        )
    return LoadCheck(difference, vllm)


@torch.no_grad()
@full_float32()
def check_conversion(
    folder: Path, source: Path, vllm: tuple[str, ...], *, trust_remote_code: bool = False
) -> LoadCheck:
    """Load a converted folder and the one it was made from, run both on arbitrary tokens, and compare.

    Where transformers can read the format here, it loads the folder too.
    """
    tokens, expected = _arbitrary(source, trust_remote_code)
    found = load(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)(tokens, use_cache=False).logits
    readers = {"sparsebit": relative_difference(found, expected)}
    method = str(ModelFolder(folder).config["quantization_config"]["quant_method"])
    if all(find_spec(name) is not None for name in _PACKAGES[method]):
        theirs = _logits_of_transformers(folder, tokens, trust_remote_code)
        readers["transformers"] = relative_difference(theirs, expected)
    _compare(readers, source)
    if "transformers" in readers:
        return LoadCheck(max(readers.values()), vllm)
    needed = " and ".join(_PACKAGES[method])
    return LoadCheck(readers["sparsebit"], vllm, f"sparsebit (transformers was not tried: it needs {needed})")


@torch.no_grad()
@full_float32()
def check_gguf(path: Path, source: Path, tensors: list[GgufTensor], *, trust_remote_code: bool = False) -> LoadCheck:
    """Load the GGUF file with transformers, and compare its logits with those of the folder it was made from.

    `tensors`: what was written. Where weights were rounded again, the folder's model gets their values before it is
    compared. Of architectures that transformers does not read from GGUF files, the weights that the package gguf reads
    are put into the model.
    """
    model = load(source, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tokens = _arbitrary_tokens(model)[:, : text_length(model.config)]
    expected = model(tokens, use_cache=False).logits
    from_source = weight_error = None
    rounded = rounded_values(path, tensors)
    if rounded:
        original = expected
        weight_error = _put_weights(model, rounded)
        expected = model(tokens, use_cache=False).logits
        from_source = relative_difference(expected, original)
    if ARCHITECTURES[model.config.model_type].has_reader:
        told = unnamed_settings(model.config)
        theirs = _logits_of_transformers(path.parent, tokens, trust_remote_code, gguf_file=path.name, **told)
        more = f" (with {', '.join(f'{name}={value}' for name, value in told.items())})" if told else ""
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
    _compare({reader.partition(" ")[0]: difference}, source)
    return LoadCheck(difference, (), reader, from_source, weight_error)


@torch.no_grad()
@full_float32()
def check_genai(folder: Path, source: Path, *, trust_remote_code: bool = False) -> LoadCheck:
    """Run the folder with ONNX Runtime GenAI, and compare its logits with those of the folder it was made from."""
    tokens, expected = _arbitrary(source, trust_remote_code)
    difference = relative_difference(genai_logits(folder, tokens), expected)
    _compare({"onnxruntime-genai": difference}, source)
    return LoadCheck(difference, (), "onnxruntime-genai")


def _put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> float:
    """Put float layers with these weights in place of the packed ones; gives the relative change over all weights."""
    changed, total = 0.0, 1e-30
    for name, value in weights.items():
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if isinstance(module, QuantLinear | FloatLinear) and own == "weight":
            before = module.packed.dequantize(torch.float32)
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(value, requires_grad=False)
            plain.register_parameter("bias", None if module.bias is None else nn.Parameter(module.bias, False))
            model.set_submodule(path, plain)
        else:
            before = getattr(module, own).detach().clone()
            getattr(module, own).data.copy_(value)
        changed += float((value - before).square().sum())
        total += float(before.square().sum())
    return float((changed / total) ** 0.5)


def _arbitrary(source: Path, trust_remote_code: bool) -> tuple[Tensor, Tensor]:
    """Arbitrary tokens, and the logits of the packed model for them."""
    model = load(source, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tokens = _arbitrary_tokens(model)
    return tokens, model(tokens, use_cache=False).logits


def _arbitrary_tokens(model: Any) -> Tensor:
    size = int(model.config.get_text_config().vocab_size)
    return torch.randint(0, size, (1, 64), generator=torch.Generator().manual_seed(0))


def _compare(readers: Mapping[str, float], source: Path) -> None:
    for reader, difference in readers.items():
        if not difference <= TOLERANCE:
            raise DeploymentError(
                f"{reader} loads the converted model, and its logits differ by {difference:.2g} from those of {source} "
                f"(allowed: {TOLERANCE:g} of the largest); it is not kept"
            )


def _is_float4(folder: Path) -> bool:
    """Whether compressed-tensors unpacks the weights to bfloat16, whichever type the model has."""
    if not (folder / "config.json").is_file():  # a GGUF file
        return False
    config = ModelFolder(folder).config.get("quantization_config") or {}
    return config.get("format") in (FORMATS["mxfp4"], FORMATS["nvfp4"])


def _round_experts(model: nn.Module) -> None:
    """Experts with unpacked weights that are rounded to the type of their scales, and with float inputs."""
    for experts in experts_in(model).values():
        packed = {
            name: layer for name, layer in experts.named_modules() if isinstance(layer, QuantLinear | FloatLinear)
        }
        for name, layer in packed.items():
            stored = layer.scales.dtype if isinstance(layer, QuantLinear) else torch.float32
            weight = layer.packed.dequantize(stored).float()
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
            experts.set_submodule(name, plain)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected; NaN if there is any."""
    scale = expected.float().abs().max().clamp(min=1e-30)
    return float((found.float() - expected.float()).abs().max() / scale)


def _logits_of_transformers(folder: Path, tokens: Tensor, trust_remote_code: bool, **how: Any) -> Tensor:
    auto: Any = transformers_module().AutoModelForCausalLM
    try:
        # Progress bars and remarks of two other packages.
        with alone(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            if _is_float4(folder):
                how["quantization_config"] = transformers_module().CompressedTensorsConfig(dequantize=True)
            model = auto.from_pretrained(
                folder,
                dtype=torch.float32,
                device_map="cpu",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                **how,
            )
            for parameter in model.parameters():
                if parameter.dtype in HALVES:  # experts and 4-bit floats: their products would be rounded to it too
                    parameter.data = parameter.data.float()
            found: Tensor = model.eval()(tokens, use_cache=False).logits
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DeploymentError(f"transformers does not load the packed model ({error}); it is not kept") from error
    return found
