from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.graph.ops.op_rows import ROWS, OpKind
from sparsebit.graph.ops.op_table import (
    QMODULE_MAP,
    input_argument,
    row_of_module,
    row_of_name,
    tensor_arguments,
    weight_argument,
)


def test_every_source_is_listed_once() -> None:
    sources = [source for row in ROWS for source in {*row.modules, *row.functions, *row.methods, *row.names}]
    assert len(sources) == len(set(sources))
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_float_rows_say_why() -> None:
    assert all(bool(row.reason) == (row.kind is OpKind.FLOAT) for row in ROWS)


def test_methods_exist() -> None:
    names = [method for row in ROWS for method in row.methods if not method.startswith("__")]
    assert [name for name in names if not hasattr(torch.Tensor, name)] == []


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, {0: 1, 1: 2}),
        ((1,), {"other": 2}, {0: 1, "other": 2}),
        ((), {"other": 2, "input": 1, "alpha": 3}, {"input": 1, "other": 2}),
    ],
)
def test_tensor_arguments(args: tuple[int, ...], kwargs: dict[str, int], expected: dict[int | str, int]) -> None:
    assert tensor_arguments(QMODULE_MAP[torch.add], args, kwargs) == expected


def test_varargs() -> None:
    assert tensor_arguments(QMODULE_MAP[torch.einsum], ("ij,jk", 1, 2), {}) == {1: 1, 2: 2}


def test_input_argument() -> None:
    relu, linear, embedding = QMODULE_MAP[F.relu], QMODULE_MAP[nn.Linear], QMODULE_MAP[nn.Embedding]
    assert input_argument(relu, (1,), {}, is_module=False) == 0
    assert input_argument(relu, (), {"input": 1}, is_module=False) == "input"
    assert input_argument(linear, (), {"features": 1}, is_module=True) == "features"
    assert input_argument(linear, (), {"scale": 2, "input": 1}, is_module=True) == "input"
    assert input_argument(relu, (), {"features": 1}, is_module=False) is None
    assert input_argument(embedding, (1,), {}, is_module=True) is None
    assert input_argument(QMODULE_MAP[torch.addmm], (0, 1, 2), {}, is_module=False) == 1


def test_weight_argument() -> None:
    assert weight_argument(QMODULE_MAP[F.conv2d], (0, 1, 2), {}) == 1
    assert weight_argument(QMODULE_MAP[F.conv2d], (0,), {"weight": 1}) == "weight"
    assert weight_argument(QMODULE_MAP[torch.addmm], (0, 1, 2), {}) == 2
    assert weight_argument(QMODULE_MAP[F.conv2d], (0,), {}) is None


def test_a_childless_subclass_is_its_base() -> None:
    class Same(nn.Conv2d): ...

    class Padded(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(3, 4, 3)
            self.pad = nn.ZeroPad2d(1)

    assert row_of_module(Same(3, 4, 3)) is QMODULE_MAP[nn.Conv2d]
    assert row_of_module(Padded()) is None
    assert row_of_module(nn.Module()) is None


def test_names_of_other_packages() -> None:
    assert row_of_name("DropPath") is row_of_name("stochastic_depth") is QMODULE_MAP[F.dropout]
    assert row_of_name("Other") is None
