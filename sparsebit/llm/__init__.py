"""Language models with weights of 2 to 8 bits: quantized block by block, kept packed, measured packed.

Modules are loaded at the first use of one of these names, so that the command line shows its help without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsebit.llm.caching.packed_cache import cache_bytes
    from sparsebit.llm.converting.convert import ConvertedModel, convert
    from sparsebit.llm.converting.load_check import LoadCheck
    from sparsebit.llm.converting.targets import recipe_for
    from sparsebit.llm.finetuning.layers.packed_lora import add_adapter, load_adapter
    from sparsebit.llm.finetuning.merging import MergedModel, merge
    from sparsebit.llm.finetuning.training import FinetunedModel, finetune
    from sparsebit.llm.finetuning.tuning import Tuning
    from sparsebit.llm.layers.cpu_probe import CpuProbe, probe_cpu
    from sparsebit.llm.layers.float_weight import FloatLinear, FloatWeight
    from sparsebit.llm.layers.packed_weight import PackedWeight
    from sparsebit.llm.layers.quant_linear import QuantLinear, kernel_paths, resident_bytes
    from sparsebit.llm.models.architectures import ARCHITECTURES, Architecture
    from sparsebit.llm.models.calibration_text import calibration_tokens, token_stream, windows
    from sparsebit.llm.models.input_scaling import ScaledInput
    from sparsebit.llm.quantizing.bit_allocation import BitAllocation, LayerBits
    from sparsebit.llm.quantizing.end_to_end import EndToEnd
    from sparsebit.llm.quantizing.quantization_run import ExpertCalibration
    from sparsebit.llm.quantizing.quantize_folder import QuantizedModel, quantize
    from sparsebit.llm.recipe import Calibration, Recipe
    from sparsebit.llm.running.compiled_generation import compiled_settings
    from sparsebit.llm.running.loading import load
    from sparsebit.llm.running.perplexity import Perplexity, perplexity
    from sparsebit.llm.running.streaming import StreamUsage, load_streamed, stream_usage
    from sparsebit.llm.running.task_evaluation import TaskScore, evaluate_tasks

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "BitAllocation",
    "Calibration",
    "ConvertedModel",
    "CpuProbe",
    "EndToEnd",
    "ExpertCalibration",
    "FinetunedModel",
    "FloatLinear",
    "FloatWeight",
    "LayerBits",
    "LoadCheck",
    "MergedModel",
    "PackedWeight",
    "Perplexity",
    "QuantLinear",
    "QuantizedModel",
    "Recipe",
    "ScaledInput",
    "StreamUsage",
    "TaskScore",
    "Tuning",
    "add_adapter",
    "cache_bytes",
    "calibration_tokens",
    "compiled_settings",
    "convert",
    "evaluate_tasks",
    "finetune",
    "kernel_paths",
    "load",
    "load_adapter",
    "load_streamed",
    "merge",
    "perplexity",
    "probe_cpu",
    "quantize",
    "recipe_for",
    "resident_bytes",
    "stream_usage",
    "token_stream",
    "windows",
]

_MODULES = {
    "caching.packed_cache": "cache_bytes",
    "converting.convert": "ConvertedModel convert",
    "converting.load_check": "LoadCheck",
    "converting.targets": "recipe_for",
    "finetuning.layers.packed_lora": "add_adapter load_adapter",
    "finetuning.merging": "MergedModel merge",
    "finetuning.training": "FinetunedModel finetune",
    "finetuning.tuning": "Tuning",
    "layers.cpu_probe": "CpuProbe probe_cpu",
    "layers.float_weight": "FloatLinear FloatWeight",
    "layers.packed_weight": "PackedWeight",
    "layers.quant_linear": "QuantLinear kernel_paths resident_bytes",
    "models.architectures": "ARCHITECTURES Architecture",
    "models.calibration_text": "calibration_tokens token_stream windows",
    "models.input_scaling": "ScaledInput",
    "quantizing.bit_allocation": "BitAllocation LayerBits",
    "quantizing.end_to_end": "EndToEnd",
    "quantizing.quantization_run": "ExpertCalibration",
    "quantizing.quantize_folder": "QuantizedModel quantize",
    "recipe": "Calibration Recipe",
    "running.compiled_generation": "compiled_settings",
    "running.loading": "load",
    "running.perplexity": "Perplexity perplexity",
    "running.streaming": "StreamUsage load_streamed stream_usage",
    "running.task_evaluation": "TaskScore evaluate_tasks",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sparsebit.llm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparsebit.llm.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
