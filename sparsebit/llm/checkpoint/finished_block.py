"""`FinishedBlock`: the quantized form of one block, converted to and from the tensors of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor

from sparsebit.llm.layers.float_kinds import FLOAT_KINDS
from sparsebit.llm.layers.float_weight import FloatWeight, Weight
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.architectures import Stages
from sparsebit.llm.models.input_scaling import ScaledInput

_OTHER = "other:"


@dataclass(frozen=True)
class FinishedBlock:
    """The result for a block: its packed layers by name, and `others`, its other tensors that have changed.

    `tokens`: how many calibration tokens each expert layer has read. `scales`: how inputs were scaled. `stages`:
    groups of layers that read one input.
    """

    layers: Mapping[str, Weight]
    tokens: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, ScaledInput] = field(default_factory=dict)
    stages: Stages = ()

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and facts of a file."""
        tensors: dict[str, Tensor] = {f"{_OTHER}{name}": value for name, value in self.others.items()}
        for name, packed in self.layers.items():
            tensors |= packed.to_tensors(name)
        facts = {
            "tokens": json.dumps(dict(self.tokens)),
            "stages": json.dumps(self.stages),
            "scales": json.dumps({name: asdict(scaled) for name, scaled in self.scales.items()}),
        }
        return tensors, facts

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> FinishedBlock:
        """The block that `to_tensors` wrote."""
        names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        layers: dict[str, Weight] = {name: PackedWeight.from_tensors(tensors, name) for name in names}
        for kind in FLOAT_KINDS:
            floats = [name.removesuffix(f".{kind}") for name in tensors if name.endswith(f".{kind}")]
            layers |= {name: FloatWeight.from_tensors(tensors, name) for name in floats}
        others = {name.removeprefix(_OTHER): value for name, value in tensors.items() if name.startswith(_OTHER)}
        scales = {name: ScaledInput(**record) for name, record in json.loads(facts["scales"]).items()}
        stages = tuple(map(tuple, json.loads(facts["stages"])))
        return cls(layers, json.loads(facts["tokens"]), others, scales, stages)
