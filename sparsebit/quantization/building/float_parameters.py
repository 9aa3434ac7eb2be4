"""`FloatParameters`: the float model's values of weights and biases that algorithms have changed.

Algorithms write rounded weights into the model, but the next one must compare with the outputs of the float model. So
the old value is kept, together with a checksum of what the algorithm wrote. If the parameter has another checksum later
(training, a loaded state_dict), the kept value is outdated, and the parameter's current value counts as float.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, fx, nn

from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.tensor_files import digest

log = logging.getLogger(__name__)


class _Kept(NamedTuple):
    value: Tensor  # of the float model, on the CPU
    changed_to: str  # the checksum of the algorithm's result


class FloatParameters:
    """Kept values by the parameter's path in the graph. They are not saved: a loaded model has none."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def get(self, path: str) -> Tensor | None:
        """The parameter's value in the float model; None if it is unchanged."""
        return self._kept[path].value if path in self._kept else None

    def __copy__(self) -> FloatParameters:
        new = FloatParameters()
        new._kept = dict(self._kept)
        return new

    def __len__(self) -> int:
        return len(self._kept)

    def checksum(self) -> str:
        return digest({path: kept.value for path, kept in self._kept.items()}) if self._kept else ""

    def drop_outdated(self, graph_module: fx.GraphModule) -> None:
        """Forget parameters that something else changed since: training, a loaded state, a folded norm."""
        self.changed(graph_module)

    def changed(self, graph_module: fx.GraphModule) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that algorithms have changed, each with its value in the float model; others are forgotten."""
        now = dict(graph_module.named_parameters(remove_duplicate=False))
        for path, kept in list(self._kept.items()):
            if path not in now or _digest(now[path]) != kept.changed_to:
                log.debug("%s was changed since an algorithm did: it counts as a weight of the float model", path)
                del self._kept[path]
        return [(now[path], kept.value) for path, kept in self._kept.items()]

    def clear(self) -> None:
        """Forget all values: the current parameters count as those of the float model."""
        self._kept.clear()

    @contextlib.contextmanager
    def keeping(self, block: Block) -> Iterator[None]:
        """Inside, an algorithm may change the block's parameters; their values before the first change are kept."""
        places = ((path, registry[name]) for path, registry, name in _places(block))
        copies = {path: value.detach().cpu().clone() for path, value in places if value is not None}
        yield
        for path, registry, name in _places(block):
            value, copy = registry[name], copies.get(path)
            if value is not None and copy is not None and not value.detach().cpu().equal(copy):
                original = self.get(path)
                self._kept[path] = _Kept(copy if original is None else original, _digest(value))

    @contextlib.contextmanager
    def original(self, block: Block) -> Iterator[None]:
        """Inside, the block has the parameters of the float model."""
        swapped = []
        for path, registry, name in _places(block):
            kept, now = self._kept.get(path), registry[name]
            if kept is not None and now is not None:
                swapped.append((registry, name, now))
                registry[name] = nn.Parameter(kept.value.to(now), requires_grad=False)
        try:
            yield
        finally:
            for registry, name, parameter in swapped:
                registry[name] = parameter


def _places(block: Block) -> Iterator[tuple[str, dict[str, nn.Parameter | None], str]]:
    """The parameters of the block's layers, but not those of quantizers: (path, registry, name in it)."""
    for prefix, module in block.modules.items():
        for path, inner in module.named_modules():
            if not isinstance(inner, Quantizer):
                for name in inner._parameters:
                    yield ".".join(part for part in (prefix, path, name) if part), inner._parameters, name


def _digest(tensor: Tensor) -> str:
    return digest({"": tensor.detach().cpu()})
