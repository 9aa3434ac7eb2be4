"""A runtime without a clock: layers take as long as their weights are large."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

from sparsebit.deploy.audit.file_latency import Stopwatch, Timed
from sparsebit.deploy.audit.region_times import RegionTime, RegionTimes


class ByMultiplications(Stopwatch):
    """A runtime whose layers take as long as their weights are large, and `rest` beside; no clock."""

    def __init__(self, rest: float = 0.0, wrong: float = 1.0) -> None:
        self.rest, self.wrong, self.seen = rest, wrong, list[str]()

    def ratios(self, files: Mapping[str, bytes], budget_s: float) -> dict[str, Timed]:
        totals = {name: sum(region.ms for region in self._regions(file)) for name, file in files.items()}
        first, *others = totals
        self.seen += others
        ratios = {name: self.wrong * total / totals[first] for name, total in totals.items()}
        return {name: Timed(1.0 if name == first else ratio, 0.0) for name, ratio in ratios.items()}

    def regions(self, files: Mapping[str, bytes]) -> dict[str, RegionTimes]:
        found = {name: self._regions(file) for name, file in files.items()}
        return {
            name: RegionTimes("fake", "1", "", 1, 1, sum(r.ms for r in regions), 0.0, tuple(regions))
            for name, regions in found.items()
        }

    def _regions(self, file: bytes) -> list[RegionTime]:
        layers = [
            RegionTime("Gemm", ms, "float", (f"{path}/node", "act/node")) for path, ms in json.loads(file).items()
        ]
        return [RegionTime("Other", self.rest, "float"), *layers]


def layer_sizes(model: nn.Module, _: object) -> bytes:
    """Instead of an ONNX file, the number of weights of each layer."""
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return json.dumps({path: float(layer.weight.numel()) for path, layer in layers}).encode()
