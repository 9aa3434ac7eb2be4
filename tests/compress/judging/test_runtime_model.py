"""A file in its runtime, in the place of the float model: the same calls, and outputs of the same form."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.compress.judging.runtime_model import RuntimeModel, formed


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(1),
        (torch.zeros(1), [torch.zeros(1), None]),
        {"a": torch.zeros(1), "b": (torch.zeros(1), 3, "text")},
        OrderedDict(a=torch.zeros(1)),
    ],
    ids=["tensor", "tuple", "dict", "ordered"],
)
def test_the_tensors_replace_those_of_the_form_in_order(like: Any) -> None:
    made = iter(torch.tensor([float(place)]) for place in range(1, 4))
    found = formed(like, made)
    wanted = {
        "Tensor": torch.tensor([1.0]),
        "tuple": (torch.tensor([1.0]), [torch.tensor([2.0]), None]),
        "dict": {"a": torch.tensor([1.0]), "b": (torch.tensor([2.0]), 3, "text")},
        "OrderedDict": OrderedDict(a=torch.tensor([1.0])),
    }[type(like).__name__]
    assert type(found) is type(like) and repr(found) == repr(wanted)


def test_outputs_of_transformers_keep_their_class() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    like = outputs.SequenceClassifierOutput(logits=torch.zeros(2, 3), hidden_states=(torch.zeros(1), torch.zeros(1)))
    found = formed(like, iter([torch.ones(2, 3), torch.ones(1), 2 * torch.ones(1)]))
    assert type(found) is type(like) and found.logits.equal(torch.ones(2, 3)) and found.loss is None
    assert [float(state) for state in found.hidden_states] == [1.0, 2.0]


class Scores(nn.Module):
    """Two inputs by name, two outputs in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        return {"sum": self.linear(first + second), "difference": self.linear(first) - second[:, :3]}


def test_a_file_is_called_as_the_model_is(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from sparsebit.compress.networks.bench import example_of, write_float

    net = Scores().eval()
    data = [{"first": torch.randn(size, 4), "second": torch.randn(size, 4)} for size in (2, 3)]
    example = example_of(net, data)
    assert write_float(net, example, tmp_path / "net.onnx") is not None
    model = RuntimeModel(tmp_path / "net.onnx", "onnxruntime", net, example.outputs)
    assert next(model.parameters()).device.type == "cpu" and not next(model.parameters()).numel()
    first, second = torch.randn(5, 4), torch.randn(5, 4)
    with torch.no_grad():
        wanted = net(first, second)
        for found in (model(first, second), model(second=second, first=first), model(first, second=second)):
            assert list(found) == ["sum", "difference"]
            assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)
