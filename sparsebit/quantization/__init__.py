"""Quantization: post-training and quantization-aware training on torch.fx."""

from __future__ import annotations

from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import Section
from sparsebit.execution.blocks.engine import BlockData, mix, run_blocks
from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.execution.distillation import DistillationLoss
from sparsebit.execution.distributed import gather
from sparsebit.first_sparsebit import add_former_modules
from sparsebit.graph.capture import Captured, capture
from sparsebit.graph.ops.op_table import QMODULE_MAP
from sparsebit.graph.rewriting.patterns import MatchingNode, SubgraphMatcher
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.qparams import broadcast_to, qparams_from_range
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization.algorithms.registration import apply_algorithms, register_algorithm
from sparsebit.quantization.algorithms.rescaling.equalization import Equalized, equalize
from sparsebit.quantization.algorithms.rescaling.smoothing import Smoothed, smooth
from sparsebit.quantization.algorithms.rounding.batchnorm_step import tune_batchnorms
from sparsebit.quantization.algorithms.rounding.bias_correction import correct_biases
from sparsebit.quantization.algorithms.rounding.gptq import LayerRounding, gptq
from sparsebit.quantization.algorithms.rounding.reconstruction import BlockReconstruction, reconstruct
from sparsebit.quantization.building.stages import Transform, attach, make_plan, prepare, transform
from sparsebit.quantization.first_sparsebit import weights_of_first_sparsebit
from sparsebit.quantization.mixed_precision.latency import LatencySearch, search_latency
from sparsebit.quantization.mixed_precision.search import BitSearch, SiteBudget, pareto_curve, search_bits
from sparsebit.quantization.mixed_precision.sensitivity import Sensitivity, sensitivity
from sparsebit.quantization.model.freeze_schedule import FreezeSchedule
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.observers import Observer, register_observer
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.statistics import MinMax, MovingMinMax, Samples
from sparsebit.quantization.ops.quant_opr import MultipleInputsQuantOpr, QIdentity, QuantOpr
from sparsebit.quantization.ops.registration import register_qmodule
from sparsebit.quantization.placement_search import (
    MeasuredPlacement,
    PlacementProfile,
    apply_placement,
    measure_placement,
)
from sparsebit.quantization.planning.sites import Plan, Site
from sparsebit.quantization.qat.cuda_graph_step import CapturedStep as CapturedStep  # the former name of CudaGraphStep
from sparsebit.quantization.qat.cuda_graph_step import CudaGraphStep
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quantizers import Quantizer, register_quantizer

__all__ = ["QMODULE_MAP", "BitSearch", "Block", "BlockData", "BlockReconstruction", "Captured", "CudaGraphStep"]
__all__ += ["DistillationLoss", "Equalized", "FreezeSchedule", "Granularity", "Histogram", "LatencySearch"]
__all__ += ["LayerRounding", "MatchingNode", "MeasuredPlacement", "MinMax", "MovingMinMax", "MultipleInputsQuantOpr"]
__all__ += ["Observer", "PerChannel", "PerGroup", "PerTensor", "PlacementProfile", "Plan", "QIdentity", "QuantConfig"]
__all__ += ["QuantModel", "QuantOpr", "Quantizer", "ReplacePatternBase", "Samples", "Section", "Sensitivity", "Site"]
__all__ += ["SiteBudget", "Smoothed", "SubgraphMatcher", "TensorSpec", "Transform", "apply_algorithms"]
__all__ += ["apply_placement", "attach", "broadcast_to", "capture", "correct_biases", "equalize", "fake_quantize"]
__all__ += ["find_blocks", "gather", "gptq", "make_plan", "measure_placement", "mix", "pareto_curve", "parse_qconfig"]
__all__ += ["prepare", "qparams_from_range", "reconstruct", "register_algorithm", "register_observer"]
__all__ += ["register_qmodule", "register_quantizer", "run_blocks", "search_bits", "search_latency", "sensitivity"]
__all__ += ["smooth", "transform", "tune_batchnorms", "weights_of_first_sparsebit"]

add_former_modules(__name__)
