"""The codes of a program's sites in its runtime are those of the simulation; a difference has a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.programs.site_outputs import SiteGrid
from sparsebit.deploy.programs.to_program import to_program
from sparsebit.graph.state.modes import evaluating
from sparsebit.numerics import xnnpack_kernels
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.exporting.program_sites import program_differences
from tests.quantization.tiny import Residual, calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Residual()

    def forward(self, x: Tensor) -> Any:
        return {"scores": self.body(x)}


def model() -> Any:
    torch.manual_seed(0)
    return calibrated(Named().eval(), [IMAGES], qconfig(backend="executorch"))


@torch.no_grad()
def test_sites_are_further_outputs_with_the_codes_of_the_simulation() -> None:
    qmodel, sites = model(), dict[str, SiteGrid]()
    with evaluating(qmodel), quantizers_as_constants(qmodel):
        program = to_program(qmodel, (IMAGES,), {}, sites=sites)
        plain = to_program(qmodel, (IMAGES,), {})
    found = program.module()(IMAGES)
    assert len(found) == 1 + len(sites) and len(sites) > 4
    assert torch.equal(found[0], plain.module()(IMAGES)["scores"])
    quantizers = {q.name: q for q in qmodel.quantizers() if q.is_enable}
    assert quantizers.keys() - sites.keys() == {name for name in quantizers if name.endswith("weight")}
    for values, (name, grid) in zip(found[1:], sites.items(), strict=True):
        codes = torch.from_numpy(grid.codes(values.numpy()))
        quantizer = quantizers.get(name, quantizers["body.adaptive_avg_pool2d.output"])  # the grid of a moved tensor
        assert codes.unique().numel() > 1, name
        assert int(codes.min()) >= quantizer.spec.qmin and int(codes.max()) <= quantizer.spec.qmax


@pytest.mark.slow
def test_the_first_site_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch")
    qmodel = model()
    equal = program_differences(qmodel, ((IMAGES,), {}))
    assert len(equal) > 4 and not any(one.largest for one in equal)
    mean = xnnpack_kernels.image_mean
    monkeypatch.setattr(xnnpack_kernels, "image_mean", lambda x, *scales: mean(x, *scales) + scales[1])
    differences = program_differences(qmodel, ((IMAGES,), {}))
    first = next(one for one in differences if one.largest)
    assert first.largest == 1 and first.share > 0.5 and first.site == "body.adaptive_avg_pool2d.output"
    before = differences[: differences.index(first)]
    assert len(before) > 3 and not any(one.largest for one in before)
