"""Under torchrun every rank ends with the same weights and biases: those of one process on all the data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsebit.quantization import correct_biases, equalize, gptq, reconstruct, smooth
from tests.quantization.tiny import TwoLayers, calibrated, qconfig
from tests.two_ranks import torchrun


def everything(batches: Tensor) -> dict[str, Tensor]:
    """What a model is after each algorithm."""
    found = {}
    for name in ("gptq", "empirical", "analytic", "equalize", "smooth", "reconstruct"):
        torch.manual_seed(0)
        qmodel = calibrated(TwoLayers(), batches, qconfig(bits=4))
        if name == "gptq":
            gptq(qmodel, list(batches))
        elif name == "equalize":
            equalize(qmodel, list(batches))
        elif name == "smooth":
            smooth(qmodel, list(batches), alpha=0.5)
        elif name == "reconstruct":
            reconstruct(qmodel, list(batches), steps=20, learn_biases=True)
        else:
            correct_biases(qmodel, list(batches), method=name)  # type: ignore[arg-type]
        found |= {f"{name}.{key}": tensor for key, tensor in qmodel.model.state_dict().items()}
    return found


def all_batches() -> Tensor:
    return torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 5).reshape(4, 1, 1)


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path: Path, project_root: Path) -> None:
    torchrun(__file__, tmp_path, project_root)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = everything(all_batches())
    assert ranks[0].keys() == ranks[1].keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        if not name.startswith("reconstruct"):  # which draws its mini-batches from each rank's own samples
            torch.testing.assert_close(ranks[0][name], tensor, msg=name)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(everything(all_batches()[rank::2]), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
