"""`Recipe`: how a candidate of a network is made, as plain values: a config, a placement, and what is pruned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparsebit.compress.networks.teaching import learn_outputs
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import RecordError
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.placement_search import PlacementProfile
from sparsebit.quantization.post_training import quantize
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records.json_form import from_plain, to_plain
from sparsebit.sparse.sparse_config import SparseConfig, parse_sconfig
from sparsebit.sparse.sparse_model import SparseModel

# Candidates are compared with the float model in runtimes that compute on the CPU: everything stays there.
DEVICE = "cpu"


@dataclass(frozen=True)
class Recipe:
    """How a candidate is made from the float model.

    `placement`: "default", "measured" (searched while it is made), or the profile that was measured. `sconfig`: the
    channels that are removed before; the remaining weights are fitted to the float model's outputs. `round_to`: as for
    `SparseModel.shrink`. `learning_steps`: how long the smaller model learns the whole one's outputs (`teaching.py`).
    """

    config: QuantConfig
    placement: str | PlacementProfile = "default"
    sconfig: SparseConfig | None = None
    round_to: int = 1
    learning_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.replace("DEVICE", DEVICE))
        if self.sconfig is not None:
            object.__setattr__(self, "sconfig", self.sconfig.replace("DEVICE", DEVICE))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def net(self, model: nn.Module, batches: Sequence[Any]) -> nn.Module:
        """The float model, without the channels that this recipe removes."""
        if self.sconfig is None:
            return model
        smodel = SparseModel(model, self.sconfig, batches[0]).eval()
        smodel.calc_params(batches)
        smodel.reconstruct(batches)
        small = smodel.shrink(self.round_to).eval()
        return learn_outputs(small, model, batches, self.learning_steps) if self.learning_steps else small

    def quantized(self, net: nn.Module, batches: Sequence[Any], placement_seconds: float) -> QuantModel:
        """The calibrated model."""
        how = {"placement": self.placement, "placement_seconds": placement_seconds}
        return quantize(net, batches, self.config, **how)  # type: ignore[arg-type]  # names of its own keywords

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records and for `key`."""
        placement: Any = self.placement
        if isinstance(placement, PlacementProfile):
            placement = to_plain(placement, PlacementProfile)
        sparsity = None if self.sconfig is None else self.sconfig.to_yaml()
        return {
            "config": self.config.to_yaml(),
            "placement": placement,
            "sparsity": sparsity,
            "round_to": self.round_to,
            "learning_steps": self.learning_steps,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`."""
        try:
            config, placement, sparsity, round_to, steps = (
                values[name] for name in ("config", "placement", "sparsity", "round_to", "learning_steps")
            )
        except KeyError as missing:
            raise RecordError(f"the recipe of a step has no {missing}; remove the folder of the run") from None
        if isinstance(placement, dict):
            placement = from_plain(PlacementProfile, placement, "placement")
        sconfig = None if sparsity is None else parse_sconfig(sparsity)
        return cls(as_qconfig(config), placement, sconfig, round_to, steps)

    @property
    def key(self) -> str:
        """Equal for equal recipes. A measured placement counts as `measured`: measuring again changes nothing."""
        values = self.to_dict()
        if values["placement"] != "default":
            values["placement"] = "measured"
        return json.dumps(values, sort_keys=True)
