"""`Teacher`: the float model's values of a block while the block is learned, for inputs that change in every step.

Elsewhere the targets are computed once, before the block is visited. Images that are mirrored, shifted and patched anew
in every step need new targets. The block is not copied: its float parameters are put in, and its quantizers are off,
for one run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn

from sparsebit.execution.blocks.engine import BlockData
from sparsebit.execution.blocks.runner import Values
from sparsebit.execution.image_views import has_images, image_view, patched_images
from sparsebit.graph.values.nested import map_nested
from sparsebit.quantization.algorithms.rounding.matching import Matching
from sparsebit.quantization.calibrating.model_state import quantizers_of, switched
from sparsebit.quantization.quantizers.base import Quantizer


class Teacher:
    """Must be made before anything is learned. `nodes`: of the block, whose values are targets besides its outputs."""

    def __init__(self, data: BlockData, nodes: Sequence[fx.Node], matching: Matching) -> None:
        modules = dict.fromkeys(part for module in data.block.modules.values() for part in module.modules())
        self.matching, self._runner = matching, data.seen_at(nodes)
        self._quantizers = quantizers_of(*data.block.modules.values())
        registries = [m._parameters for m in modules if not isinstance(m, Quantizer)]
        with data.in_float():
            self._floats = [
                (registry, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
                for registry in registries
                for name, parameter in registry.items()
                if parameter is not None
            ]

    def renewed(self, inputs: Values, generator: torch.Generator) -> Values:
        """The inputs, with new views of the images if they are wanted."""

        def viewed(x: Tensor) -> Tensor:
            x, share = image_view(x, generator), self.matching.patched
            return patched_images(x, share, generator) if share else x

        is_renewed = self.matching.is_renewed and has_images(inputs)
        return map_nested(Tensor, viewed, inputs) if is_renewed else inputs

    def targets(self, inputs: Values) -> Values:
        """The float model's values for these inputs."""
        with torch.no_grad(), self._in_float():
            return self._runner(inputs)

    def run(self, inputs: Values) -> Values:
        """The block's values in its current state."""
        return self._runner(inputs)

    @contextlib.contextmanager
    def _in_float(self) -> Iterator[None]:
        now = [(registry, name, registry[name]) for registry, name, _ in self._floats]
        with switched(self._quantizers, to=False):
            try:
                for registry, name, parameter in self._floats:
                    registry[name] = parameter
                yield
            finally:
                for registry, name, own in now:
                    registry[name] = own
