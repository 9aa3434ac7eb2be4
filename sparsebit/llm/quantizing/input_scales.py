"""`write_input_scales`: adds constant scales of layers' inputs, from calibration text, to a packed folder."""

from __future__ import annotations

import functools
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
    in the model with quantized weights, and the largest input gets the largest code. Blocks are read one by one.
    """
    if inputs is None or not inputs.is_calibrated:
        return
    model = load_streamed(folder, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code)
    ranges = input_ranges(model, tokens, batch_size)
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
    path, device = architecture_of(model).blocks, next(model.parameters()).device

    def watch(number: int, block: nn.Module, args: Any) -> None:
        """The layers of a streamed block are new ones whenever it runs."""
        for name, part in block.named_modules(prefix=f"{path}.{number}"):
            if isinstance(part, QuantLinear | FloatLinear):
                part.register_forward_pre_hook(functools.partial(note, name))

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():
            found = args[0].detach().abs().amax().float()
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

    for number, block in enumerate(blocks_of(model, architecture_of(model))):
        block.register_forward_pre_hook(functools.partial(watch, number))
    with evaluating(model):
        for batch in track(as_batches(tokens, batch_size), "ranges of the inputs"):
            model.base_model(**to_device(batch, device, torch.float32), use_cache=False)
    wrong = next((name for name, found in largest.items() if not found.isfinite()), None)
    if wrong is not None:
        raise CalibrationError(f"layer {wrong} gets inputs that are not finite: they have no range")
    return {name: max(float(found), _LEAST) for name, found in largest.items()}
