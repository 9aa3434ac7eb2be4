"""The cost of each number of bits in each layer, estimated from one forward and one backward pass, block by block.

An error `E` of a layer's weight changes its output by `E x`. To second order the loss of a token rises by
`1/2 (g . E x)^2` in the mean, with `g` the loss's gradient at the output (the empirical Fisher information). With `g`
and `x` taken as independent of each other, and outputs of one another, that is

    1/2 sum_r mean(g_r^2) (E H E^T)_rr,   H = mean(x x^T),

the loss of rounding in GPTQ, each row weighted by its gradients. It compares layers in one unit, nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.llm.models.architectures import Stages, linears
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.rounding import row_losses
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.progress import track

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
        self.num_tokens = sum(batch.numel() for batch in walk.batches)

    @torch.no_grad()
    def forward(self) -> None:
        self.walk.start()
        store = self.walk.store
        for number, path in enumerate(self.paths):
            block = self.skeleton.fill(path)
            stages = self.walk.stages(block)
            self.stages[path], self.names[path] = stages, [name for stage in stages for name in stage]
            inside = tuple(f"{name}." for name in experts_in(block))
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
            tokens = batch.to(self.skeleton.device)
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
        try:
            for index in range(len(self.walk.batches)):
                hidden = store.get(("cost", number, index)).detach().requires_grad_()
                with torch.enable_grad():
                    self.walk.run(block, number, index, hidden).backward(store.get(("gradient", index)))
                store.drop(("cost", number, index))
                store.put(("gradient", index), hidden.grad)
        finally:
            seen.close()
        for stage in self.stages[path]:
            for name in stage:
                self._cost(path, name, modules[name].weight, seen.moments[stage[0]], seen.squares[name])
        self._forget(path)

    def _cost(self, path: str, name: str, weight: Tensor, moments: InputMoments, squares: Tensor) -> None:
        full = f"{path}.{name}"
        stored = self.skeleton.stored_type(f"{full}.weight")
        # Without sweeps, to save time: the costs only need to rank layers and bits.
        quick = replace(self.recipe, sweeps=0) if self.recipe.method == "gptq" else self.recipe
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
        self._hooks = [
            layer.register_forward_hook(lambda _, args, output, name=name: self._note(name, args[0], output))
            for name, layer in modules.items()
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, x: Tensor, output: Tensor) -> None:
        if name in self.moments:
            self.moments[name].add(x.detach().reshape(-1, x.shape[-1]))
        output.register_hook(lambda gradient: self._add(name, gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self.squares[name] += rows.square().sum(0).double().cpu()
