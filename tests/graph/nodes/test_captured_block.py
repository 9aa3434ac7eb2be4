"""Blocks that a graph was traced through are never called: hooks on them and calls of them are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.nodes.captured_block import CapturedBlock
from sparsebit.quantization.model.quant_model import QuantModel
from tests.quantization.tiny import calibrated


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class Double(nn.Module):
    """A block without layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layers = Block(), nn.ModuleList([nn.Sequential(Block(), Block()), Double()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Opaque(nn.Module):
    """Its own code stays; `net` becomes a region in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fc = Net(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            raise ValueError
        return self.fc(self.net(x))


METHODS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
]


def quantized(model: nn.Module) -> QuantModel:
    return calibrated(model, [torch.randn(4, 8)], "onnxruntime", example_inputs=torch.randn(4, 8))


@pytest.mark.sample(9)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["layer1", "layers", "layers.0", "layers.0.1"])
def test_a_hook_on_a_captured_block_is_refused(method: str, path: str) -> None:
    qmodel = quantized(Net())
    with pytest.raises(CaptureError, match=rf"^{path}\.{method}: the hook would never run.*on the float model before"):
        getattr(qmodel.model.get_submodule(path), method)(lambda *_: None)
    qmodel(torch.randn(4, 8))


def test_a_captured_block_cannot_be_called() -> None:
    qmodel = quantized(Net())
    with pytest.raises(CaptureError, match=r"^layer1: the block cannot be called by itself"):
        qmodel.model.layer1(torch.randn(4, 8))


def test_copies_refuse_too() -> None:
    block = copy.deepcopy(quantized(Net())).model.get_submodule("layer1")
    assert type(block) is CapturedBlock
    with pytest.raises(CaptureError, match=r"^layer1\.register_forward_hook"):
        block.register_forward_hook(lambda *_: None)


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", METHODS[:4])
@pytest.mark.parametrize("block", [lambda net: net.layer1, lambda net: net.layers[0], lambda net: net.layers[1]])
def test_a_hook_on_a_block_inside_a_region_is_refused_at_the_next_call(method: str, block: Any) -> None:
    """`qmodel.model.net` stands for the user's module and gives its blocks: they are not called either."""
    qmodel = copy.deepcopy(quantized(Opaque()))
    with pytest.raises(CaptureError, match=r"^net\.layer1\.|^layer1\."):
        qmodel.model.net.graph_module.layer1.register_forward_hook(lambda *_: None)
    handle = getattr(block(qmodel.model.net), method)(lambda *_: None)
    with pytest.raises(CaptureError, match=r"a hook on layer.*the hook would never run"):
        qmodel(torch.randn(4, 8))
    handle.remove()
    qmodel(torch.randn(4, 8))


def test_hooks_before_the_build_keep_the_blocks_code() -> None:
    model, seen = Opaque(), []
    model.net.layer1.register_forward_hook(lambda *_: seen.append("layer1"))
    qmodel = quantized(model)
    seen.clear()
    qmodel(torch.randn(4, 8))
    assert seen == ["layer1"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("path", ["layer1.fc", "layers.0.1.fc", "layer1.act", "layers.0.0.act"])
def test_hooks_on_layers_run(path: str, training: bool) -> None:
    qmodel, seen = quantized(Net()).train(training), []
    layer = qmodel.model.get_submodule(path)
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    qmodel(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_hooks_on_the_model_itself_run() -> None:
    qmodel, seen = quantized(Net()), []
    qmodel.register_forward_pre_hook(lambda *_: seen.append("before"))
    qmodel.register_forward_hook(lambda *_: seen.append("after"))
    qmodel.register_full_backward_hook(lambda *_: seen.append("backward"))
    qmodel(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]
