from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.speed.stacked_selects import StackedQuantizers
from tests.quantization.tiny import prepared


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.proj(x).select(1, 0)  # one select alone stays


def ready() -> QuantModel:
    torch.manual_seed(0)
    learned = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    config = {"DEVICE": "cpu", "W": learned, "A": learned}
    qmodel = prepared(Attention(), [tokens()], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel


def tokens() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def gradients(qmodel: QuantModel) -> tuple[Tensor, dict[str, Tensor | None]]:
    output = qmodel.train()(tokens())
    output.square().sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in qmodel.named_parameters()}


def targets(qmodel: QuantModel) -> list[object]:
    assert isinstance(qmodel.model, torch.fx.GraphModule)
    return [node.target for node in qmodel.model.graph.nodes]


def test_values_and_gradients_stay() -> None:
    stacked = ready()
    output, found = gradients(stacked)
    assert targets(stacked).count("select") == 4  # the graph stays as it is
    assert stacked.qat.fused is not None
    assert [type(step) for step in stacked.qat.fused.steps].count(StackedQuantizers) == 1

    plain = ready()
    plain.accelerate(False)
    expected_output, expected = gradients(plain)
    assert torch.equal(output, expected_output)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0, msg=name)


def test_the_file_has_the_selects(tmp_path: Path) -> None:
    qmodel = ready()
    gradients(qmodel)
    qmodel.eval()
    parity = qmodel.export_onnx(tokens(), tmp_path / "a.onnx", ["x"], check=[tokens()])
    assert parity is not None
    kinds = {node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node}
    assert not any("Sequence" in kind or kind == "Split" for kind in kinds), kinds


def test_compiled_graph_is_whole() -> None:
    qmodel = ready().train()
    expected = qmodel(tokens())
    compiled = torch.compile(qmodel, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), expected)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        first, second = y.select(1, 0), y.select(1, 1)
        first.neg_()
        return y.sum(1) + second  # type: ignore[no-any-return]


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y.select(1, 0) * y.select(1, 1) + y.select(1, 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "size"), [(Writes(), 2), (Few(), 2), (Few(), 64)], ids=["written", "all", "few"])
def test_what_is_written_into_and_few_of_many(model: nn.Module, size: int) -> None:
    learned = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    qmodel = QuantModel(model, parse_qconfig({"DEVICE": "cpu", "W": learned, "A": learned}))
    x = torch.randn(3, size, 4)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    expected = qmodel(x)
    output = qmodel.train()(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    names = [type(node).__name__ for node in walk(output.grad_fn)]
    assert ("UnbindBackward0" in names) == (size == 2 and isinstance(model, Few))


def walk(node: Any) -> Iterator[Any]:
    yield node
    for following, _ in node.next_functions:
        if following is not None:
            yield from walk(following)
