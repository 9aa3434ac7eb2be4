"""Whole residual blocks: modules that compute `x + f(x)`, so that the model still runs without them.

A module is such a block if it returns its input when all its parameters are zero: then `f` is zero. This is tested by
running it, not guessed from the code: it holds for the blocks of ResNets (`relu(x + f(x))` after another ReLU),
inverted residuals and transformer layers with norms inside the branches, and not for blocks that change the width or
the resolution. If norms follow the additions (`norm(x + f(x))`, encoders as BERT), all parameters but theirs are set to
zero, and the block becomes `norm(x)`. Each block is proved: the model with zeros in it and the model without it must
agree, for each block alone and for all of them together.

The blocks with the lowest mean scores are removed, over all blocks that share a ratio.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError, ConfigError
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.sparse.proof.probe_model import probe_of
from sparsebit.sparse.scoring.element_masks import num_pruned
from sparsebit.sparse.shrinking.skipped_block import first_tensor, skip_blocks
from sparsebit.sparse.sparse_config import SparseConfig

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ResidualBlock:
    """A module that returns its input when its parameters are zero; `parameters`: their names in the model.

    `norms`: names of inner norms that stay, and that the input passes one after the other.
    """

    name: str
    parameters: tuple[str, ...]
    norms: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (f" (becomes its norms {', '.join(self.norms)})" if self.norms else "")


@dataclass(frozen=True)
class SparedBlock:
    """A residual block that stays, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class ResidualBlocks:
    """The blocks that can be removed, in model order, and those that must stay. Printing it shows the report."""

    blocks: tuple[ResidualBlock, ...]
    spared: tuple[SparedBlock, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.blocks)} residual blocks that can be removed"]
        lines += [f"  block   {block}" for block in self.blocks]
        return "\n".join([*lines, *(f"  spared  {entry.name}: {entry.reason}" for entry in self.spared)])


@torch.no_grad()
@full_float32()
def find_residual_blocks(model: nn.Module, example_inputs: Any) -> ResidualBlocks:
    """The residual blocks of a model, each proved on the example. The model is not changed.

    If blocks are nested (a stage that only has blocks of one width), the innermost count.
    """
    call = as_call(example_inputs, model)
    call = to_device(call, next((p.device for p in model.parameters()), None))
    probe, call = probe_of(model, call)
    dense = _outputs(copy_model(probe), call)
    if dense is None:
        raise CaptureError("the model does not run on the example inputs; give other ones")
    candidates = _candidates(probe, call)
    innermost = [name for name in candidates if not any(other.startswith(f"{name}.") for other in candidates)]
    found = [_block(probe, name, candidates[name]) for name in innermost]
    blocks: list[ResidualBlock] = []
    spared: list[SparedBlock] = []
    for block in found:
        if reason := _difference(probe, call, [block], dense):
            spared.append(SparedBlock(block.name, reason))
        else:
            blocks.append(block)
    if len(blocks) > 1 and (reason := _difference(probe, call, blocks, dense)):
        spared += [SparedBlock(block.name, f"not together with the others: {reason}") for block in blocks]
        blocks = []
    return ResidualBlocks(tuple(blocks), tuple(spared))


def _block(model: nn.Module, name: str, norms: tuple[str, ...]) -> ResidualBlock:
    """With the parameters that it does not share with others, nor with its norms that stay."""
    module = model.get_submodule(name)
    elsewhere = {
        id(parameter)
        for path, other in model.named_modules(remove_duplicate=False)
        if path != name and not path.startswith(f"{name}.")
        for parameter in other._parameters.values()
    }
    staying = {id(parameter) for path in norms for parameter in module.get_submodule(path).parameters()}
    own = {id(parameter) for parameter in module.parameters()} - elsewhere - staying
    names = tuple(path for path, parameter in model.named_parameters() if id(parameter) in own)
    return ResidualBlock(name, names, norms)


def _candidates(model: nn.Module, call: Call) -> dict[str, tuple[str, ...]]:
    """Modules that are called once and, with zeros, return their input or norms of it; and which norms."""
    seen: dict[str, Call | None] = {}  # None: called again, or not a candidate
    watched = copy_model(model)
    for name, module in watched.named_modules():
        if name and next(module.parameters(), None) is not None:

            def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                x, is_first = first_tensor(args, kwargs), name not in seen
                seen[name] = None
                if not is_first or x is None or not isinstance(output, Tensor) or output.shape != x.shape:
                    return
                if not torch.equal(output, x):
                    copied = x.clone()  # later code may write into it
                    changed = {key: copied if a is x else a for key, a in kwargs.items()}
                    seen[name] = tuple(copied if a is x else a for a in args), changed

            module.register_forward_hook(note, with_kwargs=True)
    watched(*call[0], **call[1])
    found = {name: _norms_behind(model, name, call) for name, call in seen.items() if call is not None}
    return {name: norms for name, norms in found.items() if norms is not None}


def _norms_behind(model: nn.Module, name: str, call: Call) -> tuple[str, ...] | None:
    """The norms that a block with zeros elsewhere applies to its input, in order; None if it is not such a block."""
    x = first_tensor(*call)
    assert x is not None
    if _is_same(_zeroed_output(copy_model(model.get_submodule(name)), set(), call), x):
        return ()
    module = copy_model(model.get_submodule(name))
    norms = {path: part for path, part in module.named_modules() if path and _is_norm(part)}
    staying = {id(parameter) for part in norms.values() for parameter in part.parameters()}
    if not norms or all(id(parameter) in staying for parameter in module.parameters()):
        return None
    passed: list[tuple[Tensor, tuple[str, ...]]] = [(x.clone(), ())]
    for path, part in norms.items():

        def note(_: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
            before = next((chain for value, chain in passed if args and _is_same(args[0], value)), None)
            if before is not None and isinstance(output, Tensor):
                passed.append((output.clone(), (*before, path)))

        part.register_forward_hook(note)
    output = _zeroed_output(module, staying, call)
    return next((chain for value, chain in passed if _is_same(output, value)), None)


def _zeroed_output(module: nn.Module, staying: set[int], call: Call) -> Any:
    """The module's output with zeros in all parameters but these (ids); None if its code fails."""
    for parameter in module.parameters():
        if id(parameter) not in staying:
            parameter.zero_()
    try:
        return module(*call[0], **call[1])
    except Exception:  # its code looks at values
        return None


def _is_norm(part: nn.Module) -> bool:
    """Whether a module has vectors alone: norms, scales."""
    own = list(part.parameters())
    return not list(part.children()) and bool(own) and all(parameter.dim() <= 1 for parameter in own)


def _is_same(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and _agree([found], [wanted])


def _difference(model: nn.Module, call: Call, blocks: Sequence[ResidualBlock], dense: Sequence[Tensor]) -> str:
    """Why the model without these blocks differs from the one with zeros in them; empty if it does not.

    `dense`: the outputs of the whole model, for a check that they depend on the blocks. Negated inputs are run too:
    `relu(x + f(x))` returns `x` only if it is never negative, and images between 0 and 1 would hide that other inputs
    may be negative.
    """
    if not all(block.parameters for block in blocks):
        return "all its parameters are used elsewhere too"
    negated: Call = map_nested(Tensor, lambda x: -x if x.is_floating_point() else x, call)
    reason = _difference_on(model, call, blocks, dense)
    if reason or _outputs(copy_model(model), negated) is None:
        return reason
    return _difference_on(model, negated, blocks)


def _difference_on(
    model: nn.Module, call: Call, blocks: Sequence[ResidualBlock], dense: Sequence[Tensor] | None = None
) -> str:
    masked, smaller = copy_model(model), copy_model(model)
    for block in blocks:
        for name in block.parameters:
            masked.get_parameter(name).zero_()
    skip_blocks(smaller, [block.name for block in blocks], {block.name: block.norms for block in blocks})
    wanted, found = _outputs(masked, call), _outputs(smaller, call)
    if found is None:
        return "the model's code uses more of it than its output"
    if wanted is None or not _agree(found, wanted):
        return "the model returns other values without it"
    is_idle = dense is not None and _agree(found, dense, 1e-12)
    return "the model does not depend on it" if is_idle else ""


def _outputs(model: nn.Module, call: Call) -> list[Tensor] | None:
    """The model's outputs; None if it fails."""
    try:
        found = [x for x in tensors_of(model(*call[0], **call[1])) if x.is_floating_point()]
    except Exception:
        return None
    return found if all(bool(torch.isfinite(x).all()) for x in found) else None


def _agree(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = _TOLERANCE) -> bool:
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return False
    return all(
        float((one - other).abs().max()) <= tolerance * max(1.0, float(other.abs().max()))
        for one, other in zip(found, wanted, strict=True)
        if other.numel()
    )


# --- which of them are removed


def select_blocks(
    blocks: Sequence[ResidualBlock],
    scores: Mapping[str, Tensor],
    config: SparseConfig,
    share: float,
    gone: frozenset[str] = frozenset(),
) -> list[ResidualBlock]:
    """The blocks that are removed in this step: `share` of the ratio, among all blocks with the same ratio.

    `scores`: of parameters, by name. A name in `SPARE` or `SPECIFIC` is that of the block or of a layer in it. `gone`:
    names of the blocks that were removed before; they are chosen first, so that steps of a schedule only add.
    """
    sets: defaultdict[tuple[bool, float], list[ResidualBlock]] = defaultdict(list)
    for block in blocks:
        names = (block.name, *sorted({name.rpartition(".")[0] for name in block.parameters}))
        if ratio := config.ratio_of(names):
            sets[config.is_overridden(names), ratio].append(block)
    dead = []
    for (_, ratio), members in sets.items():
        found = [
            -math.inf if block.name in gone else block_score(block, scores, config.SPARSER.STRATEGY)
            for block in members
        ]
        order = torch.tensor(found, dtype=torch.float64).sort(stable=True).indices.tolist()
        dead += [members[place] for place in order[: num_pruned(share * ratio, len(members))]]
    return dead


def mask_blocks(masks: Mapping[str, Tensor], dead: Sequence[ResidualBlock]) -> None:
    """Set the masks, in place: False in all parameters of these blocks, and in no other."""
    names = {name for block in dead for name in block.parameters}
    for name, mask in masks.items():
        mask.fill_(name not in names)


def block_score(block: ResidualBlock, scores: Mapping[str, Tensor], strategy: str) -> float:
    """The mean of the scores of a block's weights, of all that the criterion judges."""
    judged = [scores[name].double() for name in block.parameters if name in scores]
    if not judged:
        hint = "choose another one, or spare the block with SPARE"
        raise ConfigError(f"SPARSER.STRATEGY={strategy} judges no parameter of the block {block.name}; {hint}")
    return sum(float(score.sum()) for score in judged) / sum(score.numel() for score in judged)
