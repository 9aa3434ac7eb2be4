"""Placements of a model for a program's runtime: compiled, run there, chosen by their times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsebit
from sparsebit.deploy.audit.file_latency import Stopwatch, Timed
from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.mixed_precision.latency import search_latency
from sparsebit.quantization.placement_search import measure_placement
from tests.quantization.tiny import Residual, calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Table(Stopwatch):
    """Times by the names of the placements; everything else is real."""

    def __init__(self, ratios: Mapping[str, float]) -> None:
        super().__init__("executorch", [[IMAGES[:1].numpy()]], 1)
        self.table = ratios

    def ratios(self, files: Mapping[str, bytes], budget_s: float) -> dict[str, Timed]:
        assert all(map(self.sqnr_db, files, files.values(), [files["float"]] * len(files)))  # they load and run
        return {name: Timed(self.table.get(name, 2.0), 0.01) for name in files}


def quantized() -> QuantModel:
    torch.manual_seed(0)
    return calibrated(Residual().eval(), [IMAGES], qconfig(backend="executorch"))


def weights(qmodel: QuantModel) -> set[str]:
    return {site.layer for site in qmodel.plan.values() if site.role == "weight"}


@pytest.fixture(autouse=True)
def _packages() -> None:
    for package in ("executorch", "onnx", "onnxscript"):
        pytest.importorskip(package)


@pytest.mark.slow
def test_the_fastest_program_is_chosen(tmp_path: Path) -> None:
    qmodel = quantized()
    watch = Table({"float": 1.0, "default": 0.9, "linears alone in integers": 0.5})
    found = measure_placement(qmodel, [IMAGES], margin_db=60, keep=tmp_path, stopwatch=watch)
    assert weights(found.qmodel) == {"fc"} and found.profile.ratio == 0.5
    assert {file.name for file in tmp_path.iterdir()} == {"float.pte", "default.pte", "measured.pte"}
    parity = found.qmodel.export(tmp_path / "m.pte", IMAGES[:1], check=[IMAGES])
    assert parity is not None and parity.worst.max_difference < 1e-5
    float_program = measure_placement(qmodel, [IMAGES], seconds=0, stopwatch=Table({"float": 1.0}))
    assert float_program.profile.is_float and not float_program.qmodel.plan.sites
    parity = float_program.qmodel.export(tmp_path / "float.pte", IMAGES, check=[IMAGES])
    assert parity is not None and parity.worst.max_difference < 1e-5


@pytest.mark.slow
def test_measured_placement_of_quantize_is_not_slower_than_float() -> None:
    torch.manual_seed(0)
    found: Any = sparsebit.quantize(
        Residual().eval(), [IMAGES], "executorch", placement="measured", placement_seconds=1.0
    )
    assert found.placement.runtime == "executorch"
    assert found.placement.is_float or found.placement.ratio < 1


def test_a_latency_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"search_latency\(\) with BACKEND: executorch: .*\.pte.*placement='measured'"
    ):
        search_latency(quantized(), [IMAGES], 0.5)
