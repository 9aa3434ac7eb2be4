"""`cut`: captures a model again, with the smallest modules whose graphs are wrong running their own code.

`proof.py` and `gradient_check.py` call it when a copy differs from the model's own code. The faulty modules are found
by capturing every module with code on its own and comparing it on the inputs that it gets in the original
(`Reference.smallest_differing`). They are noted in the blueprint's policy, so that no later capture tries them again.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

from torch import nn

from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import Buffers, Randomness, buffers_of, cloned
from sparsebit.graph.checking.verification import Compare, Reference
from sparsebit.graph.nodes.absorbed import Absorbed
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.values.call_form import CallForm, call_form, has_forward
from sparsebit.quantization.building.build import Blueprint
from sparsebit.quantization.faithful.simulation import SimulatedModel, code_modules

log = logging.getLogger(__name__)

# How often a model is captured again, each time with fewer graphs, before a difference is only reported.
ATTEMPTS = 12


@dataclass(frozen=True)
class Difference:
    """A copy's difference (`found`) from the model's own code on a call, and what is needed to locate it."""

    qmodel: SimulatedModel
    call: Call
    found: str
    reference: Reference
    randomness: Randomness
    compare: Compare | None = None

    def by_module(self) -> dict[str, str]:
        """The smallest modules that differ, and how."""

        def build(path: str, module: nn.Module, call: Call) -> tuple[nn.Module, Buffers]:
            part = captured_part(self.qmodel, path, module, call)
            return part, buffers_of(part.source, module)

        paths = _with_code(self.qmodel.original, self.qmodel.blueprint.policy)
        call, search = cloned(self.call), self.reference.smallest_differing
        return search(call, paths, build, self.randomness, compare=self.compare) or {"": self.found}


def cut(difference: Difference) -> None:
    """Capture again, with the smallest modules that differ running their own code.

    If such a module already does, the modules inside it run their own code too; after that it is left in float.
    """
    qmodel, policy = difference.qmodel, difference.qmodel.blueprint.policy
    for path, why in difference.by_module().items():
        log.warning("%s runs its own code: its graph computes something else: %s", path or "the model", why)
        reason = f"its graph computes something else than its code: {why}"
        inside = [name for name in _with_code(qmodel.original, policy, path) if name not in policy.own_code]
        for name in inside if path in policy.own_code and inside else [path]:
            policy = policy.cut(name, reason)
    qmodel.blueprint.policy = policy
    qmodel.rebuild(difference.call if qmodel.built.example is not None else None)


def captured_part(qmodel: SimulatedModel, path: str, module: nn.Module, call: Call) -> SimulatedModel:
    """A copy of one module of the original, captured with quantizers as in the whole model; they are off."""
    example, form = (call, None) if qmodel.built.example is not None else (None, call_form(module, *call))
    return captured_copy(qmodel, path, module, example, form)


def captured_copy(
    qmodel: SimulatedModel, path: str, module: nn.Module, example: Call | None, form: CallForm | None
) -> SimulatedModel:
    """`module`, which is at `path` in the original, captured as the whole model was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user is warned when the whole is built
        transforms = () if path else qmodel.blueprint.transforms  # written for the graph of the whole model
        policy = qmodel.blueprint.policy.below(path, module)
        blueprint = Blueprint.of(module, qmodel.config, policy, transforms=transforms)
        part = SimulatedModel.built_from(blueprint, example, form)
    return part.to(qmodel.device).train(qmodel.training)


def has_one_mode(qmodel: SimulatedModel) -> bool:
    """Whether the copy's train mode differs from the original's by design: folded norms, captured eval branches."""
    is_folded = any(isinstance(module, Absorbed) for module in code_modules(qmodel))
    return is_folded or bool(qmodel.built.captured.eval_branches)


def _with_code(model: nn.Module, policy: LeafPolicy, path: str = "") -> list[str]:
    """The paths, from `path` down, of modules whose own code can run instead of a graph: all except leaves."""
    modules = model.get_submodule(path).named_modules(prefix=path)
    return [name for name, module in modules if has_forward(module) and not policy.is_leaf(module, name)]
