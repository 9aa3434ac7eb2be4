"""A saved folder holds the structure of the graphs: a class whose forward differs is an error that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """Runs its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y if float(y.sum()) < 1e9 else y * 2


class Net(nn.Module):
    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), Inner()
        self.pool = nn.AvgPool1d(2, stride)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inner(torch.relu(self.b(self.a(x)) * self.scale)))  # type: ignore[no-any-return]


class Swapped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inner(torch.relu(self.a(self.b(x)) * self.scale)))  # type: ignore[no-any-return]


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inner(torch.relu(self.b(self.a(x)) * self.scale) + x))  # type: ignore[no-any-return]


class Tanh(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inner(torch.tanh(self.b(self.a(x)) * self.scale)))  # type: ignore[no-any-return]


class Operands(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.inner(torch.relu(self.scale - self.b(self.a(x)))))  # type: ignore[no-any-return]


class OtherLiteral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.25


class OtherInner(Inner):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y if float(y.sum()) < 1e9 else y * 3


class OtherCode(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OtherInner()


class Renamed(Net):
    """The same function in other words."""

    def forward(self, values: Tensor) -> Tensor:
        """With a docstring."""
        hidden = self.b(self.a(values))
        hidden = torch.relu(hidden * self.scale)
        return self.pool(self.inner(hidden))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structure") / "saved"
    return calibrated(Net().eval(), [X], example_inputs=(X,)).save(path)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (Swapped, "saved `a = a: Linear("),
        (Residual, "given `add = add(relu, input0)`"),
        (Tanh, r"saved `relu = relu(mul)`"),
        (Operands, "saved `mul = mul(b, 0.5)`"),
        (OtherLiteral, "saved `mul = mul(b, 0.5)`, given `mul = mul(b, 0.25)`"),
        (lambda: Net(stride=2), "stride=(1))(inner)`, given"),
        (OtherCode, "inner runs its own code, and that differs"),
    ],
)
def test_another_forward_is_an_error_that_shows_the_difference(folder: Path, model: Any, shown: str) -> None:
    with pytest.raises(CheckpointError, match="given differs from that of the model that was saved") as error:
        QuantModel.load(folder, model())
    assert shown in str(error.value) and str(folder) in str(error.value)


@torch.no_grad()
def test_the_same_function_loads_in_other_words_and_for_another_batch_size(folder: Path) -> None:
    expected = QuantModel.load(folder, Net())(X)
    assert torch.equal(QuantModel.load(folder, Renamed())(X), expected)
    assert torch.equal(QuantModel.load(folder, Net(), example_inputs=(X[:2],))(X), expected)
    other = calibrated(Net().eval(), [X], qconfig(backend="onnxruntime"), example_inputs=(X[:3],))
    assert other.built.structure == json.loads((folder / "sparsebit.json").read_text())["graphs"]


class Opaque(nn.Module):
    """Runs its own code around a layer."""

    def __init__(self, layer: nn.Module, scale: float = 0.5, function: Any = torch.relu) -> None:
        super().__init__()
        self.layer, self.scale, self.function, self.calls = layer, scale, function, 0
        self.places = torch.eye(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.function(self.layer(x)) @ self.places
        return y if float(y.sum()) > 1e9 else y * self.scale


def _flipped() -> nn.Module:
    model = Opaque(nn.LeakyReLU(0.1))
    model.places = model.places.flip(0)
    return model


class Permuted(nn.Module):
    """Two constants with equal sums, also when the elements are weighted by their places."""

    def __init__(self, places: tuple[int, int]) -> None:
        super().__init__()
        self.fc, self.pool, self.places = nn.Linear(8, 8), nn.AdaptiveAvgPool1d([4]), torch.zeros(8)
        self.places[list(places)] = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.fc(x) * torch.tensor(self.places.tolist()))  # type: ignore[no-any-return]


def _twice(_: Any, __: Any, output: Tensor) -> Tensor:
    return output * 2


def _thrice(_: Any, __: Any, output: Tensor) -> Tensor:
    return output * 3


def _hooked(hook: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(hook)
    return model


def _pooled(size: int) -> nn.Module:
    model = Permuted((1, 4))
    model.pool = nn.AdaptiveAvgPool1d([size])
    return model


OTHERS: dict[str, tuple[Any, Any]] = {
    "slope": (lambda: Opaque(nn.LeakyReLU(0.1)), lambda: Opaque(nn.LeakyReLU(0.2))),
    "layer": (lambda: Opaque(nn.ReLU()), lambda: Opaque(nn.Tanh())),
    "value": (lambda: Opaque(nn.ReLU()), lambda: Opaque(nn.ReLU(), 0.25)),
    "function": (lambda: Opaque(nn.ReLU()), lambda: Opaque(nn.ReLU(), function=torch.tanh)),
    "tensor": (lambda: Opaque(nn.LeakyReLU(0.1)), _flipped),
    "constant": (lambda: Permuted((1, 4)), lambda: Permuted((2, 3))),
    "list": (lambda: _pooled(4), lambda: _pooled(2)),
    "hook": (lambda: _hooked(_twice), lambda: _hooked(_thrice)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_settings_of_what_no_graph_calls_are_an_error(name: str, tmp_path: Path) -> None:
    make, other = OTHERS[name]
    torch.manual_seed(0)
    qmodel = calibrated(make().eval(), [X], example_inputs=(X,))
    qmodel.save(tmp_path / "saved")
    assert torch.equal(QuantModel.load(tmp_path / "saved", make())(X), qmodel(X))
    with pytest.raises(CheckpointError, match="given differs from that of the model that was saved"):
        QuantModel.load(tmp_path / "saved", other())


@pytest.mark.slow
def test_the_lines_are_the_same_in_another_process(folder: Path) -> None:
    code = (
        "from tests.graph.test_structure import *; import json; "
        "print(json.dumps(QuantModel(Net().eval(), qconfig(), example_inputs=(X,)).built.structure))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == json.loads((folder / "sparsebit.json").read_text())["graphs"]
