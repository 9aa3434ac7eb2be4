from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.deploy.exporting.to_onnx import OnnxOptions, flat_inputs, flat_outputs, in_order, input_names, to_onnx
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError, MissingExtraError

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    scores: Tensor
    boxes: Tensor


class Nested(nn.Module):
    def forward(self, batch: dict[str, Tensor], pair: Any, *, factor: float = 1.0) -> dict[str, Any]:
        total = batch["x"] + pair[0]["y"]
        return {"total": total * factor, "more": [total + 1, (pair[1],)]}


class Keywords(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        x = x if mask is None else torch.where(mask, x, torch.zeros_like(x))
        return x if ids is None else x[ids]


class Outputs(nn.Module):
    """Outputs of every form at once; the second input is not used."""

    def forward(self, x: Tensor, unused: Tensor) -> Any:
        y = x * 2
        return {
            "x": y,  # like an input
            "named": Pair(y, x + 1),
            "record": Record(y - 1, x + 2),
            "twice": [y, y],
            "passed_through": x,
            "small": (y.sum(), y.argmax(1), y > 0, 3, None),
        }


def export(module: nn.Module, *args: Any, folder: Path, kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """The module as a file, open in ONNX Runtime."""
    signature = inspect.signature(module.forward)
    model = to_onnx(module, args, kwargs or {}, options=OnnxOptions(**options), signature=signature)
    ir.save(model, folder / "m.onnx")
    return open_session(folder / "m.onnx")


def check(session: Any, module: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """The session gives what the module gives, to the type and shape."""
    tensors = flat_inputs(args, kwargs or {})
    found = session.run({name: tensor.numpy() for name, tensor in zip(session.inputs, tensors, strict=True)})
    expected = flat_outputs(module(*args, **(kwargs or {})))
    for mine, theirs in zip(expected, found, strict=True):
        assert mine.numpy().dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert np.allclose(mine.numpy(), theirs, atol=1e-5)


NESTED = ({"x": X}, ({"y": X + 1}, X * 2))


@pytest.mark.parametrize("form", ["positional", "keywords"])
def test_nested_inputs_and_outputs_are_flat_and_readable(form: str, tmp_path: Path) -> None:
    args: tuple[Any, ...] = NESTED if form == "positional" else ()
    kwargs = {"factor": 3.0} if form == "positional" else {"batch": NESTED[0], "pair": NESTED[1]}
    session = export(Nested(), *args, folder=tmp_path, kwargs=kwargs)
    assert session.inputs == ("batch.x", "pair.0.y", "pair.1")
    assert session.outputs == ("total", "more.0", "more.1.0")
    check(session, Nested(), *args, kwargs=kwargs)


def test_keyword_inputs_of_other_types(tmp_path: Path) -> None:
    kwargs = {"mask": X > 0, "ids": torch.tensor([1, 0, 1])}
    session = export(Keywords(), X, folder=tmp_path, kwargs=kwargs)
    assert session.inputs == ("x", "mask", "ids")
    assert session.input_types == {"x": "float32", "mask": "bool", "ids": "int64"}
    check(session, Keywords(), X, kwargs=kwargs)


def test_outputs_of_every_form(tmp_path: Path) -> None:
    module = Outputs()
    session = export(module, X, X, folder=tmp_path)
    assert session.inputs == ("x", "unused")
    assert session.outputs == (
        *("output.x", "named.left", "named.right", "record.scores", "record.boxes", "twice.0", "twice.1"),
        *("passed_through", "small.0", "small.1", "small.2"),
    )
    check(session, module, X, X + 1)


def test_the_output_class_of_transformers(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Encoder(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))

    session = export(Encoder(), X, folder=tmp_path)
    assert session.outputs == ("last_hidden_state", "hidden_states.0", "hidden_states.1")
    check(session, Encoder(), X)


def test_what_is_like_a_mapping_is_entered() -> None:
    class Bag:
        def keys(self) -> list[str]:
            return ["left", "right"]

        def __getitem__(self, key: str) -> Tensor:
            return X if key == "left" else X + 1

    assert [bool(torch.equal(tensor, X)) for tensor in flat_outputs(Bag())] == [True, False]


def test_a_class_that_the_user_registered_is_entered() -> None:
    class Only:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    pytree.register_pytree_node(Only, lambda only: ([only.tensor], None), lambda tensors, _: Only(*tensors))
    assert [tensor is X for tensor in flat_outputs({"boxes": Only(X), "x": X + 1})] == [True, False]


def test_one_tensor_given_twice_stays_two_inputs(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return values[0] + 2 * values[1]

    session = export(Sum(), X, X, folder=tmp_path)
    assert session.inputs == ("values.0", "values.1")
    check(session, Sum(), X, X + 1)


def test_names_of_the_user_win_over_those_inside(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.fc(x), torch.relu(self.fc(x))

    module = Layer()
    # What the exporter calls its own values and weights.
    session = export(module, X, folder=tmp_path, input_names=["module.fc.weight"], output_names=["relu", "linear"])
    assert (session.inputs, session.outputs) == (("module.fc.weight",), ("relu", "linear"))
    found = session.run({"module.fc.weight": X.numpy()})
    with torch.no_grad():
        assert all(np.allclose(a.numpy(), b, atol=1e-5) for a, b in zip(module(X), found, strict=True))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + (self.mix(x) @ x.transpose(1, 2)).softmax(-1) @ x


def test_dynamic_batch_and_sequence(tmp_path: Path) -> None:
    module, ids = Sequence().eval(), torch.randint(0, 20, (2, 7))
    session = export(module, ids, folder=tmp_path, dynamic_axes={"ids": {0: "batch", 1: "tokens"}})
    assert session.input_shapes == {"ids": (None, None)}
    for shape in ((2, 7), (5, 3), (1, 1)):
        with torch.no_grad():
            check(session, module, torch.randint(0, 20, shape))


def test_dynamic_image_sizes(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    images = torch.randn(2, 3, 8, 8)
    session = export(module, images, folder=tmp_path, dynamic_axes={"input": [0, 2, -1]})
    assert session.input_shapes == {"input": (None, 3, None, None)}
    with torch.no_grad():
        check(session, module, torch.randn(3, 3, 13, 16))


def test_a_batch_of_one_may_be_dynamic_too(tmp_path: Path) -> None:
    session = export(nn.Linear(6, 2), X[:1], folder=tmp_path, dynamic_axes={"input": {0: "n"}, "output": {0: "n"}})
    assert session.run({"input": np.zeros((9, 6), np.float32)})[0].shape == (9, 2)


@pytest.mark.parametrize("opset", [18, 25])
def test_opsets(opset: int) -> None:
    model = to_onnx(
        nn.Linear(6, 2), (X,), {}, OnnxOptions(opset_version=opset), signature=inspect.signature(nn.Linear.forward)
    )
    assert model.opset_imports[""] == opset


def test_a_call_without_tensors_is_refused() -> None:
    with pytest.raises(DeploymentError, match="holds no tensor"):
        to_onnx(nn.Identity(), (3,), {}, signature=inspect.signature(nn.Identity.forward))


def test_tensors_in_a_class_of_the_users_are_not_baked_in() -> None:
    class Box(nn.Module):
        def forward(self, x: Tensor, record: Record) -> Tensor:
            return x + record.boxes

    with pytest.raises(DeploymentError, match="an argument of type Record holds tensors"):
        to_onnx(Box(), (X, Record(X, X)), {}, signature=inspect.signature(Box.forward))


def test_a_model_without_tensors_in_its_output_is_refused() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> int:
            return x.shape[0]

    with pytest.raises(DeploymentError, match="output holds no tensor"):
        to_onnx(Counts(), (X,), {}, signature=inspect.signature(Counts.forward))


def test_the_mode_of_every_module_stays() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5).train()).eval()
    module[1].train()
    to_onnx(module, (X,), {}, signature=inspect.signature(nn.Sequential.forward))
    assert [part.training for part in module.modules()] == [False, False, True]


def test_keywords_in_the_order_of_the_signature() -> None:
    signature = inspect.signature(Keywords.forward)
    ordered = in_order({"more": 1, "ids": 2, "x": 3}, signature)
    assert list(ordered) == ["x", "ids", "more"]
    assert input_names((X,), {"ids": X}, inspect.signature(Keywords().forward)) == ["x", "ids"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnx_ir"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(MissingExtraError, match=rf"{package.replace('_', '-')}.*pip install "):
        to_onnx(nn.Identity(), (X,), {}, signature=inspect.signature(nn.Identity.forward))


def test_an_interrupt_that_torch_turns_into_an_error_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Failed to decompose") from TypeError(
            'failed to unpack pos 1 with error "KeyboardInterrupt"'
        )

    monkeypatch.setattr(torch.onnx, "export", interrupted)
    model = nn.Linear(2, 2)
    with pytest.raises(KeyboardInterrupt):
        to_onnx(model, (torch.zeros(1, 2),), {}, signature=inspect.signature(model.forward))
