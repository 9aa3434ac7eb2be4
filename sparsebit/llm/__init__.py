"""Language models with weights of 2 to 8 bits: quantized block by block, kept packed, measured packed."""

from __future__ import annotations

from sparsebit.llm.architectures import ARCHITECTURES, Architecture
from sparsebit.llm.bit_allocation import BitAllocation, LayerBits
from sparsebit.llm.calibration_text import calibration_tokens, token_stream, windows
from sparsebit.llm.compiled_generation import compiled_settings
from sparsebit.llm.converting import ConvertedModel, convert
from sparsebit.llm.cpu_probe import CpuProbe, probe_cpu
from sparsebit.llm.finetuning.merging import MergedModel, merge
from sparsebit.llm.finetuning.packed_lora import add_adapter, load_adapter
from sparsebit.llm.finetuning.training import FinetunedModel, finetune
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.float_linear import FloatLinear
from sparsebit.llm.float_weight import FloatWeight
from sparsebit.llm.input_scaling import ScaledInput
from sparsebit.llm.load_check import LoadCheck
from sparsebit.llm.loading import load
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.llm.perplexity import Perplexity, perplexity
from sparsebit.llm.quant_linear import QuantLinear, kernel_paths, resident_bytes
from sparsebit.llm.quantization_run import ExpertCalibration
from sparsebit.llm.quantizing import Calibration, QuantizedModel, quantize
from sparsebit.llm.recipe import Recipe
from sparsebit.llm.streaming import StreamUsage, load_streamed, stream_usage
from sparsebit.llm.task_evaluation import TaskScore, evaluate_tasks

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "BitAllocation",
    "Calibration",
    "ConvertedModel",
    "CpuProbe",
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
    "resident_bytes",
    "stream_usage",
    "token_stream",
    "windows",
]
