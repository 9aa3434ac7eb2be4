from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import SpecError
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.speed.fused_layer import FusedLayer
from sparsebit.quantization.speed.fusion_guards import substitute_of
from tests.quantization.tiny import prepared

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(12, 6), (5, 12)),
    "tokens": (nn.Linear(12, 6, bias=False), (3, 5, 12)),
    "conv": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 8, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, dilation=2, groups=4, bias=False), (2, 4, 9, 9)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=2), (2, 4, 9)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 8, 8)),
}


def ready(layer: nn.Module, shape: tuple[int, ...], kind: str, device: str) -> QuantModel:
    config = {
        "DEVICE": device,
        "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": kind, "BIT": 4}},
    }
    qmodel = prepared(nn.Sequential(copy.deepcopy(layer)), [inputs(shape, device)], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train()


def inputs(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def layer_of(qmodel: QuantModel) -> WeightedQuantOpr:
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    return layer


def fused_layer(qmodel: QuantModel) -> FusedLayer:
    found = substitute_of(layer_of(qmodel))
    assert isinstance(found, FusedLayer)
    return found


def in_two_nodes(qmodel: QuantModel) -> QuantModel:
    """A quantizer with a hook is called."""
    qmodel = copy.deepcopy(qmodel)
    layer_of(qmodel).input_quantizer.register_forward_hook(lambda *call: None)
    return qmodel


def run(qmodel: QuantModel, x: Tensor, *, half: bool = False) -> dict[str, Tensor | None]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        y = qmodel(x)
    assert (type(y.grad_fn).__name__ == "_QuantizedLayerBackward") == (
        not layer_of(qmodel).input_quantizer._forward_hooks
    )
    y.float().square().sum().backward()
    return {"output": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in qmodel.named_parameters()}


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        assert value is None or (other is not None and torch.equal(value, other)), name


@pytest.mark.sample(21)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packs", [True, False], ids=["computed again", "kept"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact", "uniform"])
@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients_are_those_of_two_nodes(
    layer: str, kind: str, half: bool, packs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    shape = LAYERS[layer][1]
    fused = ready(*LAYERS[layer], kind, device)
    plain = in_two_nodes(fused)
    fused_layer(fused).packs = packs
    x = inputs(shape, device).requires_grad_()
    assert_equal(run(fused, x, half=half), run(plain, x, half=half))


@pytest.mark.parametrize("layer", ["tokens", "conv"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "scale", "x", "all but x"])
def test_what_has_no_gradient(frozen: str, layer: str) -> None:
    fused = ready(*LAYERS[layer], "lsq+", "cpu")
    x = inputs(LAYERS[layer][1], "cpu").requires_grad_(frozen != "x")
    for name, parameter in fused.named_parameters():
        if frozen == "all but x" or name.endswith(frozen):
            parameter.requires_grad_(False)
    assert_equal(run(fused, x), run(in_two_nodes(fused), x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, 3), (4, 8, 8)),
    ],
    ids=["same", "reflect", "no batch"],
)
def test_what_is_left_to_two_nodes(layer: nn.Module, shape: tuple[int, ...]) -> None:
    qmodel = ready(layer, shape, "lsq", "cpu")
    y = qmodel(inputs(shape, "cpu"))
    y.sum().backward()
    assert "_QuantizedLayer" not in type(y.grad_fn).__name__
    assert layer_of(qmodel).input_quantizer.scale.grad is not None


@pytest.mark.parametrize("method", ["forward", "fake_quantize", "transform"])
def test_a_method_of_ones_own_is_called(method: str) -> None:
    qmodel = ready(*LAYERS["linear"], "lsq", "cpu")
    quantizer = layer_of(qmodel).input_quantizer
    calls: list[Tensor] = []
    original = getattr(quantizer, method)

    def own(x: Tensor) -> Any:
        calls.append(x)
        return original(x)

    setattr(quantizer, method, own)
    qmodel(inputs((5, 12), "cpu"))
    assert len(calls) == 1


def test_hooks_on_all_modules_see_the_quantizer() -> None:
    qmodel = ready(*LAYERS["linear"], "lsq", "cpu")
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *call: seen.append(module))
    try:
        qmodel(inputs((5, 12), "cpu"))
    finally:
        handle.remove()
    assert layer_of(qmodel).input_quantizer in seen


def test_hooks_and_a_forward_of_the_layer_are_called() -> None:
    layer = nn.Linear(12, 6)
    calls: list[str] = []
    layer.register_full_backward_hook(lambda *call: calls.append("backward"))
    qmodel = ready(layer, (5, 12), "lsq", "cpu")
    qmodel(inputs((5, 12), "cpu").requires_grad_()).sum().backward()
    assert calls == ["backward"]
    op = layer_of(qmodel).op
    op._backward_hooks.clear()
    forward = op.forward
    op.forward = lambda x: calls.append("forward") or forward(x)  # type: ignore[func-returns-value,assignment]
    qmodel(inputs((5, 12), "cpu"))
    assert calls == ["backward", "forward"]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_output_may_be_changed_in_place(layer: str) -> None:
    qmodel = ready(*LAYERS[layer], "lsq", "cpu")
    x = inputs(LAYERS[layer][1], "cpu")
    y = qmodel(x)
    assert "_QuantizedLayer" in type(y.grad_fn).__name__
    y.add_(1).square().sum().backward()
    found = {name: parameter.grad for name, parameter in qmodel.named_parameters()}
    qmodel.zero_grad()
    (qmodel(x) + 1).square().sum().backward()
    assert_equal(found, {name: parameter.grad for name, parameter in qmodel.named_parameters()})


def test_nothing_more_is_kept_where_the_input_has_no_gradient() -> None:
    """The next batch may be copied into the memory of this one."""
    qmodel = ready(*LAYERS["conv"], "uniform", "cpu")
    x = inputs(LAYERS["conv"][1], "cpu")
    loss = qmodel(x).square().sum()
    x.zero_()
    loss.backward()


def test_a_frozen_linear_layer_keeps_no_copy() -> None:
    qmodel = ready(nn.Linear(256, 4), (64, 256), "lsq", "cpu")
    layer_of(qmodel).op.weight.requires_grad_(False)
    layer_of(qmodel).weight_quantizer.requires_grad_(False)
    assert kept_shapes(qmodel, torch.randn(64, 256)).count((64, 256)) == 1


def test_errors_name_the_site() -> None:
    qmodel = ready(*LAYERS["conv"], "lsq", "cpu")
    quantizer = layer_of(qmodel).input_quantizer
    quantizer.scale = nn.Parameter(torch.ones(5))
    quantizer.spec = quantizer.spec.replace(granularity=PerChannel(1))
    with pytest.raises(SpecError, match=r"0\.input: 5 scales"):
        qmodel(inputs(LAYERS["conv"][1], "cpu"))


@pytest.mark.parametrize(("x", "half"), [(torch.bfloat16, torch.float16), (torch.float64, torch.bfloat16)], ids=str)
def test_mixed_types_are_left_to_two_nodes(x: torch.dtype, half: torch.dtype) -> None:
    qmodel = ready(*LAYERS["linear"], "lsq", "cpu")
    with torch.autocast("cpu", half):
        op = layer_of(qmodel).op
        given = inputs((5, 12), "cpu").to(x)
        assert fused_layer(qmodel)._as_one_node(given, op.weight, op.bias, "lsq", "") is None  # type: ignore[arg-type]


def test_a_change_before_the_backward_is_refused() -> None:
    qmodel = ready(*LAYERS["conv"], "lsq", "cpu")
    loss = qmodel(inputs(LAYERS["conv"][1], "cpu")).sum()
    with torch.no_grad():
        layer_of(qmodel).input_quantizer.scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_second_derivatives_are_those_of_two_nodes(layer: str) -> None:
    fused = ready(*LAYERS[layer], "lsq", "cpu")
    x = inputs(LAYERS[layer][1], "cpu").requires_grad_()
    found = []
    for qmodel in (fused, in_two_nodes(fused)):
        bias = layer_of(qmodel).op.bias
        (grad,) = torch.autograd.grad(qmodel(x).exp().sum(), bias, create_graph=True)
        found += torch.autograd.grad(grad.sum(), bias)
        (grad,) = torch.autograd.grad(qmodel(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("packs", "num_kept"), [(True, 1), (False, 2)])
def test_the_quantized_copy_is_not_kept(packs: bool, num_kept: int) -> None:
    qmodel = ready(nn.Linear(256, 4), (64, 256), "lsq", "cpu")
    fused_layer(qmodel).packs = packs
    assert kept_shapes(qmodel, torch.randn(64, 256)).count((64, 256)) == num_kept


def kept_shapes(qmodel: QuantModel, x: Tensor) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        qmodel(x)
    return kept
