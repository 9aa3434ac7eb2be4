"""The integers of a simulation: the codes of its activation sites, and the kernels that it computes in integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.deploy.comparing.bit_exactness import SimulatedKernels
from sparsebit.execution.batches import Call
from sparsebit.graph.values.nested import map_nested
from sparsebit.quantization.calibrating.model_state import evaluating
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerMultiply
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer


@torch.no_grad()
def simulated_codes(qmodel: SimulatedModel, call: Call) -> tuple[dict[str, Any], SimulatedKernels]:
    """Every activation site's integers in the simulation, and which sites its integer kernels round to.

    For a site that runs several times, the integers of its first run.
    """
    found: dict[str, Any] = {}
    sums: dict[str, bool] = {}

    def note(quantizer: Quantizer, _: Any, output: Any) -> None:
        spec = quantizer.spec
        if isinstance(output, Tensor) and spec.granularity.kind == "tensor" and quantizer.name not in found:
            scale, zero_point = quantizer.qparams()
            codes = torch.round(output / scale) + zero_point.round()
            found[quantizer.name] = codes.to(torch.int32).cpu().numpy()

    def note_sum(kernel: IntegerAdd, inputs: tuple[Any, ...], _: Any) -> None:
        left, right = inputs
        name = kernel.sources[2].name  # a broadcasting addition is not computed in the kernel's steps
        sums[name] = sums.get(name, True) and kernel.is_active and left.shape == right.shape

    quantizers = [q for q in qmodel.quantizers() if q.target == "activation" and q.is_enable]
    handles = [quantizer.register_forward_hook(note) for quantizer in quantizers]
    modules = list(qmodel.modules())
    handles += [module.register_forward_hook(note_sum) for module in modules if isinstance(module, IntegerAdd)]
    try:
        args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
        with evaluating(qmodel):
            qmodel(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    layers: dict[str, frozenset[str | None]] = {}
    for module in modules:
        if isinstance(module, (WeightedQuantOpr, FunctionalWeightedQuantOpr)):
            kernels = [integer for _, integer in module.arithmetics if integer is not None]
            active = [kernel.sources for kernel in kernels if all(q.is_enable for q in kernel.sources)]
            if active:
                ends = frozenset(sources[2].name if len(sources) > 2 else None for sources in active)
                layers[module.weight_quantizer.name] = ends
    products = frozenset(module.sources[2].name for module in modules if isinstance(module, IntegerMultiply))
    return found, SimulatedKernels(layers, frozenset(name for name, is_exact in sums.items() if is_exact), products)
