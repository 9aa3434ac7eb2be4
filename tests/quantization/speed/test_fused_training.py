"""What a GPU's kernels do on the way: activation functions in front of layers, and the parts of one product.

On a CPU triton's interpreter stands in for the GPU.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from sparsebit.numerics.fake_quant import operator
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.speed import fused_activations, stacked_selects
from sparsebit.quantization.speed.compiler import inductor_fusions
from sparsebit.quantization.speed.fused_activations import FusedActivation
from sparsebit.quantization.speed.stacked_fake_quant import Stack, fake_quantize_stacked
from sparsebit.quantization.speed.stacked_selects import StackedQuantizers
from tests.quantization.tiny import prepared


class Block(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(16, 40), activation, nn.Dropout(0.0), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        y = self.fc1(x)
        y = F.gelu(y) if self.act is None else self.act(y)
        return x + self.fc2(self.drop(y))  # type: ignore[no-any-return]


ACTIVATIONS = {"function": None, "gelu": nn.GELU(), "tanh": nn.GELU("tanh"), "silu": nn.SiLU()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        kernels = request.getfixturevalue("interpreted_kernels")["fake_quant"].KERNELS
        monkeypatch.setitem(operator.KERNELS, "cpu", kernels)
    return str(request.param)


def ready(device: str, activation: str = "gelu", kind: str = "lsq+") -> QuantModel:
    torch.manual_seed(0)
    activations = {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": kind, "BIT": 8}}
    config = {"DEVICE": device, "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}, "A": activations}
    qmodel = prepared(Block(copy.deepcopy(ACTIVATIONS[activation])), [tokens(device)], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train()


def tokens(device: str, batch: int = 3) -> Tensor:
    return torch.randn(batch, 5, 16, generator=torch.Generator().manual_seed(1)).to(device)


def without_fusions(patch: pytest.MonkeyPatch) -> None:
    for module in (fused_activations, stacked_selects):
        patch.setattr(module, "fuses", lambda x: False)


Step = TypeVar("Step", FusedActivation, StackedQuantizers)


def step_of(qmodel: QuantModel, kind: type[Step]) -> Step:
    qmodel.train()
    assert qmodel.qat.fused is not None
    (found,) = (step for step in qmodel.qat.fused.steps if isinstance(step, kind))
    return found


def step(qmodel: QuantModel, x: Tensor) -> tuple[dict[str, Tensor], list[str]]:
    """Values and gradients, and the nodes that gave them."""
    qmodel.zero_grad()
    output = qmodel(x)
    nodes = [type(node).__name__ for node in walk(output.grad_fn)]
    output.square().sum().backward()
    grads = {name: param.grad.clone() for name, param in qmodel.named_parameters() if param.grad is not None}
    return {"output": output.detach(), **grads}, nodes


def walk(node: Any) -> Iterator[Any]:
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [next_node for next_node, _ in node.next_functions]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-3 * float(value.norm()) + 1e-5, name


@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        pytest.param(activation, kind, marks=[pytest.mark.slow] * (kind != "lsq" or activation != "gelu"))
        for activation in ACTIVATIONS
        for kind in ("lsq", "lsq+", "uniform")
    ],
)
def test_values_and_gradients_stay(device: str, activation: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = ready(device, activation, kind)
    found, nodes = step(qmodel, tokens(device))
    assert "_FakeQuantizeStackedBackward" in nodes and not any("Gelu" in name or "Silu" in name for name in nodes)
    with monkeypatch.context() as patch:
        without_fusions(patch)
        expected, nodes = step(qmodel, tokens(device))
    assert "_FakeQuantizeStackedBackward" not in nodes and any("Gelu" in name or "Silu" in name for name in nodes)
    assert_close(found, expected)


@pytest.mark.parametrize("activation", [pytest.param("gelu", marks=pytest.mark.slow), "function"])
def test_packed(device: str, activation: str) -> None:
    expected, _ = step(ready(device, activation), tokens(device))
    for pack_first in (True, False):
        qmodel = ready(device, activation)
        if pack_first:
            qmodel.eval().pack_saved_activations()
            qmodel.train()
        else:
            qmodel.pack_saved_activations()
        found, nodes = step(qmodel, tokens(device))
        assert "_FakeQuantizeStackedBackward" in nodes and "GeluBackward0" not in nodes
        assert_close(found, expected)


def test_whoever_watches_is_told(device: str) -> None:
    qmodel = ready(device)
    calls: list[str] = []
    watched = {"act": qmodel.model.get_submodule("act"), "part": step_of(qmodel, StackedQuantizers).readers[1]}
    handles = [
        module.register_forward_hook(lambda *call, name=name: calls.append(name)) for name, module in watched.items()
    ]
    _, nodes = step(qmodel, tokens(device))
    assert sorted(calls) == ["act", "part"] and "GeluBackward0" in nodes and "_FakeQuantizeStackedBackward" not in nodes
    for handle in handles:
        handle.remove()
    _, nodes = step(qmodel, tokens(device))
    assert len(calls) == 2 and "GeluBackward0" not in nodes


def test_what_is_no_training_calls_the_function(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, x = ready(device), tokens(device)
    expected = step(qmodel, x)[0]["output"]
    calls: list[int] = []
    act = qmodel.model.get_submodule("act")
    monkeypatch.setattr(type(act), "forward", lambda self, x: (calls.append(1), F.gelu(x))[1])
    with torch.no_grad():
        torch.testing.assert_close(qmodel(x), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(qmodel.eval()(x), expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 2
    qmodel.train()
    qmodel(x)
    assert len(calls) == 2
    qmodel.model.get_submodule("drop").p = 0.5
    qmodel(x)
    assert len(calls) == 3


def test_a_reader_whose_weight_is_not_quantized_calls_the_function(device: str) -> None:
    qmodel, x = ready(device), tokens(device)
    expected = step(qmodel, x)[0]["output"]
    qmodel.set_quant(w_quant=False, a_quant=True)
    found, nodes = step(qmodel, x)
    assert "GeluBackward0" in nodes
    assert float((found["output"] - expected).norm()) < 0.05 * float(expected.norm())


def test_a_forward_that_fails_leaves_nothing_behind(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, x = ready(device), tokens(device)
    expected, _ = step(qmodel, x)
    reader = step_of(qmodel, FusedActivation).reader
    with monkeypatch.context() as patch:
        patch.setattr(reader.weight_quantizer, "forward", lambda weight: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            qmodel(x)
    assert_close(step(qmodel, x)[0], expected)
    pickle.loads(pickle.dumps(reader.input_quantizer.state_dict()))
    assert copy.deepcopy(qmodel).get_submodule("model").training and pickle.dumps(reader.input_quantizer)


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc1(x))
        x = x * 2 if x.shape[0] > 4 else x
        return self.fc2(y) + x  # type: ignore[no-any-return]


def test_a_guard_between_function_and_reader(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    learned = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    config = parse_qconfig({"DEVICE": device, "W": learned, "A": learned})
    qmodel = prepared(Guarded(), [torch.randn(4, 8, device=device)], config, example_inputs=torch.randn(4, 8))
    qmodel.init_QAT()
    x = torch.randn(6, 8, device=device)
    found = qmodel.train()(x)
    without_fusions(monkeypatch)
    torch.testing.assert_close(found, qmodel(x), rtol=1e-4, atol=1e-4)


def test_replicas_and_patched_readers_call_the_function(device: str) -> None:
    qmodel, x = ready(device), tokens(device)
    reader = step_of(qmodel, FusedActivation).reader
    part = step_of(qmodel, StackedQuantizers).readers[0]
    reader.__dict__["_is_replica"] = part.__dict__["_is_replica"] = True  # as `nn.DataParallel` marks its copies
    _, nodes = step(qmodel, x)
    assert "GeluBackward0" in nodes and "_FakeQuantizeStackedBackward" not in nodes
    del reader.__dict__["_is_replica"]
    own = reader.forward
    reader.forward = lambda *args: own(*args)
    assert "GeluBackward0" in step(qmodel, x)[1]


def test_double_precision_is_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, x = ready(device).double(), tokens(device).double()
    found, _ = step(qmodel, x)
    without_fusions(monkeypatch)
    expected, _ = step(qmodel, x)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Selects(nn.Module):
    def __init__(self, indices: tuple[int, ...]) -> None:
        super().__init__()
        self.fc, self.indices = nn.Linear(4, 24), indices
        with torch.no_grad():
            self.fc.weight[16:] *= 10

    def forward(self, x: Tensor) -> Tensor:
        whole = self.fc(x).reshape(x.shape[0], 3, 2, 4)
        q, k, v = (whole.select(1, index) for index in self.indices)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.sample(2)
@pytest.mark.parametrize("indices", [(0, 1, 2), (2, 0, 1), (0, 1, -1), (-1, -2, -3)], ids=str)
def test_parts_in_any_order(device: str, indices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    learned = {"QUANTIZER": {"TYPE": "lsq", "BIT": 8}}
    qmodel = QuantModel(Selects(indices), parse_qconfig({"DEVICE": device, "W": learned, "A": learned}))
    x = torch.randn(5, 4, device=device)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.train()
    found, nodes = step(qmodel, x)
    assert ("_FakeQuantizeStackedBackward" in nodes) == (min(indices) >= 0)
    without_fusions(monkeypatch)
    assert_close(found, step(qmodel, x)[0])


def test_a_part_that_nobody_learns_from(device: str) -> None:
    """Its numbers get no gradient, not one of zero, which an optimizer would take for a step."""
    x = torch.randn(4, 3, 8, device=device, requires_grad=True)
    scales = [torch.tensor([0.1 * (place + 1)], device=device, requires_grad=True) for place in range(3)]
    zero_points = [torch.zeros(1, device=device) for _ in scales]
    q, k, _ = fake_quantize_stacked(x, Stack(1, -8, 7, "lsq", "q\nk\nv"), scales, zero_points)
    (q * k).sum().backward()
    assert [scale.grad is None for scale in scales] == [False, False, True]
    assert x.grad is not None and not x.grad[:, 2].any() and x.grad[:, :2].any()


@pytest.mark.parametrize(
    "activation", ["gelu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("silu", "function"))]
)
def test_a_trained_model_becomes_a_file(device: str, activation: str, tmp_path: Path) -> None:
    qmodel, x = ready(device, activation), tokens(device)
    step(qmodel, x)
    parity = qmodel.eval().export_onnx(x, tmp_path / "a.onnx", ["x"], check=[x.cpu()])
    assert parity is not None
    assert "scaled_dot_product_attention_input_0" in qmodel.dump_mermaid()


def test_what_is_written_into_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_fusions, "shows_kernels", lambda x: True)
    number = torch.tensor([0.1], requires_grad=True)
    for is_written in (False, True):
        graph = fx.Graph()
        x, scale, zero_point = (graph.placeholder(name) for name in ("x", "scale", "zero_point"))
        x.meta["example_value"] = torch.randn(4, requires_grad=True)
        scale.meta["example_value"] = zero_point.meta["example_value"] = number
        y = graph.call_function(F.gelu, (x,))
        if is_written:
            graph.call_method("add_", (x, 1.0))
        graph.output(graph.call_function(operator.OPERATOR, (y, scale, zero_point, None, 0, 0, 15, "lsq", "a")))
        inductor_fusions.FuseQuantizers()(graph)
        targets = [node.target for node in graph.nodes]
        assert (torch.ops.sparsebit.fake_quantize_activated.default in targets) == (not is_written)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler on a CPU takes the operators that it would be shown kernels for on a GPU."""
    monkeypatch.setattr(inductor_fusions, "shows_kernels", lambda x: True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    ("device", "activation"),
    [
        pytest.param("cpu", "gelu", marks=pytest.mark.slow),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ACTIVATIONS),
    ],
)
def test_compiled(device: str, activation: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in this process: reset() leaves them
    qmodel = ready(device, activation)
    compiled = copy.deepcopy(qmodel)
    compiled.compile(fullgraph=True)
    for batch in (3, 4, 7):  # from the second on the size is a symbol
        assert_close(step(compiled, tokens(device, batch))[0], step(qmodel, tokens(device, batch))[0])
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


@pytest.mark.slow  # two minutes of compiling
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_compiled_step_calls(device: str) -> None:
    torch._dynamo.reset()
    qmodel, x = ready(device), tokens(device)
    qmodel.compile(fullgraph=True)
    _, codes = run_and_get_code(lambda: qmodel(x).square().sum().backward())
    code = "\n".join(codes)
    operators = [f"torch.ops.sparsebit.fake_quantize_{kind}.default(" for kind in ("stacked", "activated")]
    kernels = ("forward_stacked", "backward_stacked", "forward_rows", "backward_rows")
    assert [name in code for name in operators] == [device == "cpu"] * 2
    assert [bool(re.search(rf"\b{name}_\d+\.run\(", code)) for name in kernels] == [device == "cuda"] * 4
    assert not re.search(r"= extern_kernels\.\w*gelu", code)
