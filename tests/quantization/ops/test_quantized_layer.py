from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(12, 6), (5, 12)),
    "tokens": (nn.Linear(12, 6, bias=False), (3, 5, 12)),
    "conv": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 8, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, dilation=2, groups=4, bias=False), (2, 4, 9, 9)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=2), (2, 4, 9)),
}


def ready(layer: nn.Module, shape: tuple[int, ...], kind: str, device: str) -> QuantModel:
    config = {
        "DEVICE": device,
        "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": kind, "BIT": 4}},
    }
    qmodel = QuantModel(nn.Sequential(copy.deepcopy(layer)), parse_qconfig(config))
    qmodel.prepare_calibration()
    qmodel(inputs(shape, device))
    qmodel.init_QAT()
    return qmodel.train()


def inputs(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def layer_of(qmodel: QuantModel) -> WeightedQuantOpr:
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    return layer


def in_two_nodes(qmodel: QuantModel) -> QuantModel:
    """Where someone watches the quantizer it is called."""
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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept_below", [0, math.inf], ids=["computed again", "kept"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact", "uniform"])
@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients_are_those_of_two_nodes(
    layer: str, kind: str, half: bool, kept_below: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    shape = LAYERS[layer][1]
    fused = ready(*LAYERS[layer], kind, device)
    plain = in_two_nodes(fused)
    layer_of(fused).kept_below = kept_below
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
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 8, 8)),
    ],
    ids=["same", "reflect", "no batch", "transposed"],
)
def test_what_is_left_to_two_nodes(layer: nn.Module, shape: tuple[int, ...]) -> None:
    qmodel = ready(layer, shape, "lsq", "cpu")
    y = qmodel(inputs(shape, "cpu"))
    y.sum().backward()
    assert "_QuantizedLayer" not in type(y.grad_fn).__name__
    assert layer_of(qmodel).input_quantizer.scale.grad is not None


def test_a_quantizer_of_ones_own_is_called() -> None:
    qmodel = ready(*LAYERS["linear"], "lsq", "cpu")
    quantizer = layer_of(qmodel).input_quantizer
    calls = []
    forward = quantizer.forward
    quantizer.forward = lambda x: calls.append(x) or forward(x)  # type: ignore[method-assign,func-returns-value]
    qmodel(inputs((5, 12), "cpu"))
    assert len(calls) == 1


def test_a_change_before_the_backward_is_refused() -> None:
    qmodel = ready(*LAYERS["conv"], "lsq", "cpu")
    loss = qmodel(inputs(LAYERS["conv"][1], "cpu")).sum()
    with torch.no_grad():
        layer_of(qmodel).input_quantizer.scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_is_differentiable_once() -> None:
    qmodel = ready(*LAYERS["linear"], "lsq", "cpu")
    x = inputs((5, 12), "cpu").requires_grad_()
    (grad,) = torch.autograd.grad(qmodel(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(("kept_below", "num_kept"), [(0.0, 1), (math.inf, 2)])
def test_the_quantized_copy_is_not_kept(kept_below: float, num_kept: int) -> None:
    qmodel = ready(nn.Linear(256, 4), (64, 256), "lsq", "cpu")
    layer_of(qmodel).kept_below = kept_below
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        qmodel(torch.randn(64, 256, requires_grad=True))
    assert kept.count((64, 256)) == num_kept
