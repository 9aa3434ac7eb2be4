"""Every operator with a row, in files of one node: `load_onnx` compares each with ONNX Runtime itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from sparsebit.deploy.loading.building.operator_table import OPERATORS
from sparsebit.deploy.sessions.runtime_sessions import open_session
from tests.deploy.loading.test_load_onnx import loaded, made, node

IMAGE, ROWS = ["n", 4, 6, 8], ["n", 6]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# op, inputs, attributes, constants, shape of x
Case = tuple[str, str, dict[str, Any], dict[str, Any], list[Any]]
PLAIN = [
    "Neg", "Abs", "Exp", "Sign", "Floor", "Ceil", "Round", "Erf", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh",
    "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid", "HardSwish",
    "ThresholdedRelu", "Softmax", "LogSoftmax", "Identity", "ReduceMax", "ReduceMin",
    "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "GlobalAveragePool", "GlobalMaxPool",
    "Flatten", "Transpose", "Hardmax", "Shrink", "LpNormalization", "MeanVarianceNormalization",
]  # fmt: skip
W34, W4, V4, V6 = weights(4, 4, 3, 3), weights(4, 1, 3, 3), weights(4), weights(6)
POSITIVE = V4.abs() + 0.5
CASES: list[Case] = [
    *((op, "x", {}, {}, IMAGE) for op in PLAIN),
    *((op, "x k", {}, {"k": weights(6, 8)}, IMAGE) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum")),
    *((op, "k x", {}, {"k": torch.tensor(2.0)}, ROWS) for op in ("Add", "Sub", "Mul", "Div")),
    ("ReduceProd", "x", {}, {}, ROWS), ("Pow", "x k", {}, {"k": torch.tensor(2.0)}, ROWS), ("Pow", "x k", {},
     {"k": torch.full((6,), 3.0)}, ROWS),
    ("Mod", "x k", {"fmod": 1}, {"k": torch.tensor(0.7)}, ROWS),
    ("Clip", "x a b", {}, {"a": torch.tensor(0.0), "b": torch.tensor(6.0)}, ROWS),
    ("Clip", "x a", {}, {"a": torch.tensor(-0.5)}, ROWS),
    ("PRelu", "x k", {}, {"k": weights(4, 1, 1)}, IMAGE), ("PRelu", "x k", {}, {"k": weights(1)}, IMAGE),
    ("PRelu", "x k", {}, {"k": weights(4, 6, 8)}, IMAGE), ("PRelu", "x k", {}, {"k": weights(6)}, ROWS),
    ("Softmax", "x", {"axis": 1}, {}, IMAGE), ("Flatten", "x", {"axis": 3}, {}, IMAGE),
    ("Flatten", "x", {"axis": 0}, {}, IMAGE), ("CumSum", "x a", {}, {"a": torch.tensor(1)}, ROWS),
    ("CumSum", "x a", {"reverse": 1, "exclusive": 1}, {"a": torch.tensor(1)}, ROWS),
    ("Einsum", "x k", {"equation": "ni, ij -> nj"}, {"k": weights(6, 3)}, ROWS),
    ("Trilu", "x", {"upper": 0}, {}, IMAGE), ("Conv", "x w b", {}, {"w": W34, "b": V4}, IMAGE),
    ("Conv", "x w", {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}, {"w": W4}, IMAGE),
    ("Conv", "x w", {"pads": [0, 1, 2, 1], "dilations": [2, 1]}, {"w": W34}, IMAGE),
    ("Conv", "x w", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"w": W34}, IMAGE),
    ("Conv", "x w", {"auto_pad": "SAME_LOWER"}, {"w": weights(4, 4, 2, 2)}, IMAGE),
    ("ConvTranspose", "x w b", {"strides": [2, 2]}, {"w": W34, "b": V4}, IMAGE),
    ("ConvTranspose", "x w", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}, {"w": W34}, IMAGE),
    ("ConvTranspose", "x w", {"pads": [0, 0, 1, 2]}, {"w": W34}, IMAGE),
    ("ConvTranspose", "x w", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"w": W34}, IMAGE),
    ("Gemm", "x w b", {"transB": 1}, {"w": weights(5, 6), "b": weights(5)}, ROWS),
    ("Gemm", "x w b", {"alpha": 0.5, "beta": 2.0}, {"w": weights(6, 5), "b": weights(1, 5)}, ROWS),
    ("Gemm", "x w b", {}, {"w": weights(6, 5), "b": weights(1)}, ROWS),
    ("MatMul", "w x", {}, {"w": weights(3, 6)}, IMAGE),
    ("MatMul", "x w", {}, {"w": weights(8, 3)}, IMAGE), ("MatMul", "x w", {}, {"w": weights(4, 8, 3)}, IMAGE),
    ("BatchNormalization", "x s b m v", {}, {"s": V4, "b": V4, "m": V4, "v": POSITIVE}, IMAGE),
    ("BatchNormalization", "x s b m v", {"epsilon": 0.1}, {"s": V6, "b": V6, "m": V6, "v": V6.abs()}, ROWS),
    ("InstanceNormalization", "x s b", {}, {"s": V4, "b": V4}, IMAGE),
    ("LayerNormalization", "x s b", {"axis": -1}, {"s": V6, "b": V6}, ROWS),
    ("LayerNormalization", "x s", {"axis": 2}, {"s": weights(6, 8)}, IMAGE),
    ("LayerNormalization", "x s", {"axis": 1}, {"s": weights(8)}, IMAGE), ("LRN", "x", {"size": 3}, {}, IMAGE),
    ("Dropout", "x", {}, {}, IMAGE), ("MaxPool", "x", {"kernel_shape": [3, 3], "strides": [2, 2]}, {}, IMAGE),
    ("MaxPool", "x", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}, {}, IMAGE),
    ("MaxPool", "x", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "dilations": [2, 2]}, {}, IMAGE),
    ("AveragePool", "x", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, {}, IMAGE),
    ("AveragePool", "x", {"kernel_shape": [3, 3], "pads": [0, 1, 2, 1]}, {}, IMAGE),
    ("AveragePool", "x", {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER", "count_include_pad": 1}, {}, IMAGE),
    ("Reshape", "x s", {}, {"s": ints(0, -1, 2)}, IMAGE), ("Reshape", "x s", {}, {"s": ints(-1, 48)}, IMAGE),
    ("Squeeze", "x a", {}, {"a": ints(1)}, ["n", 1, 6]), ("Unsqueeze", "x a", {}, {"a": ints(0, -1)}, ROWS),
    ("Concat", "x x", {"axis": -1}, {}, ROWS), ("Concat", "x k", {"axis": 2}, {"k": weights(1, 4, 2, 8)}, [1, 4, 6, 8]),
    ("Slice", "x s e a", {}, {"s": ints(1), "e": ints(2**31 - 1), "a": ints(-1)}, IMAGE),
    ("Slice", "x s e a t", {}, {"s": ints(-1), "e": ints(-(2**62)), "a": ints(3), "t": ints(-2)}, IMAGE),
    ("Slice", "x s e a t", {}, {"s": ints(0, 5), "e": ints(3, 1), "a": ints(1, 3), "t": ints(2, -1)}, IMAGE),
    ("Gather", "x i", {"axis": 1}, {"i": torch.tensor(-1)}, IMAGE),
    ("Gather", "x i", {"axis": 3}, {"i": ints(5, -2)}, IMAGE),
    ("Gather", "x i", {"axis": 1}, {"i": torch.tensor([[0, 1], [2, -1]])}, IMAGE),
    ("GatherElements", "x i", {"axis": 1}, {"i": torch.tensor([[0, -1], [2, 3]])}, [2, 6]),
    ("GatherND", "x i", {}, {"i": torch.tensor([[0, 1], [1, -1]])}, [2, 6]),
    ("ScatterND", "x i u", {}, {"i": torch.tensor([[0], [1]]), "u": weights(2, 6)}, [3, 6]),
    ("ScatterElements", "x i u", {"axis": 1}, {"i": torch.tensor([[0, -1]]), "u": weights(1, 2)}, [3, 6]),
    ("Expand", "x s", {}, {"s": ints(3, 1, 6)}, [1, 6]), ("Expand", "x s", {}, {"s": ints(2, 1)}, [1, 6]),
    ("Tile", "x s", {}, {"s": ints(1, 2, 1, 3)}, IMAGE),
    ("Pad", "x p k", {}, {"p": ints(0, 0, 1, 2, 0, 0, 3, 0), "k": torch.tensor(1.5)}, IMAGE),
    ("Pad", "x p", {"mode": "reflect"}, {"p": ints(0, 0, 1, 2, 0, 0, 3, 0)}, IMAGE),
    ("Pad", "x p", {"mode": "edge"}, {"p": ints(0, 1, 0, 2)}, ROWS),
    ("Pad", "x p", {}, {"p": ints(0, -1, 0, 2)}, ROWS),
    ("DepthToSpace", "x", {"blocksize": 2}, {}, IMAGE),
    ("DepthToSpace", "x", {"blocksize": 2, "mode": "CRD"}, {}, IMAGE),
    ("SpaceToDepth", "x", {"blocksize": 2}, {}, IMAGE), ("TopK", "x k", {}, {"k": ints(2)}, ROWS),
    *(("Resize", "x r s", {"mode": mode, "coordinate_transformation_mode": how, "nearest_mode": rounding},
       {"r": torch.zeros(0), "s": torch.tensor([1.0, 1.0, 2.0, 1.5])}, IMAGE)
      for mode, how, rounding in (
          ("nearest", "asymmetric", "floor"), ("nearest", "half_pixel", "round_prefer_floor"),
          ("nearest", "align_corners", "round_prefer_ceil"), ("nearest", "asymmetric", "ceil"),
          ("linear", "half_pixel", "floor"), ("linear", "align_corners", "floor"), ("linear", "asymmetric", "floor"),
          ("linear", "pytorch_half_pixel", "floor"), ("cubic", "half_pixel", "floor"),
          ("cubic", "align_corners", "floor"),
          ("cubic", "asymmetric", "floor"),
      )),
    ("ReduceMean", "x", {"axes": [1, -1], "keepdims": 0}, {}, IMAGE), ("ReduceSum", "x a", {}, {"a": ints(2)}, IMAGE),
    ("GRU", "x w r b", {"hidden_size": 5, "linear_before_reset": 1},
     {"w": weights(1, 15, 6), "r": weights(1, 15, 5), "b": weights(1, 30)}, [7, 2, 6]),
    ("LSTM", "x w r b", {"hidden_size": 5, "direction": "bidirectional"},
     {"w": weights(2, 20, 6), "r": weights(2, 20, 5), "b": weights(2, 40)}, [7, 2, 6]),
    ("RNN", "x w r", {"hidden_size": 5}, {"w": weights(1, 5, 6), "r": weights(1, 5, 5)}, [7, 2, 6]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2].values()))}")
def test_computes_what_onnx_runtime_computes(case: Case, tmp_path: Path) -> None:
    op, inputs, attributes, constants, shape = case
    outputs = "values y" if op == "TopK" else "y"
    model = made([node(op, inputs, outputs, **attributes)], constants, shape=shape)
    if op == "TopK":
        model.graph.output[0].name, model.graph.output[0].type.tensor_type.elem_type = "values", 1
    loaded(model, tmp_path)


NEWER: list[tuple[Case, int]] = [
    (("Gelu", "x", {}, {}, ROWS), 20), (("Gelu", "x", {"approximate": "tanh"}, {}, ROWS), 20),
    (("GroupNormalization", "x s b", {"num_groups": 2}, {"s": V4, "b": V4}, IMAGE), 21),
    (("Mish", "x", {}, {}, ROWS), 18), (("Split", "x", {"axis": 1, "num_outputs": 3}, {}, ROWS), 18),
    (("ReduceMean", "x a", {}, {"a": ints(1)}, IMAGE), 18), (("RMSNormalization", "x s", {}, {"s": V6}, ROWS), 23),
    (("Pad", "x p k a", {}, {"p": ints(1, 2), "k": torch.tensor(0.0), "a": ints(-1)}, IMAGE), 18),
]  # fmt: skip
OLDER: list[tuple[Case, int]] = [
    (("Softmax", "x", {"axis": 1}, {}, IMAGE), 11), (("Squeeze", "x", {"axes": [1]}, {}, ["n", 1, 6]), 11),
    (("Unsqueeze", "x", {"axes": [1]}, {}, ROWS), 11), (("ReduceSum", "x", {"axes": [1]}, {}, ROWS), 11),
    (("Split", "x", {"axis": 1, "split": [2, 4]}, {}, ROWS), 11), (("LogSoftmax", "x", {}, {}, ROWS), 12),
    (("Clip", "x a", {}, {"a": torch.tensor(0.0)}, ROWS), 11),
]  # fmt: skip


@pytest.mark.parametrize(("case", "opset"), NEWER + OLDER, ids=lambda one: one[0] if isinstance(one, tuple) else one)
def test_of_other_opsets(case: Case, opset: int, tmp_path: Path) -> None:
    op, inputs, attributes, constants, shape = case
    outputs = {"Split-18": "y b c", "Split-11": "y b"}.get(f"{op}-{opset}", "y")
    loaded(made([node(op, inputs, outputs, **attributes)], constants, shape=shape, opset=opset), tmp_path)


OPEN: list[tuple[Case, int]] = [
    (("Conv", "x w", {"auto_pad": "SAME_UPPER", "strides": [2, 3]}, {"w": W34}, ["n", 4, "h", "w"]), 17),
    (("Conv", "x w", {"auto_pad": "SAME_LOWER"}, {"w": weights(4, 4, 2, 2)}, ["n", 4, "h", 9]), 17),
    (("MaxPool", "x", {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
     {}, ["n", 2, "h", "w"]), 13),
    (("AveragePool", "x", {"kernel_shape": [3, 3], "pads": [0, 1, 2, 1]}, {}, ["n", 2, "h", "w"]), 13),
    (("Resize", "x r s", {"mode": "linear"},
      {"r": torch.zeros(0), "s": torch.tensor([1.0, 1.0, 1.5, 0.7])}, ["n", 2, "h", "w"]), 13),
    (("Slice", "x s e a t", {}, {"s": ints(-1), "e": ints(-(2**63)), "a": ints(1), "t": ints(-2)}, ["n", "t", 3]), 13),
    (("Gather", "x i", {"axis": 1}, {"i": ints(-1, 0)}, ["n", "t", 3]), 13),
    (("GatherElements", "x i", {"axis": 1}, {"i": torch.tensor([[0, -1]])}, [1, "t"]), 13),
    (("GatherND", "x i", {"batch_dims": 1}, {"i": torch.tensor([[[0], [-1]]])}, [1, "t", 3]), 13),
    (("Split", "x", {"axis": 1}, {}, ["n", "t"]), 13), (("Softmax", "x", {"axis": 1}, {}, ["n", "t", "u", 2]), 11),
    (("Squeeze", "x", {}, {}, ["n", 1, 3]), 13), (("Squeeze", "x a", {}, {"a": ints()}, ["n", 1, 3]), 13),
    (("Expand", "x s", {}, {"s": ints(3)}, ["n", "t", 3]), 13),
    (("Expand", "x s", {}, {"s": ints(1, 1)}, ["n", 3]), 13),
    (("DepthToSpace", "x", {"blocksize": 2}, {}, ["n", 4, "h", "w"]), 13),
    (("ConvTranspose", "x w", {"strides": [2, 2], "pads": [3, 0, 0, 1]}, {"w": W34}, ["n", 4, "h", "w"]), 17),
    (("LSTM", "x w r", {"hidden_size": 5, "direction": "reverse"},
     {"w": weights(1, 20, 6), "r": weights(1, 20, 5)}, ["t", "n", 6]), 14),
]  # fmt: skip


@pytest.mark.parametrize(("case", "opset"), OPEN, ids=lambda one: one[0] if isinstance(one, tuple) else str(one))
@pytest.mark.parametrize("size", [2, 5])
def test_open_sizes_stay_open(case: Case, opset: int, size: int, tmp_path: Path) -> None:
    """`load_onnx` itself compares other sizes; here the example's sizes and then more are given."""
    op, inputs, attributes, constants, shape = case
    model = made([node(op, inputs, "y b" if op == "Split" else "y", **attributes)], constants, shape=shape, opset=opset)
    batch = [axis if isinstance(axis, int) else 2 * size for axis in shape]
    module = loaded(model, tmp_path, [torch.randn(batch)])
    session = open_session(tmp_path / "made.onnx", optimize=False)
    for other in (4, 6, 8, 12):
        x = torch.randn([axis if isinstance(axis, int) else other for axis in shape])
        (expected, *_), found = session.run({"x": x.numpy()}), module(x)
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_top_k_has_an_onnx_form(tmp_path: Path) -> None:
    """torch.sort(stable=True) would keep equal elements in order, and cannot be exported again."""
    model = made([node("TopK", "x k", "v y")], {"k": ints(4)}, shape=["n", 40])
    model.graph.output[0].type.tensor_type.elem_type = 7
    module = loaded(model, tmp_path)
    assert isinstance(module, torch.fx.GraphModule) and "torch.topk" in module.code
    assert module(torch.arange(40.0)[None]).tolist() == [[39, 38, 37, 36]]


@pytest.mark.parametrize(
    "case",
    [
        ("Conv", "x w", {"pads": [0, 0, 2, 1], "group": 2}, {"w": weights(6, 2, 3, 2)}, IMAGE),
        ("ConvTranspose", "x w", {"output_shape": [13, 15], "strides": [2, 2]}, {"w": W34}, IMAGE),
        ("ConvTranspose", "x w", {"pads": [2, 0, 0, 2], "output_padding": [1, 1], "strides": [2, 2]},
         {"w": W34}, IMAGE),
        ("MaxPool", "x", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER", "ceil_mode": 1},
         {}, IMAGE),
        ("RNN", "x w r", {"hidden_size": 5, "activations": ["Relu"]},
         {"w": weights(1, 5, 6), "r": weights(1, 5, 5)}, [7, 2, 6]),
        ("LSTM", "x w r b  h", {"hidden_size": 5},
         {"w": weights(1, 20, 6), "r": weights(1, 20, 5), "b": weights(1, 40), "h": weights(1, 2, 5)}, [7, 2, 6]),
        ("Resize", "x r s", {"mode": "cubic", "exclude_outside": 1},
         {"r": torch.zeros(0), "s": torch.tensor([1.0, 1.0, 2.0, 1.5])}, IMAGE),
        ("Greater", "k x", {}, {"k": torch.tensor(0.3)}, ROWS), ("Less", "x k", {}, {"k": torch.tensor(0.3)}, ROWS),
        ("Slice", "x s e a t", {}, {"s": ints(-100), "e": ints(-200), "a": ints(1), "t": ints(-1)}, [2, 5]),
    ],
    ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2].values()))}",
)  # fmt: skip
def test_rare_attributes(case: Case, tmp_path: Path) -> None:
    op, inputs, attributes, constants, shape = case
    model = made([helper.make_node(op, inputs.split(" "), ["y"], "n", **attributes)], constants, shape=shape)
    if op in ("Greater", "Less"):
        model.graph.output[0].type.tensor_type.elem_type = 9
    loaded(model, tmp_path)


@pytest.mark.parametrize(("divisor", "wanted"), [(2, [0, -1, -2]), (-2, [0, 1, 2])])
def test_the_quotient_of_sizes_is_rounded_to_zero(divisor: int, wanted: list[int], tmp_path: Path) -> None:
    """(3 - size) / 2 of the sizes 3, 5 and 8: Python would round -2.5 down."""
    nodes = [
        node("Shape", "x", "s", end=1), node("Sub", "three s", "d"), node("Div", "d two", "q"), node("Relu", "x", "r"),
        node("Identity", "q"),
    ]  # fmt: skip
    model = made(nodes, {"three": ints(3), "two": ints(divisor)}, shape=["n", 2])
    model.graph.output[0].type.tensor_type.elem_type = 7
    module = loaded(model, tmp_path)
    assert [int(module(torch.zeros(size, 2))) for size in (3, 5, 8)] == wanted


def test_most_rows_are_tested() -> None:
    tested = {case[0] for case in CASES} | {case[0] for case, _ in NEWER + OLDER}
    names = {name for domain, name in OPERATORS if not domain}
    assert len(names - tested) < 55, sorted(names - tested)


def test_sizes_stay_dynamic(tmp_path: Path) -> None:
    """Shape, Gather, Unsqueeze, Concat, Mul and Reshape of sizes, as exporters write them for a dynamic batch."""
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Gather", "s one", "c"), node("Mul", "c two", "d"),
        node("Unsqueeze", "n axes", "n1"), node("Unsqueeze", "d axes", "d1", name="second"),
        node("Concat", "n1 d1 minus", "target", axis=0), node("Reshape", "x target", "r"),
        node("ConstantOfShape", "n1", "z", name="fill"), node("Unsqueeze", "z two1", "z2", name="third"),
        node("Add", "r z2"),
    ]  # fmt: skip
    for place, one in enumerate(nodes):
        one.name = f"n{place}"
    constants = {
        "zero": torch.tensor(0), "one": torch.tensor(1), "two": torch.tensor(2), "axes": ints(0), "minus": ints(-1),
        "two1": ints(1, 2),
    }  # fmt: skip
    model = loaded(made(nodes, constants, shape=["n", 4, 6]), tmp_path)
    for size in (1, 2, 5):
        assert model(torch.randn(size, 4, 6)).shape == (size, 8, 3)


def test_expanded_to_a_size_that_is_read(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n four", "t", axis=0),
        node("Expand", "k t", "e"), node("Add", "x e"),
    ]  # fmt: skip
    constants = {"zero": ints(0), "four": ints(4), "k": weights(1, 4)}
    model = loaded(made(nodes, constants, shape=["n", 4]), tmp_path)
    assert model(torch.zeros(3, 4)).shape == (3, 4)


def test_joined_groups_are_one_operator(tmp_path: Path) -> None:
    """The nodes of a LayerNormalization and a Gelu before their opsets."""
    nodes = [
        node("ReduceMean", "x", "m", axes=[-1]), node("Sub", "x m", "c"), node("Pow", "c two", "q"),
        node("ReduceMean", "q", "v", axes=[-1]), node("Add", "v eps", "e"), node("Sqrt", "e", "r"),
        node("Div", "c r", "d"), node("Mul", "d w", "s"), node("Add", "s b", "y1"),
        node("Div", "y1 root", "g1"), node("Erf", "g1", "g2"), node("Add", "g2 unit", "g3"), node("Mul", "y1 g3", "g4"),
        node("Mul", "g4 half", "y"),
    ]  # fmt: skip
    for place, one in enumerate(nodes):
        one.name = f"n{place}"
    numbers = {"two": 2.0, "eps": 1e-6, "root": 2**0.5, "unit": 1.0, "half": 0.5}
    constants = {"w": V6, "b": V6, **{name: torch.tensor(value) for name, value in numbers.items()}}
    model = loaded(made(nodes, constants, shape=ROWS, opset=13), tmp_path)
    assert [type(m) for m in model.children()] == [nn.LayerNorm]
    assert "gelu" in str(model.code) and "sqrt" not in str(model.code)
