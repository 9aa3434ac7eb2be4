"""Under torchrun every rank ends with the scales that one process would have found on all the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.quantization.tiny import Opaque, TwoLayers, calibrated, qconfig
from tests.two_ranks import torchrun

OBSERVERS = ["minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq"]
Scales = dict[str, dict[str, list[float]]]


def everything(batches: torch.Tensor) -> Scales:
    """The scales of all observers, per tensor and per channel, and of in-order calibration, traced and opaque."""
    torch.manual_seed(0)
    graph, opaque = TwoLayers(), Opaque()
    found = {
        f"{observer} {scheme}": calibrated(graph, batches, qconfig({"A.OBSERVER.TYPE": observer, "A.QSCHEME": scheme}))
        for observer in OBSERVERS
        for scheme in ("per-tensor-affine", "per-channel-symmetric")
    }
    found["asym"] = calibrated(graph, batches, qconfig(bits=3), asym=True)
    found["opaque asym"] = calibrated(opaque, batches, qconfig(bits=3), asym=True)
    return {
        name: {quantizer.name: quantizer.scale.reshape(-1).tolist() for quantizer in qmodel.quantizers()}
        for name, qmodel in found.items()
    }


def all_batches() -> torch.Tensor:
    return torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 5).reshape(4, 1, 1)


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path: Path, project_root: Path) -> None:
    torchrun(__file__, tmp_path, project_root)
    ranks: list[Scales] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    alone = everything(all_batches())
    assert ranks[0].keys() == alone.keys()
    for name, scales in alone.items():
        for site, scale in scales.items():
            assert ranks[0][name][site] == pytest.approx(scale, rel=1e-5), f"{name}: {site}"


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scales = everything(all_batches().chunk(2)[rank])
    Path(folder, f"{rank}.json").write_text(json.dumps(scales))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
