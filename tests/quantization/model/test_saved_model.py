"""Layers that the captured path does not call are part of the model: saved, counted, trained, copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CaptureError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.planning.float_reasons import UNCALLED
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _linear() -> nn.Linear:
    return nn.Linear(8, 8)


class ByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.ModuleList(nn.ModuleList(_linear() for _ in range(2)) for _ in range(2))
        self.named = nn.ModuleDict({"first": _linear(), "second": _linear()})

    def forward(self, x: Tensor, i: int) -> Tensor:
        y: Tensor = self.named["second" if i else "first"](self.grid[i][1 - i](x))  # type: ignore[index]
        return y


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(_linear() for _ in range(3))

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.stack([lateral(x) for lateral, x in zip(self.laterals, xs, strict=False)]).sum(0)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """`graph` and `code` are names that a GraphModule uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code = _linear(), OwnLinear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            y: Tensor = self.graph(x)
            return y
        return self.code(F.linear(x, self.weight)) + self.shift  # type: ignore[no-any-return]


class ByShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = Block(), Block()
        self.tied, self.again = _linear(), self.first.graph
        self.tied.weight = self.first.graph.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if x.shape[0] > 2 else self.again(self.tied(self.other(y)))  # type: ignore[no-any-return]


class ByDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x) if x.is_floating_point() else self.table(x)
        return y


class Unused(nn.Module):
    """By mode, by attribute, by an argument that is None; never called, and called for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.context, self.dead = (_linear() for _ in range(5))
        self.rnn, self.norm, self.attention = nn.LSTM(4, 4), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2)
        self.choice = "a"

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.training:
            x = self.aux(x)
        self.dead(x)
        y: Tensor = getattr(self, self.choice)(x)
        return y if context is None else y + self.context(context)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.rnn = _linear(), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) if x.shape[0] > 2 else self.rnn(x[None])[0][0]
        return y


class DataDependent(nn.Module):
    """Runs its own code; the blocks inside are graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if float(y.sum()) < 1e9 else self.second(y)  # type: ignore[no-any-return]


# A model, the call that it is captured with, and calls that take other paths.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "by_index": (ByIndex, (X, 0), [(X, 1)]),
    "levels": (Levels, ([X, X],), [([X, X, X],)]),
    "by_shape": (ByShape, (X,), [(X[:2],)]),
    "by_dtype": (ByDtype, (torch.tensor([1, 2]),), [(X,)]),
    "unused": (Unused, (X,), []),
    "recurrent": (Recurrent, (X,), [(X[:2],)]),
    "data_dependent": (DataDependent, (X,), [(X[:2],)]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_parameter_is_saved_counted_and_copied_whatever_path_the_example_takes(
    name: str, backend: str, tmp_path: Path
) -> None:
    make, example, others = MODELS[name]
    torch.manual_seed(1)
    model = make().eval()
    qmodel = calibrated(model, [example], qconfig(backend=backend), example_inputs=example)
    own = [parameter for name, parameter in qmodel.named_parameters() if "quantizer" not in name]
    assert sum(p.numel() for p in own) == sum(p.numel() for p in model.parameters())
    assert sum(record.num_elements for record in qmodel.coverage.parameters) == sum(
        p.numel() for p in model.parameters()
    )
    expected = [qmodel(*call) for call in (example, *others)]
    for call, output in zip((example, *others), expected, strict=True):
        torch.testing.assert_close(output, model(*call), rtol=0, atol=0.1)
    qmodel.save(tmp_path / "saved")
    twins = [QuantModel.load(tmp_path / "saved", make()), copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))]
    for twin in twins:
        assert list(twin.state_dict()) == list(qmodel.state_dict())
        for call, output in zip((example, *others), expected, strict=True):
            assert torch.equal(twin(*call), output)


def test_layers_of_other_paths_are_quantized_moved_and_trained() -> None:
    qmodel = calibrated(ByShape().eval(), [X], qconfig(), example_inputs=(X,))
    coverage = qmodel.coverage
    quantized = {layer.name: layer.sites for layer in coverage.quantized}
    assert {"first.code", "other.graph", "other.code", "tied"} <= quantized.keys()
    assert quantized["other.graph"] == {"weight": "int8"}  # no batch has shown its inputs
    assert {p.name: p.reason for p in coverage.parameters}["first.weight"] == UNCALLED
    assert any("does not call first.code, other.graph, other.code and 1 more" in note for note in coverage.notes)
    qmodel.double().train()
    code = [*qmodel.source.modules()]
    assert all(module.training for module in code)
    assert {parameter.dtype for module in code for parameter in module.parameters()} == {torch.float64}
    qmodel(X[:2].double()).sum().backward()
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.1)
    before = {name: parameter.clone() for name, parameter in qmodel.source.named_parameters()}
    optimizer.step()
    still = {name for name, p in qmodel.source.named_parameters() if torch.equal(p, before[name])}
    assert {name for name in still if "quantizer" not in name} == {"other.graph.op.weight", "other.graph.op.bias"}


def test_batches_of_other_paths_calibrate_their_layers_also_in_order() -> None:
    model = ByIndex().eval()
    for asym in (False, True):
        qmodel = calibrated(model, [(X, 0), (X, 1)], qconfig(), asym=asym, example_inputs=(X, 0))
        assert qmodel.sites["grid.1.0.input"].is_calibrated and qmodel.sites["grid.1.0.input"].is_enable
        assert not qmodel.sites["grid.0.0.input"].is_enable  # which no call reaches


def test_a_model_without_values_is_refused_with_the_reason(tmp_path: Path) -> None:
    calibrated(nn.Sequential(_linear()), [X], example_inputs=(X,)).save(tmp_path / "saved")
    with torch.device("meta"):
        whole, part = nn.Sequential(_linear()), nn.Sequential(_linear())
    part[0].bias = nn.Parameter(torch.zeros(8))
    for model in (whole, part):
        with pytest.raises(CaptureError, match=r"on the meta device.*\(0\.weight"):
            QuantModel.load(tmp_path / "saved", model)
        with pytest.raises(CaptureError, match="on the meta device"):
            QuantModel(model, qconfig())
