"""Which layer gets how many bits: the exact integer program over the cost of each number of bits in each layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from sparsebit.errors import CheckpointError, MissingExtraError
from sparsebit.numerics.choices.integer_program import Budget, choose


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
    """The bits with the smallest sum of costs, with at most `average_bits` per weight on average.

    `costs[layer][bits]`, with the same bits for all layers. `fused`: layers that get the same bits.
    """
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
