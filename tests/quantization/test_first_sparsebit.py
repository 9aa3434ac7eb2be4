from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.first_sparsebit import is_of_first_sparsebit, weights_of_first_sparsebit
from tests.quantization.tiny import qconfig


def network() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Flatten(), nn.LazyLinear(2))


def old_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """As the first Sparsebit saved it: nodes for paths, wrapped norms, buffers of quantizers and observers."""
    state = {}
    for name, value in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        node = f"_{path.replace('.', '_')}"
        state[f"model.{node}.module.{leaf}" if path == "0.1" else f"model.{node}.{leaf}"] = value.clone()
        state[f"model.{node}.input_quantizer.scale"] = torch.ones(1)
        state[f"model.{node}.input_quantizer.observer.min_val"] = torch.zeros(())
    return state


@pytest.fixture
def model() -> nn.Module:
    made = network()
    made(torch.zeros(2, 3, 4, 4))
    return made.eval()


def test_weights_come_back_by_their_own_names(model: nn.Module) -> None:
    other = network()
    other(torch.zeros(2, 3, 4, 4))
    other.load_state_dict(weights_of_first_sparsebit(old_state(model), other))
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(other.eval()(x), model(x))


def test_loading_it_says_what_to_do(model: nn.Module) -> None:
    qmodel = QuantModel(model, qconfig())
    with pytest.raises(CheckpointError, match=r"first Sparsebit.*weights_of_first_sparsebit\(state_dict"):
        qmodel.load_state_dict(old_state(model))
    assert not is_of_first_sparsebit(qmodel.state_dict()) and not is_of_first_sparsebit(model.state_dict())
    qmodel.load_state_dict(qmodel.state_dict())


def test_a_state_without_observers_is_recognised(model: nn.Module) -> None:
    assert is_of_first_sparsebit(name for name in old_state(model) if "observer" not in name)


def test_folded_norms_are_told(model: nn.Module) -> None:
    state = {name: value for name, value in old_state(model).items() if ".module." not in name}
    with pytest.raises(CheckpointError, match=r"no tensor for 4 of Sequential's \(0.1.weight, .*FUSE_BN"):
        weights_of_first_sparsebit(state, model)
