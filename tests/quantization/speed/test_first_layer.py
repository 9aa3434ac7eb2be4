from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.speed import fused_layer
from sparsebit.quantization.speed.first_layer import FREE_CHANNELS, first_layer
from tests.quantization.tiny import prepared

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS: dict[str, Callable[[], nn.Conv2d]] = {
    "stem": lambda: nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
    "reflecting": lambda: nn.Conv2d(2, 6, 3, padding="same", padding_mode="reflect"),
    "patches": lambda: nn.Conv2d(3, 8, (4, 2), stride=(4, 2)),
}
Found = dict[str, Tensor]


@pytest.fixture
def free_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FREE_CHANNELS, "cpu", 8)


def ready(name: str, kind: str = "lsq", device: str = "cpu", bits: int = 4) -> tuple[QuantModel, Tensor]:
    """With images that reach beyond the grid on both sides."""
    config = {
        "DEVICE": device,
        "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": bits}},
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": kind, "BIT": bits}},
    }
    torch.manual_seed(0)
    layer = LAYERS[name]()
    images = torch.randn(4, layer.in_channels, 16, 16).to(device)
    qmodel = prepared(nn.Sequential(layer), [images / 1.5], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train(), images


def layer_of(qmodel: QuantModel) -> WeightedQuantOpr:
    (layer,) = (module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr))
    return layer


def step(qmodel: QuantModel, images: Tensor, *, half: bool = False, call: nn.Module | None = None) -> Found:
    qmodel.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        output = (qmodel if call is None else call)(images)
    output.float().sin().sum().backward()
    grads = {
        name: parameter.grad.clone() for name, parameter in qmodel.named_parameters() if parameter.grad is not None
    }
    return {"output": output.detach().float(), **grads}


def stepped_plainly(
    qmodel: QuantModel, images: Tensor, monkeypatch: pytest.MonkeyPatch, *, half: bool = False
) -> Found:
    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "first_layer", lambda *call: None)
        return step(qmodel, images, half=half)


def assert_close(found: Found, expected: Found, *, half: bool = False) -> None:
    """In half precision sums over all images have errors of a few percent, whichever way they are taken."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 1e-4 if not half else 0.15 if "input_quantizer" in name else 3e-2
        assert (found[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.usefixtures("free_channels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_layer(
    name: str, kind: str, half: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setitem(FREE_CHANNELS, "cuda", 9)
    monkeypatch.setitem(FREE_CHANNELS, "cpu", 9)
    qmodel, images = ready(name, kind, device)
    if kind == "pact":
        images = images * 10  # its threshold is not found by calibration
    layer = layer_of(qmodel)
    quantizer = layer.input_quantizer
    found = first_layer(layer.op, quantizer, images, layer.op.weight, layer.op.bias, quantizer.GRADIENT)
    assert found is not None
    expected = stepped_plainly(qmodel, images, monkeypatch, half=half)
    learned = [number for number in expected if "input_quantizer" in number]
    assert learned and all(expected[number].abs().max() > 0 for number in learned)
    assert_close(step(qmodel, images, half=half), expected, half=half)


@pytest.mark.usefixtures("free_channels")
def test_a_scale_below_zero_and_images_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, images = ready("stem")
    with torch.no_grad():
        layer_of(qmodel).input_quantizer.scale.neg_()
        images[0, 0, 0, 0] = torch.inf
    expected = stepped_plainly(qmodel, images, monkeypatch)
    assert expected["model.0.input_quantizer.scale"].isfinite().all()
    assert_close(step(qmodel, images), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("free_channels")
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_for_batches_of_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    qmodel, images = ready(name)
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(qmodel, backend=counting, fullgraph=True)
    for size in (4, 3, 2):
        expected = stepped_plainly(qmodel, images[:size], monkeypatch)
        assert_close(step(qmodel, images[:size], call=compiled), expected)  # type: ignore[arg-type]
    assert len(graphs) == 2  # one more for all sizes


@pytest.mark.usefixtures("free_channels")
def test_where_nothing_is_gained() -> None:
    qmodel, images = ready("stem")
    layer = layer_of(qmodel)

    def found(x: Tensor, op: nn.Module = layer.op) -> Tensor | None:
        return first_layer(op, layer.input_quantizer, x, op.weight, op.bias, "lsq")  # type: ignore[arg-type]

    assert found(images) is not None
    assert found(images.clone().requires_grad_()) is None
    assert found(torch.randn(2, 5, 16, 16), nn.Conv2d(5, 4, 3)) is None  # twice five channels are more than eight
    assert found(torch.randn(2, 4, 16, 16), nn.Conv2d(4, 4, 3, groups=2)) is None
    assert found(images[0]) is None
    assert found(images.double()) is None
    layer.input_quantizer.scale.requires_grad_(False)
    assert found(images) is None


def test_a_hook_on_the_quantizer_is_called() -> None:
    qmodel, images = ready("patches")
    calls: list[Tensor] = []
    layer_of(qmodel).input_quantizer.register_forward_hook(lambda module, args, output: calls.append(output))
    qmodel(images)
    assert len(calls) == 1


def test_patches_that_do_not_fill_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, images = ready("patches")
    images = images[:, :, :15]
    assert torch.equal(step(qmodel, images)["output"], stepped_plainly(qmodel, images, monkeypatch)["output"])
