"""`write_input_scales`: adds constant scales of layers' inputs, from calibration text, to a packed folder."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.state.modes import evaluating
from sparsebit.llm.checkpoint.compressed_tensors import input_scheme
from sparsebit.llm.checkpoint.packed_folder import write_config
from sparsebit.llm.checkpoint.packed_source import packed_source
from sparsebit.llm.layers.float_weight import FloatLinear
from sparsebit.llm.layers.input_kinds import InputFormat
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.calibration_batches import Tokens, as_batches, to_device
from sparsebit.llm.models.model_folder import ModelFolder, add_tensors
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.running.streaming import load_streamed
from sparsebit.progress import track

_FILE = "input_scales.safetensors"
_LEAST = 1e-12
_SOME_ROWS = 32
# Parts of a range that are tried.
FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05)
_Layer = QuantLinear | FloatLinear


def write_input_scales(
    folder: Path,
    inputs: InputFormat | None,
    tokens: Tokens,
    batch_size: int,
    *,
    device: torch.device,
    trust_remote_code: bool,
) -> None:
    """Add the scales and their entry in the config, if `inputs` needs calibration. The ranges are those of the inputs
    in the model with quantized weights. The largest input gets the largest code, or for int8 a number with a smaller
    error of the outputs. Blocks are read one by one.
    """
    if inputs is None or not inputs.is_calibrated:
        return
    model = load_streamed(folder, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code)
    ranges = input_ranges(model, tokens, batch_size)
    if inputs.kind == "int8":  # steps of floats are relative: a larger range costs them nothing
        ranges = clipped_ranges(model, inputs, ranges, tokens, batch_size)
    source = packed_source(Skeleton(ModelFolder(folder), trust_remote_code=trust_remote_code))
    suffix = "input_global_scale" if inputs.kind == "nvfp4" else "input_scale"
    # Layers that servers join read one input, and so have one scale.
    scales = {name: InputRounding.of_range(inputs, ranges.get(name, 1.0)).scale for name in source.formats}
    tensors = {f"{source.file_name(name)}.{suffix}": torch.tensor([scale]) for name, scale in scales.items()}
    add_tensors(folder, _FILE, tensors)
    config = ModelFolder(folder).config
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = input_scheme(inputs)
    write_config(folder, config)


@torch.no_grad()
def input_ranges(model: Any, tokens: Tokens, batch_size: int) -> dict[str, float]:
    """The largest absolute input of each packed layer of a streamed model, by name; without those that never run."""
    largest: dict[str, Tensor] = {}

    def note(name: str, layer: _Layer, x: Tensor) -> None:
        found = x.abs().amax().float()
        largest[name] = torch.maximum(largest[name], found) if name in largest else found

    _watch(model, tokens, batch_size, note, "ranges of the inputs")
    wrong = next((name for name, found in largest.items() if not found.isfinite()), None)
    if wrong is not None:
        raise CalibrationError(f"layer {wrong} gets inputs that are not finite: they have no range")
    return {name: max(float(found), _LEAST) for name, found in largest.items()}


@torch.no_grad()
def clipped_ranges(
    model: Any, inputs: InputFormat, ranges: Mapping[str, float], tokens: Tokens, batch_size: int
) -> dict[str, float]:
    """The part of each range with the smallest error of the layers' outputs, if numbers beyond it are clipped.

    The error is that of some rows of each batch, the one with the largest number included. Layers of a block with equal
    ranges read one input: they get one range, as servers need it.
    """
    losses: dict[tuple[str, float], Tensor] = {}

    def note(name: str, layer: _Layer, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        rows = torch.cat([rows[:: max(len(rows) // _SOME_ROWS, 1)], rows[rows.abs().amax(-1).argmax()][None]])
        tried = [InputRounding.of_range(inputs, ranges[name] * factor).rounded(rows) - rows for factor in FACTORS]
        weight = layer.packed.dequantize(torch.float32)
        loss = torch.stack([(error @ weight.t()).square().sum() for error in tried])
        key = _input_of(name, ranges)
        losses[key] = losses[key] + loss if key in losses else loss

    _watch(model, tokens, batch_size, note, "clipping the inputs")
    best = {key: FACTORS[int(loss.argmin())] for key, loss in losses.items()}
    return {name: found * best[_input_of(name, ranges)] for name, found in ranges.items()}


def _input_of(name: str, ranges: Mapping[str, float]) -> tuple[str, float]:
    """The block of a layer, and the range of its input."""
    return re.sub(r"(\.\d+)\..*?$", r"\1", name), ranges[name]


def _watch(model: Any, tokens: Tokens, batch_size: int, note: Callable[[str, _Layer, Tensor], None], what: str) -> None:
    """Run a streamed model, and call `note` with the name, the layer and the input of each packed layer."""
    path, device = architecture_of(model).blocks, next(model.parameters()).device

    def enter(number: int, block: nn.Module, args: Any) -> None:
        """The layers of a streamed block are new ones whenever it runs."""
        for name, part in block.named_modules(prefix=f"{path}.{number}"):
            if isinstance(part, QuantLinear | FloatLinear):
                part.register_forward_pre_hook(functools.partial(reach, name))

    def reach(name: str, layer: _Layer, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():
            note(name, layer, args[0].detach())

    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks_of(model, architecture_of(model))):
            hooks.enter_context(block.register_forward_pre_hook(functools.partial(enter, number)))
        hooks.enter_context(evaluating(model))
        for batch in track(as_batches(tokens, batch_size), what):
            model.base_model(**to_device(batch, device, torch.float32), use_cache=False)
