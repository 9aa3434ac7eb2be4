"""`find_paths`: the branches in a model's code that no ordinary run takes, and the scenes that are forced into them.

Where the model runs through a forced branch, the smaller model can be compared with the masked one on it. A branch that
cannot be run (it needs an argument that the example lacks) is returned, so that its code can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from sparsebit.execution.batches import Call
from sparsebit.sparse.channels.labels import Axes, LabelSets
from sparsebit.sparse.proof.branch_runs import Branch, BranchRuns, atoms_of, innermost
from sparsebit.sparse.proof.code_forks import ENTRY, definition_of
from sparsebit.sparse.proof.scenes import Atom, Scene
from sparsebit.sparse.proof.width_reads import may_count, numbers_read

_COUNTING_MODULES = (
    nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm,
    nn.CosineSimilarity, nn.PairwiseDistance, nn.GLU, nn.ChannelShuffle, nn.PixelShuffle, nn.Unflatten,
)  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """`scenes`: forced into branches that no ordinary run takes. `unrun`: branches that could not be run.

    `counted`: channels whose number is used in a branch that could not be run, with the reason. `unread`: functions
    whose branches are not known, since their source cannot be read. `uncalled`: modules without parameters that no run
    calls, and that may count channels.
    """

    scenes: tuple[Scene, ...] = ()
    unrun: tuple[Branch, ...] = ()
    counted: Mapping[Atom, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """Text for the user on the parts that are not proved."""
        if self.unrun:
            yield (
                f"not proved on {len(self.unrun)} branches of the code that the example cannot run: "
                f"{_listed(map(str, self.unrun))}; compare on your data after shrink()"
            )
        if self.unread:
            yield f"not proved on other paths of {_listed(self.unread)}: the source cannot be read"
        if self.uncalled:
            yield f"not proved where {_listed(self.uncalled)} runs: the example does not call it"


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def find_paths(model: nn.Module, call: Call, scenes: Sequence[Scene]) -> Paths:
    """The branches that neither the example nor one of the scenes takes."""
    runs = BranchRuns(model)
    for scene in (Scene("", call), *scenes):
        runs.visit(scene)
    runs.force()
    functions = tuple(runs.functions)
    found = tuple(replace(scene, functions=functions) for scene in runs.forced)
    unrun = tuple(runs.unrun())
    return Paths(found, unrun, _counted(unrun, runs), tuple(sorted(runs.unread)), tuple(_uncalled(model, runs.called)))


def _uncalled(model: nn.Module, called: Collection[str]) -> Iterator[str]:
    """The modules that no run called (`self.norms[i](h)`), that have no parameters and may count channels."""
    for path, module in model.named_modules():
        if path in called or any(True for _ in module.children()) or any(True for _ in module.parameters()):
            continue
        kind = type(module)
        function = innermost(vars(kind).get("forward"))
        if kind.__module__.startswith("torch.nn."):
            if isinstance(module, _COUNTING_MODULES):
                yield path
        elif function is None or (found := definition_of(function)) is None or may_count([found]):
            yield path


def _counted(branches: Sequence[Branch], runs: BranchRuns) -> dict[Atom, str]:
    """The channels whose number these branches use, by reading their code."""
    found: dict[Atom, str] = {}
    for branch in branches:
        held = _held_before(branch, runs)
        for name, dim in numbers_read(branch.code, branch.function.tree):
            atoms = atoms_of(*held[name]) if name in held else ()
            dims = range(len(atoms)) if dim is None else [dim] if -len(atoms) <= dim < len(atoms) else []
            for place in dims:
                reason = f"{branch}, which the example cannot run, uses their number"
                found |= {atom: reason for atom in atoms[place] or () if atom is not None}
    return found


def _held_before(branch: Branch, runs: BranchRuns) -> dict[str, tuple[LabelSets, Axes]]:
    """The values of variables at the fork; if it was never reached, at all forks of the function before it."""
    found: dict[str, tuple[LabelSets, Axes]] = {}
    for number in range(ENTRY, branch.arm.fork + 1):
        found |= runs.held.get((branch.function.number, number), {})
    return found
