"""Ways to run a model other than on the example in eval mode: training, other batch sizes, other shapes.

Code may take another path there (`if x.shape[0] == 1:`, `if self.training:`), and the smaller model must equal the
masked one on it too. Only outputs are compared, not inner values. Random operators return constants, because a smaller
model would draw other numbers for the same places.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.execution.batches import Call
from sparsebit.execution.sample_rows import SampleRows, find_sample_rows
from sparsebit.graph.checking.outcome import seed_generators, undisturbed_randomness
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.sparse.channels.returned import results_of
from sparsebit.sparse.channels.trace import plain_operators
from sparsebit.sparse.proof.code_forks import Arm, ForkedFunction, Observe, forks_run
from sparsebit.sparse.proof.no_side_effects import no_side_effects

TRAINING = "in training mode"
Atom = tuple[str, int, int]  # tensor, dimension, position


class Trial(NamedTuple):
    """The observations of one run: the taken arms, the shapes of its outputs, and the names of the called modules."""

    taken: set[Arm]
    shapes: tuple[tuple[int, ...], ...]
    called: frozenset[str]


@dataclass(frozen=True)
class Scene:
    """A call and a mode. `arms`: branches of `functions` that are forced.

    `swap`: a container of modules, and two of its items, which change places. `output_atoms`: for each dimension of
    each output, the channels that it holds: a forced branch may return hidden values, which then lose channels.
    """

    name: str
    call: Call
    is_training: bool = False
    arms: frozenset[Arm] = frozenset()
    functions: Sequence[ForkedFunction] = field(default=(), repr=False, compare=False)
    output_atoms: tuple[tuple[tuple[Atom | None, ...] | None, ...], ...] = field(default=(), repr=False, compare=False)
    swap: tuple[str, str, str] | None = None

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """The tensors that the model returns in this scene."""
        return self.run(model)[0]

    def run(self, model: nn.Module, observe: Observe | None = None) -> tuple[list[Tensor], set[Arm]]:
        """The outputs, and the arms that were taken. Training runs with gradients on, as it does in use."""
        args, kwargs = map_nested(Tensor, torch.clone, self.call)  # a model may write into its inputs
        with self.entered(model, observe) as taken, plain_operators(with_grad=self.is_training):
            return [tensor.detach() for tensor in results_of(model, args, kwargs)], taken

    @contextlib.contextmanager
    def entered(self, model: nn.Module, observe: Observe | None = None) -> Iterator[set[Arm]]:
        """Sets the model's mode, constants for random numbers, and the forced arms; yields the arms that are taken."""
        model.train(self.is_training)
        changed = contextlib.nullcontext() if self.swap is None else _swapped(model, *self.swap)
        with warnings.catch_warnings(), changed, forks_run(self.functions, self.arms, observe) as taken:
            warnings.simplefilter("ignore")
            with _same_draws(), _constants(), no_side_effects() if self.arms else contextlib.nullcontext():
                yield taken

    def trial(self, model: nn.Module) -> Trial | None:
        """One run on a copy of the model; None if the model does not run here.

        Outputs that are not finite cannot be compared. A forced branch that writes into parameters is not run again,
        because the code around it decides when such a write may happen.
        """
        copied = copy_model(model, share_parameters=not self.arms)
        called: set[nn.Module] = set()
        try:
            with hooked([register_module_forward_pre_hook(lambda module, _: called.add(module))]):
                found, taken = self.run(copied)
        except Exception:
            return None
        is_finite = all(bool(torch.isfinite(x).all()) for x in found if x.is_floating_point())
        is_good = is_finite and (not self.arms or _same_parameters(model, copied))
        names = frozenset(path for path, one in copied.named_modules(remove_duplicate=False) if one in called)
        return Trial(taken, tuple(tuple(x.shape) for x in found), names) if is_good else None


@contextlib.contextmanager
def _swapped(model: nn.Module, path: str, one: str, other: str) -> Iterator[None]:
    items = model.get_submodule(path)._modules
    items[one], items[other] = items[other], items[one]
    try:
        yield
    finally:
        items[one], items[other] = items[other], items[one]


def _same_parameters(one: nn.Module, other: nn.Module) -> bool:
    mine, others = list(one.parameters()), list(other.parameters())
    return len(mine) == len(others) and all(map(torch.equal, mine, others))


def natural_scenes(model: nn.Module, call: Call) -> list[Scene]:
    """The scenes in which the model runs. The example itself, in eval mode, is not one of them."""
    found = [Scene(TRAINING, call, is_training=True)]

    def run(*args: Any, **kwargs: Any) -> Any:
        return copy_model(model).eval()(*args, **kwargs)  # what a run changes in the model must not reach the next one

    try:
        rows = find_sample_rows(call, run)
    except Exception:
        rows = SampleRows(1, ())
    three = call
    if any(rows.has_rows):
        found.append(Scene("for a batch of 1", rows.of(call, [0])))
        # Three samples: another number than the two of the example and the one above.
        three = rows.of(call, [place % rows.count for place in range(3)])
    scenes = [scene for scene in found if scene.trial(model) is not None]
    for sizes, resized in _other_sizes(call, three):
        scene = Scene(f"for inputs of {sizes}", resized)
        if scene.trial(model) is not None:
            return [*scenes, scene]
    odd = Scene("for a batch of 3", three)
    return [*scenes, odd] if three is not call and odd.trial(model) is not None else scenes


def _other_sizes(call: Call, three: Call) -> Iterator[tuple[str, Call]]:
    """The call with other spatial sizes or lengths, first with three samples."""
    shapes = [tuple(x.shape) for x in tensors_of(call)]
    rank = max((len(shape) for shape in shapes), default=0)
    ways: list[Callable[[int, int], bool]] = []
    if rank > 3:
        ways.append(lambda dims, dim: dims == rank and dim > 1)  # images
    elif rank:
        ways.append(lambda dims, dim: dim == 1 and dims > 1)  # sequences
        ways.append(lambda dims, dim: dim == 2)  # signals
    for change in ((5, 4), (3, 4)) if rank > 3 else ((3, 4),):
        for is_resized in ways:
            for one in (three, call):

                def resized(x: Tensor, is_resized: Any = is_resized, change: Any = change) -> Tensor:
                    for dim in range(x.dim()):
                        if is_resized(x.dim(), dim):
                            # `dim == 2` adds one row, so that a square image gets unequal sides.
                            size = max(1, x.shape[dim] * change[0] // change[1] + (dim == 2))
                            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
                    return x

                other: Call = map_nested(Tensor, resized, one)
                found = [tuple(x.shape) for x in tensors_of(other)]
                if found != [tuple(x.shape) for x in tensors_of(one)]:
                    yield ", ".join("x".join(map(str, shape)) for shape in found[:2]), other


class _Constants(TorchDispatchMode):
    """Random operators return constants: a smaller model would draw other numbers at the same places."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(op._schema.name).removeprefix("aten::")
        if name in ("native_dropout", "_fused_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):
            return op(*args[:4], False, *args[5:], **kwargs)
        result = op(*args, **kwargs)
        if name in _RANDOM and isinstance(result, Tensor):
            result.fill_(1 if name.startswith("bernoulli") else 0.5)
        return result


def _constants() -> TorchDispatchMode:
    mode: TorchDispatchMode = _Constants()  # type: ignore[no-untyped-call]
    return mode


_RANDOM = frozenset((
    "bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "uniform", "uniform_", "normal", "normal_",
    "normal_functional", "exponential_", "exponential", "log_normal_", "cauchy_",
))  # fmt: skip


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Draws from random generators are the same in every run; afterwards the generators continue as if unused."""
    with undisturbed_randomness():
        random.seed(0)
        seed_generators(0)
        yield
