from __future__ import annotations

import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.quantization.inspecting.layer_graph import layer_graph
from sparsebit.quantization.ops.quant_opr import QShared
from sparsebit.records.layer_graph import GraphLayer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.conv(self.conv(x))


def test_layers_without_quantizers_and_what_each_reads() -> None:
    qmodel = sparsebit.quantize(Net().eval(), [torch.randn(4, 3, 8, 8)], "onnxruntime")
    found = {layer.name: layer for layer in layer_graph(qmodel)}
    assert list(found) == ["stem.0", "stem.1", "conv", "add"]
    assert found["stem.0"] == GraphLayer("stem.0", "conv") and found["stem.1"] == GraphLayer(
        "stem.1", "relu", ("stem.0",)
    )
    assert found["conv"].inputs == ("stem.1", "conv")  # called twice, the second time on its own result
    assert found["add"].op == "add" and set(found["add"].inputs) == {"stem.1", "conv"}


def test_a_grid_that_is_read_again_is_no_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    qmodel = sparsebit.quantize(model.eval(), [torch.randn(4, 3, 8, 8)], "onnxruntime")
    assert any(isinstance(module, QShared) for module in qmodel.modules())
    assert [(layer.name, layer.inputs) for layer in layer_graph(qmodel)] == [
        ("0", ()), ("1", ("0",)), ("2", ("1",)), ("3", ("2",))
    ]  # fmt: skip


def test_graphs_inside_a_module_that_cannot_be_traced() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            while float(x.abs().max()) > 1:
                x = self.body(x) / 100
            return x

    qmodel = sparsebit.quantize(Loop().eval(), [100 * torch.randn(4, 4)], "onnxruntime")
    assert [layer.name for layer in layer_graph(qmodel)] == ["body.0", "body.1"]
