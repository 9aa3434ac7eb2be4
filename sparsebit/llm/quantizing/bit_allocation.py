"""Which layer gets how many bits: the exact integer program over the cost of each number of bits in each layer.

Costs are estimated from one forward and one backward pass, block by block. An error `E` of a layer's weight changes
its output by `E x`. To second order the loss of a token rises by `1/2 (g . E x)^2` in the mean, with `g` the loss's
gradient at the output (the empirical Fisher information). With `g` and `x` taken as independent of each other, and
outputs of one another, that is

    1/2 sum_r mean(g_r^2) (E H E^T)_rr,   H = mean(x x^T),

the loss of rounding in GPTQ, each row weighted by its gradients. It compares layers in one unit, nats.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, MissingExtraError
from sparsebit.llm.models.architectures import Stages, linears
from sparsebit.llm.models.calibration_batches import IDS, num_tokens
from sparsebit.llm.models.separate_experts import experts_prefixes
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.rounding import row_losses
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.choices.integer_program import Budget, choose
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.progress import track


@dataclass(frozen=True)
class LayerBits:
    """`costs`: the estimated rise of the loss of a token (in nats), by number of bits."""

    bits: int
    num_weights: int
    costs: Mapping[int, float]


@dataclass(frozen=True)
class BitAllocation:
    """The bits of each layer by its name in the model.

    `limit`: the allowed average number of bits; scales and zero points are not included.
    """

    layers: Mapping[str, LayerBits]
    limit: float

    @property
    def average_bits(self) -> float:
        """Bits of a weight, without scales and zero points."""
        total = sum(layer.num_weights for layer in self.layers.values())
        return sum(layer.bits * layer.num_weights for layer in self.layers.values()) / total

    @property
    def cost(self) -> float:
        """The estimated rise of the loss of a token, in nats."""
        return sum(layer.costs[layer.bits] for layer in self.layers.values())

    def to_json(self) -> str:
        """The text of `bit_allocation.json` in the model's folder."""
        record = {"average_bits": self.average_bits, "limit": self.limit, "cost": self.cost}
        return json.dumps(record | {"layers": {name: asdict(layer) for name, layer in self.layers.items()}}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> BitAllocation:
        try:
            found = json.loads(text)
            layers = {str(name): _layer(layer) for name, layer in found["layers"].items()}
            return cls(layers, float(found["limit"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged ({error!r}); remove its folder to begin anew") from None


def allocate(
    costs: Mapping[str, Mapping[int, float]],
    num_weights: Mapping[str, int],
    fused: Iterable[Sequence[str]],
    average_bits: float,
) -> BitAllocation:
    """The bits with the smallest sum of `costs[layer][bits]` within `average_bits`, equal for `fused` layers."""
    bits = sorted(next(iter(costs.values())))
    spent = {name: [float(b * num_weights[name]) for b in bits] for name in costs}
    limit = average_bits * sum(num_weights[name] for name in costs)
    rows = {name: [row[b] for b in bits] for name, row in costs.items()}
    choice = choose(rows, [Budget("average bits", limit, spent)], ties=fused)
    layers = {name: LayerBits(bits[choice.options[name]], num_weights[name], costs[name]) for name in costs}
    return BitAllocation(layers, average_bits)


def need_solver() -> None:
    """Raise before the work if the solver is missing."""
    if find_spec("scipy") is None:
        raise MissingExtraError("scipy", "llm", "choosing the bits of each layer")


def _layer(record: Mapping[str, Any]) -> LayerBits:
    costs = {int(bits): float(cost) for bits, cost in record["costs"].items()}
    return LayerBits(int(record["bits"]), int(record["num_weights"]), costs)


# Number of windows of the calibration text: the backward pass takes several times as long as one forward.
NUM_SAMPLES = 16


@dataclass(frozen=True)
class BitCosts:
    """`costs[layer][bits]`; `fused`: layers that must have the same number of bits."""

    costs: Mapping[str, Mapping[int, float]]
    num_weights: Mapping[str, int]
    fused: Sequence[Sequence[str]]


def bit_costs(walk: BlockWalk, recipe: Recipe, paths: Sequence[str]) -> BitCosts:
    """The costs of the recipe's candidates at the layers of the blocks at `paths`; `walk` has not started yet."""
    inner = _TwoPasses(walk, recipe, paths)
    inner.forward()
    inner.tail()
    for number in track(range(len(paths) - 1, -1, -1), "costs of bits"):
        inner.backward(number)
    order = [f"{path}.{name}" for path in paths for name in inner.names[path]]
    fused = [*inner.fused, tuple(inner.of_experts)] if inner.of_experts else inner.fused
    return BitCosts({name: inner.costs[name] for name in order}, inner.num_weights, fused)


class _TwoPasses:
    """The store of the walk contains the input of every block during the forward, then the gradient of its output."""

    def __init__(self, walk: BlockWalk, recipe: Recipe, paths: Sequence[str]) -> None:
        self.walk, self.recipe, self.paths, self.skeleton = walk, recipe, paths, walk.skeleton
        self.stages: dict[str, Stages] = {}
        self.names: dict[str, list[str]] = {}
        self.costs: dict[str, dict[int, float]] = {}
        self.num_weights: dict[str, int] = {}
        self.fused: list[tuple[str, ...]] = []
        self.of_experts: list[str] = []  # transformers reads one number format for all of them
        self.num_tokens = num_tokens(walk.batches)

    @torch.no_grad()
    def forward(self) -> None:
        self.walk.start()
        store = self.walk.store
        for number, path in enumerate(self.paths):
            block = self.skeleton.fill(path)
            stages = self.walk.stages(block)
            self.stages[path], self.names[path] = stages, [name for stage in stages for name in stage]
            inside = experts_prefixes(block)
            self.of_experts += [f"{path}.{name}" for name in self.names[path] if name.startswith(inside)]
            groups = [group for group in self.walk.architecture.fused_groups(stages) if not group[0].startswith(inside)]
            self.fused += [tuple(f"{path}.{name}" for name in group) for group in groups]
            for index in range(len(self.walk.batches)):
                hidden = store.get(("changed", number, index))
                store.put(("cost", number, index), hidden)
                if number + 1 == len(self.paths):
                    store.put(("last", index), self.walk.run(block, number, index, hidden))
            self.walk.advance(block, stages)
            self._forget(path)

    def tail(self) -> None:
        """The gradients at the output of the last block."""
        self.walk.fill_outside(with_head=True)
        for index, batch in enumerate(self.walk.batches):
            tokens = batch[IDS].to(self.skeleton.device)
            hidden = self.walk.store.get(("last", index)).detach().requires_grad_()
            with torch.enable_grad():
                logits = self.walk.behind_blocks(tokens, hidden)[:, :-1].float()
                F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
            self.walk.store.drop(("last", index))
            self.walk.store.put(("gradient", index), hidden.grad)
        self.skeleton.empty("")

    def backward(self, number: int) -> None:
        path, store = self.paths[number], self.walk.store
        block = self.skeleton.fill(path)
        modules = linears(block)
        seen = _Seen(modules, self.stages[path])
        with seen.hooks:
            for index in range(len(self.walk.batches)):
                hidden = store.get(("cost", number, index)).detach().requires_grad_()
                with torch.enable_grad():
                    self.walk.run(block, number, index, hidden).backward(store.get(("gradient", index)))
                store.drop(("cost", number, index))
                store.put(("gradient", index), hidden.grad)
        for stage in self.stages[path]:
            for name in stage:
                self._cost(path, name, modules[name].weight, seen.moments[stage[0]], seen.squares[name])
        self._forget(path)

    def _cost(self, path: str, name: str, weight: Tensor, moments: InputMoments, squares: Tensor) -> None:
        full = f"{path}.{name}"
        stored = self.skeleton.stored_type(f"{full}.weight")
        # Without sweeps, to save time: the costs only need to rank layers and bits.
        quick = replace(self.recipe, sweeps=0) if self.recipe.uses_gptq else self.recipe
        self.num_weights[full] = weight.numel()
        if not moments.num_rows:  # an expert that no token reached
            self.costs[full] = dict.fromkeys(self.recipe.candidate_bits, 0.0)
            return
        mean = squares / self.num_tokens  # an expert that few tokens reach changes the loss of few
        self.costs[full] = {
            bits: 0.5 * float((mean * row_losses(weight, moments, quick.with_bits(bits), full, stored=stored)).sum())
            for bits in self.recipe.candidate_bits
        }

    def _forget(self, path: str) -> None:
        self.skeleton.empty(path)
        self.skeleton.folder.close()


class _Seen:
    """Moments of each stage's input, and the sums of squares of the gradients at each layer's outputs."""

    def __init__(self, modules: Mapping[str, nn.Linear], stages: Stages) -> None:
        self.moments = {stage[0]: InputMoments() for stage in stages}
        self.squares = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in modules.items()}
        self.hooks = contextlib.ExitStack()
        for name, layer in modules.items():
            self.hooks.enter_context(layer.register_forward_hook(functools.partial(self._note, name)))

    def _note(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if name in self.moments:
            self.moments[name].add(args[0].detach().reshape(-1, args[0].shape[-1]))
        output.register_hook(lambda gradient: self._add(name, gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        self.squares[name] += gradient.reshape(-1, gradient.shape[-1]).square().sum(0).double().cpu()
