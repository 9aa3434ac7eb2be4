"""`need_readable`: writes, loads and compares a tiny model of the same format, before hours of work."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparsebit.errors import DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import FinishedBlock, write_packed_folder
from sparsebit.llm.converting.load_check import TOLERANCE, difference_of_transformers
from sparsebit.llm.layers.float_weight import Weight
from sparsebit.llm.models.architectures import linears
from sparsebit.llm.models.hub_classes import transformers_module
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import experts_prefixes, routers
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import alone
from sparsebit.llm.quantizing.input_scales import write_input_scales
from sparsebit.llm.quantizing.rounding import layer_format, round_weight
from sparsebit.llm.recipe import Recipe

_VOCABULARY, _BLOCK = 32, "model.layers.0"
_LARGEST_GROUP = 128  # a larger group is stored in the same way, and would make the probe slow
_READS_ALL = "transformers==5.22.2 compressed-tensors==0.20.0"
_UNPACKS_FIRST = (5, 23)
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def need_readable(recipe: Recipe, *, has_experts: bool = False) -> None:
    """Raise for a number format that the installed transformers and compressed-tensors do not read.

    Versions differ in what they read, so it is tried: one block with random weights is rounded to nearest, written like
    the result, loaded by plain transformers, and its logits are compared with ours. This takes about a second.
    """
    reason = _refusal(_to_nearest(recipe), has_experts)
    if reason is not None:
        advice = "" if recipe.symmetric or recipe.float_kind else "quantize with symmetric=True (--symmetric), "
        raise DeploymentError(
            f"{_version('transformers')} with {_version('compressed-tensors')} does not read {_words(recipe)}; a tiny "
            f"model of it was tried first: {reason}. Install versions that read it (pip install {_READS_ALL}), {advice}"
            "or write the folder without loading it (--no-check)"
        )


def reads_unpacked(recipe: Recipe) -> bool:
    """Whether transformers unpacks weights of this format while it loads them: the model's layers are float then."""
    version = tuple(map(int, metadata.version("transformers").split(".")[:2]))
    return version >= _UNPACKS_FIRST and not recipe.symmetric and recipe.float_kind is None and not recipe.is_mixed


@functools.cache
def _refusal(recipes: tuple[Recipe, ...], has_experts: bool) -> str | None:
    """Why transformers does not read a tiny model with layers of these formats; None if it does."""
    with tempfile.TemporaryDirectory(prefix="sparsebit-probe-") as temporary:
        folder = Path(temporary)
        _write_float(folder / "float", recipes[0].columns_in_group, has_experts)
        _write_packed(folder / "float", folder / "packed", recipes)
        try:
            difference = difference_of_transformers(folder / "packed", torch.arange(_VOCABULARY)[None])
        except DeploymentError as error:
            return str(error).removesuffix("; it is not kept")
    return None if difference <= TOLERANCE else f"it loads, and its logits differ by {difference:.2g} of the largest"


def _write_float(folder: Path, group_size: int, has_experts: bool) -> None:
    """A random model of one block; its rows are two groups wide."""
    size = 2 * (group_size or 32)
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), size)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    sizes |= dict.fromkeys(("vocab_size", "max_position_embeddings"), _VOCABULARY)
    sizes |= _EXPERTS if has_experts else {}
    transformers = transformers_module()
    config = transformers.AutoConfig.for_model("mixtral" if has_experts else "llama", **sizes)
    # Hides another package's progress bar, and keeps the caller's sequence of random numbers.
    with alone(), contextlib.redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        model.save_pretrained(folder)


def _write_packed(source: Path, target: Path, recipes: tuple[Recipe, ...]) -> None:
    skeleton = Skeleton(ModelFolder(source))
    block = skeleton.fill(_BLOCK)
    layers: dict[str, Weight] = {}
    formats: dict[str, LayerFormat] = {}
    own, inside = itertools.cycle(recipes), experts_prefixes(block)
    for name, layer in linears(block).items():
        recipe = recipes[0] if name.startswith(inside) else next(own)  # all experts of a model have one format
        layers[name] = round_weight(layer.weight, None, recipe, name, stored=torch.float16).packed
        formats[f"{_BLOCK}.{name}"] = layer_format(layers[name], recipe)
    ignored = ["lm_head", *routers(skeleton)]
    write_packed_folder(target, skeleton, [_BLOCK], lambda _: FinishedBlock(layers), formats, ignored)
    skeleton.folder.close()
    tokens, device = torch.arange(_VOCABULARY)[None], torch.device("cpu")
    write_input_scales(target, recipes[0].inputs, tokens, 1, device=device, trust_remote_code=False)


def _to_nearest(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipe's number formats, rounded to nearest, without text."""
    if recipe.float_kind is not None:
        return (Recipe(recipe.float_kind, scale_search="none", activations=recipe.activations),)
    size, every = min(recipe.group_size, _LARGEST_GROUP), recipe.candidate_bits or (recipe.bits,)
    given = recipe.activations
    return tuple(Recipe("rtn", bits, size, recipe.symmetric, "none", activations=given) for bits in every)


def _words(recipe: Recipe) -> str:
    if recipe.float_kind is not None:
        return f"{recipe.float_kind} weights{_inputs(recipe)}"
    bits = ", ".join(map(str, recipe.candidate_bits or (recipe.bits,)))
    size = f"groups of {recipe.group_size}" if recipe.group_size else "one scale per row"
    return f"weights of {bits} bits, {size}, {'without' if recipe.symmetric else 'with'} zero points{_inputs(recipe)}"


def _inputs(recipe: Recipe) -> str:
    return "" if recipe.inputs is None else f", {recipe.activations} activations"


def _version(package: str) -> str:
    return f"{package} {metadata.version(package)}"
