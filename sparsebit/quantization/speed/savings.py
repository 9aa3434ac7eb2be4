"""`Savings`: the savings of an accelerated training step. Each can be left out to measure its effect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from sparsebit.errors import ConfigError


@dataclass(frozen=True)
class Savings:
    """One flag for each; `benchmarks/qat_step.py --ablate` has a row for each."""

    fused_layers: bool = True  # a layer and the quantizer of its input are one autograd node
    first_layer: bool = True  # no gradient of the images, which only their scale would need
    weight_batches: bool = True  # all weights are quantized in a few kernels
    relus: bool = True  # a quantizer whose grid begins at zero replaces the ReLU before it
    activations: bool = True  # GELU and SiLU are computed in the kernels of the quantizer after them
    joined_selects: bool = True  # the parts of one tensor (q, k, v) are selected in one op
    stacked_quantizers: bool = True  # and quantized in one kernel
    recomputed_copies: bool = True  # large quantized copies are not kept for the backward

    @classmethod
    def without(cls, names: Collection[str]) -> Savings:
        """All but these; an unknown name raises an error that lists the allowed ones."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in names if name not in known]
        if isinstance(names, str) or unknown:
            shown = repr(names) if isinstance(names, str) else ", ".join(map(repr, unknown))
            raise ConfigError(f"accelerate(without={shown}): give a list of names out of {', '.join(known)}")
        return cls(**dict.fromkeys(names, False))
