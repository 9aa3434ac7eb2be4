"""Which modules stand for a block; sharding itself runs in two processes (test_training_distributed.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.qat.sharding import block_modules
from tests.quantization.tiny import Block, Opaque, Residual, qconfig


class Nested(nn.Module):
    """A part that cannot be traced inside a graph, beside one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque, self.plain = Opaque(), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.opaque(x))


def blocks(model: nn.Module, name: str) -> list[str]:
    qmodel = QuantModel(model, qconfig({"W.QUANTIZER.TYPE": "lsq", "A.QUANTIZER.TYPE": "lsq"}))
    paths = {module: path for path, module in qmodel.model.named_modules()}
    return [paths[module] for module in block_modules(qmodel.model, qmodel.built.captured, name)]


def test_block_of_a_graph_is_its_layers() -> None:
    assert blocks(Residual(), "stem") == ["stem.conv"]  # norms keep float32, elsewhere
    assert blocks(Nested(), "plain") == ["plain.0", "plain.2"]
    assert blocks(Block(), "norm1") == ["norm1"]


def test_code_that_was_not_traced_calls_its_blocks_itself() -> None:
    assert blocks(Nested(), "opaque") == ["opaque"]
    assert blocks(Nested(), "opaque.first") == ["opaque.first"]
    assert blocks(Opaque(), "second") == ["second"]


def test_unknown_block_names_its_neighbours() -> None:
    with pytest.raises(CaptureError, match=r"no block 'plian'; near names: plain"):
        blocks(Nested(), "plian")


@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
def test_learned_numbers_can_be_sharded_and_are_read_as_scalars(kind: str) -> None:
    weight = "lsq" if kind == "pact" else kind
    qmodel = QuantModel(Residual(), qconfig({"W.QUANTIZER.TYPE": weight, "A.QUANTIZER.TYPE": kind}))
    assert [name for name, parameter in qmodel.named_parameters() if parameter.ndim == 0] == []
    assert all(scale.shape == zero_point.shape for scale, zero_point in (q.qparams() for q in qmodel.quantizers()))
    activations = [quantizer for quantizer in qmodel.quantizers() if quantizer.target == "activation"]
    assert all(quantizer.qparams()[0].shape == () for quantizer in activations)


@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
def test_numbers_that_were_saved_as_scalars_load(kind: str) -> None:
    config = qconfig({"A.QUANTIZER.TYPE": kind})
    qmodel, other = QuantModel(Residual(), config), QuantModel(Residual(), config)
    with torch.no_grad():
        for parameter in qmodel.parameters():
            parameter.add_(0.25)
    state = {name: x.reshape(()) if x.shape == (1,) else x for name, x in qmodel.state_dict().items()}
    assert any(x.ndim == 0 and name.endswith(("scale", "alpha")) for name, x in state.items())
    other.load_state_dict(state)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in qmodel.state_dict().items())
