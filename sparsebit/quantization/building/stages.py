"""The stages of building a quantized model, each a function: capture, prepare, transform, plan, attach.

`QuantModel` runs them in this order; a tool can call one of them separately:

    captured = capture(model, example=((x,), {}))
    prepare(captured, folds_batchnorm=True)
    transform(captured, [my_equalization])
    plan, placement = make_plan(captured, config)
    attach(captured, plan, placement)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import fx

from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CaptureError, SparsebitError
from sparsebit.graph.capture import Captured, capture
from sparsebit.graph.passes.fold_batchnorm import fold_batchnorm
from sparsebit.graph.passes.fold_scales import fold_scales
from sparsebit.graph.passes.functional_layers import lift_functional_layers, lift_functional_norms
from sparsebit.graph.passes.functionalize import functionalize
from sparsebit.graph.passes.merge_branches import merge_branches
from sparsebit.graph.passes.simplify import simplify
from sparsebit.graph.region import Region
from sparsebit.graph.values.failures import report_own_fault
from sparsebit.quantization.building.attach_integer_ops import attach_integer_ops
from sparsebit.quantization.building.attach_parameter_quantizers import attach_parameter_quantizers
from sparsebit.quantization.building.attach_quantizers import attach_quantizers
from sparsebit.quantization.planning.placement import Placement
from sparsebit.quantization.planning.plan import make_plan
from sparsebit.quantization.planning.sites import Plan

__all__ = ["Transform", "attach", "capture", "make_plan", "prepare", "transform"]

# Rewrites a float graph in place, before the plan is made; what the graph computes stays the same.
Transform: TypeAlias = Callable[[fx.GraphModule], object]


def prepare(
    captured: Captured, *, folds_batchnorm: bool, merges_branches: bool = False, folds_scales: bool = False
) -> dict[str, str]:
    """Bring every graph into the form that plans are made for, in place.

    Returns the graphs (by path) that cannot be prepared, with the reason: their modules must run their own code.
    """
    wanted = {fold_batchnorm: folds_batchnorm, merge_branches: merges_branches, fold_scales: folds_scales}
    passes = [step for step, is_wanted in wanted.items() if is_wanted]
    reasons = {path: _why_not_prepared(region, passes) for path, region in captured.regions.items()}
    return {path: reason for path, reason in reasons.items() if reason}


def transform(captured: Captured, transforms: Sequence[Transform]) -> None:
    """Apply the transforms, in order, to every graph."""
    for step in transforms:
        for path, region in captured.regions.items():
            region.graph_module.settle()
            try:
                step(region.graph_module)
                region.graph_module.graph.lint()
            except SparsebitError:
                raise
            except Exception as error:
                where = f"the graph of {path}" if path else "the model's graph"
                raise CaptureError(f"the transform {name_of(step)} fails on {where}: {error!r}") from error
            region.graph_module.recompile()


def name_of(step: Transform) -> str:
    return str(getattr(step, "__qualname__", type(step).__qualname__))


def attach(
    captured: Captured, plan: Plan, placement: Placement, *, example: Any = None, given: Plan | None = None
) -> Plan:
    """Insert the plan's quantizers into the captured model, in place; returns the completed plan.

    `given`: a plan of the user. Parameters that no op owns are only found here; their sites come from it, too.
    The order matters: the integer arithmetic needs the quantizers of inputs, weights and outputs in their places.
    """
    attach_quantizers(captured, plan, placement)
    for region in captured.regions.values():
        region.graph_module.keep_uncalled()
    plan = attach_parameter_quantizers(captured, plan, example, given)
    attach_integer_ops(captured, PROFILES[plan.config.BACKEND])
    return plan


def _why_not_prepared(region: Region, passes: Sequence[Transform]) -> str:
    """Run the passes that every graph needs, then the optional ones; returns why they fail, or an empty string."""
    root = region.graph_module
    try:
        functionalize(root)
        simplify(root)
        lift_functional_norms(root, region.source)
        lift_functional_layers(root)
        for step in passes:
            step(root)
    except Exception as error:
        report_own_fault(error)
        return f"its graph cannot be prepared: {type(error).__name__}: {error}"
    for node in root.graph.nodes:
        node.meta.pop("example", None)  # fake tensors, which are not needed any more
    return ""
