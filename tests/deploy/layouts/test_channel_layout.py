"""Channels in the multiples that ONNX Runtime's fast integer kernels need: the same codes, other shapes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from sparsebit.deploy.comparing.divergence import site_differences
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.deploy.sessions.runtime_sessions import EXACT, open_session
from sparsebit.errors import DeploymentError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting import export
from sparsebit.quantization.exporting.export_checks import check_parity
from sparsebit.quantization.exporting.stored_parameters import simulated_codes
from tests.deploy.exported_files import initializers, op_types
from tests.parameters import first_fast
from tests.quantization.tiny import calibrated, qconfig


def relu_conv(inside: int, outside: int, kernel: int = 1, groups: int = 1, **settings: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, kernel, padding=kernel // 2, groups=groups, **settings), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Gated(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.down, self.up = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(torch.relu(self.down(self.pool(x)))))


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Layer -> the shape of its stored weight."""
    stored = initializers(file).items()
    return {name.removesuffix(".weight/codes"): array.shape for name, array in stored if name.endswith("weight/codes")}


def both(
    model: nn.Module, images: Tensor, folder: Path, *, traces_twice: bool = False, **changes: Any
) -> tuple[Path, Path, QuantModel]:
    """The file with the layout, which passes the parity gate, and the one without.

    Both are made of one trace, which comes before any layout, unless `traces_twice`.
    """
    files = []
    trace: Any = export.trace_onnx if traces_twice else shared(export.trace_onnx)
    for is_on in (True, False):
        settings = {f"SCHEDULE.{key}": True for key in ("FUSE_BN",)} | {"SCHEDULE.PAD_CHANNELS": is_on, **changes}
        qmodel = calibrated(model, [images], qconfig(settings, backend="onnxruntime"))
        files.append(folder / f"{is_on}.onnx")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "trace_onnx", trace)
            qmodel.export_onnx(images, files[-1], check=[images] if is_on else None)
    return files[0], files[1], qmodel


def shared(trace: Any) -> Any:
    """Traces at the first call alone, and gives a copy at each."""
    traced: list[tuple[onnx.ModelProto, int]] = []

    def copied(*args: Any, **kwargs: Any) -> tuple[ir.Model, int]:
        if not traced:
            model, opset = trace(*args, **kwargs)
            traced.append((ir.serde.serialize_model(model), opset))
        stored, opset = traced[0]
        return ir.serde.deserialize_model(stored), opset

    return copied


def same(first: Path, second: Path, images: Tensor, **settings: Any) -> bool:
    sessions = [open_session(file, **settings) for file in (first, second)]
    found = [session.run({session.inputs[0]: images.numpy()}) for session in sessions]
    return all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def images(channels: int = 4, size: int = 10) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


NETS: dict[str, tuple[nn.Module, dict[str, tuple[int, ...]]]] = {}


def net(name: str, *layers: nn.Module, **expected: tuple[int, ...]) -> None:
    NETS[name] = nn.Sequential(*layers), {key.replace("_", "."): shape for key, shape in expected.items()}


torch.manual_seed(0)
net(
    "depthwise", relu_conv(4, 20), relu_conv(20, 20, 3, 20), nn.Conv2d(20, 8, 1),
    **{"0_0": (32, 4, 1, 1), "1_0": (32, 1, 3, 3), "2": (8, 32, 1, 1)},
)  # fmt: skip
net(
    "gate", relu_conv(4, 24), relu_conv(24, 24, 3, 24), Gated(24), nn.Conv2d(24, 8, 1),
    **{"1_0": (32, 1, 3, 3), "2_down": (4, 32, 1, 1), "2_up": (32, 4, 1, 1), "3": (8, 32, 1, 1)},
)  # fmt: skip
net(
    "residual", relu_conv(4, 20), Residual(relu_conv(20, 20, 3, 20), nn.Conv2d(20, 20, 1)), nn.Conv2d(20, 8, 1),
    **{"0_0": (32, 4, 1, 1), "1_layers_0_0": (32, 1, 3, 3), "1_layers_1": (32, 32, 1, 1), "2": (8, 32, 1, 1)},
)  # fmt: skip
net(
    "smooth activations", nn.Conv2d(4, 18, 1), nn.Hardswish(), nn.Conv2d(18, 18, 3, groups=18), nn.SiLU(),
    nn.MaxPool2d(2), nn.Conv2d(18, 8, 1), **{"0": (32, 4, 1, 1), "2": (32, 1, 3, 3), "5": (8, 32, 1, 1)},
)  # fmt: skip
net("few input channels", relu_conv(4, 10), nn.Conv2d(10, 8, 3), **{"0_0": (12, 4, 1, 1), "1": (8, 12, 3, 3)})
net("groups to one", relu_conv(4, 24), relu_conv(24, 24, 3, 3), nn.Conv2d(24, 8, 1), **{"1_0": (24, 24, 3, 3)})
net(
    "groups joined", relu_conv(4, 80), relu_conv(80, 80, 3, 10), nn.Conv2d(80, 8, 1),
    **{"0_0": (96, 4, 1, 1), "1_0": (96, 32, 3, 3), "2": (8, 96, 1, 1)},
)  # fmt: skip
net(
    "groups with more outputs",
    relu_conv(4, 96),
    relu_conv(96, 192, 3, 12),
    nn.Conv2d(192, 8, 1),
    **{"1_0": (192, 32, 3, 3)},
)
net("few channels stay", relu_conv(4, 8), relu_conv(8, 8, 3, 8), nn.Conv2d(8, 8, 1), **{"1_0": (8, 1, 3, 3)})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NETS)
def test_the_codes_stay_and_the_shapes_fit_the_kernels(name: str, tmp_path: Path) -> None:
    model, expected = NETS[name]
    first, second, _ = both(model, images(), tmp_path)
    found = shapes(first)
    assert {layer: found[layer] for layer in expected} == expected
    for settings in ({}, {"optimize": False}):
        assert same(first, second, images(), **settings)
    onnx.checker.check_model(str(first), full_check=True)  # the shapes that it notes fit those it infers


@pytest.mark.parametrize("channels", first_fast([3, 2, 1]))
def test_an_image_gets_a_fourth_channel(channels: int, tmp_path: Path) -> None:
    model = nn.Sequential(relu_conv(channels, 8, 3), nn.Conv2d(8, 4, 1))
    first, second, _ = both(model, images(channels), tmp_path)
    assert shapes(first)["0.0"] == (8, 4, 3, 3) and op_types(first)["Pad"] == 1
    assert same(first, second, images(channels))
    twin = open_session(float_twin(first).SerializeToString()).run({"input": images(channels).numpy()})
    other = open_session(float_twin(second).SerializeToString()).run({"input": images(channels).numpy()})
    np.testing.assert_allclose(twin[0], other[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kernel", "outputs"), [(16, 64), pytest.param(6, 16, marks=pytest.mark.slow)])
def test_large_kernels_read_the_image_as_it_is(kernel: int, outputs: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, outputs, kernel, stride=kernel), nn.ReLU(), nn.Conv2d(outputs, 4, 1))
    first, *_ = both(model, images(3, 32), tmp_path)
    assert "Pad" not in op_types(first)


class Shuffled(nn.Module):
    """Channels that are joined, cut, given out or multiplied one by one: their number is fixed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.deep, self.last = relu_conv(4, 20), relu_conv(20, 20, 3, 20), nn.Conv2d(20, 8, 1)
        self.factors = nn.Parameter(torch.rand(1, 20, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.deep(self.first(x))
        if self.kind == "joined":
            return self.last(torch.cat([y[:, :8], y[:, 8:]], 1))
        if self.kind == "shuffled":
            return self.last(y.view(len(y), 4, 5, *y.shape[2:]).transpose(1, 2).reshape(y.shape))
        if self.kind == "given out":
            return self.last(y), y
        if self.kind == "summed":
            return self.last(y - y.mean(1, keepdim=True))
        if self.kind == "normed":
            return self.last(torch.softmax(y, 1))
        return self.last(torch.tanh(y) * self.factors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_fast(["joined", "shuffled", "given out", "summed", "normed", "factors"], 3))
def test_channels_that_something_counts_are_left_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second, _ = both(Shuffled(kind), images(), tmp_path)
    assert shapes(first)["deep.0"] == (20, 1, 3, 3)
    assert same(first, second, images())


class Again(nn.Module):
    """One layer is called twice, so its weight has two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep, self.last = relu_conv(4, 20), relu_conv(20, 20, 3, 20), nn.Conv2d(20, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.deep(self.deep(self.first(x))))
        return y


def test_a_layer_that_is_called_twice_is_left_alone(tmp_path: Path) -> None:
    first, second, _ = both(Again(), images(), tmp_path)
    assert shapes(first)["deep.0"] == (20, 1, 3, 3) and same(first, second, images())


def test_a_float_depthwise_layer_is_left_alone(tmp_path: Path) -> None:
    model, _ = NETS["depthwise"]
    off = [{"1.0": ["QUANTIZER.DISABLE", True]}]
    first, _, _ = both(model, images(), tmp_path, **{"W.SPECIFIC": off, "A.SPECIFIC": off})
    assert shapes(first)["0.0"] == (20, 4, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openvino", "tensorrt", "virtual"])
def test_files_for_other_runtimes_are_as_they_were(backend: str, tmp_path: Path) -> None:
    model, _ = NETS["depthwise"]
    calibrated(model, [images()], qconfig(backend=backend)).export_onnx(images(), tmp_path / "m.onnx")
    assert shapes(tmp_path / "m.onnx")["1.0"] == (20, 1, 3, 3)


def test_all_sites_are_compared_with_the_simulation(tmp_path: Path) -> None:
    """Those whose tensors have more channels in the file too."""
    first, second, qmodel = both(NETS["gate"][0], images(), tmp_path)
    expected, _ = simulated_codes(qmodel, ((images(),), {}))
    feeds = {"input": images().numpy()}
    found, plain = (
        site_differences(file, "onnxruntime", feeds, expected, options=EXACT["onnxruntime"]) for file in (first, second)
    )
    assert [one.site for one in found] == [one.site for one in plain] != []
    assert not any(one.largest for one in found)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_changed_number_in_a_wider_tensor_is_found(part: str, tmp_path: Path) -> None:
    first, _, _ = both(NETS["groups joined"][0], images(), tmp_path)
    qmodel = calibrated(NETS["groups joined"][0], [images()], qconfig(backend="onnxruntime"))
    model = onnx.load(str(first))
    tensor = next(one for one in model.graph.initializer if one.name == f"1.0.weight/{part}")
    array = numpy_helper.to_array(tensor).copy()
    place = tuple(int(index[0]) for index in np.nonzero(array))
    array[place] = 2 if part == "scale" else -array[place]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, str(first))
    with pytest.raises(DeploymentError, match=rf"1\.0\.weight/{part}"):
        check_parity(qmodel, first, [images()])


def random_net(draw: random.Random) -> nn.Module:
    layers: list[nn.Module] = []
    channels = draw.choice([1, 3, 4])
    for _ in range(draw.randint(3, 6)):
        kind = draw.choice(["dense", "depthwise", "groups", "residual", "gate", "pool"])
        act = draw.choice([nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.Identity, nn.Sigmoid])
        norm = [nn.BatchNorm2d] if draw.random() < 0.4 else []
        if kind == "dense":
            wide = draw.choice([6, 13, 20, 24, 40])
            layers += [nn.Conv2d(channels, wide, draw.choice([1, 3]), padding=1, bias=draw.random() < 0.7)]
            channels = wide
        elif kind == "depthwise":
            layers += [nn.Conv2d(channels, channels, 3, padding=1, groups=channels)]
        elif kind == "groups":
            groups = draw.choice([one for one in range(1, channels + 1) if channels % one == 0])
            wide = groups * draw.choice([1, 2, 3])
            layers += [nn.Conv2d(channels, wide, 3, padding=1, groups=groups)]
            channels = wide
        elif kind == "residual":
            layers += [Residual(relu_conv(channels, channels, 3, channels), nn.Conv2d(channels, channels, 1))]
        elif kind == "gate":
            layers += [Gated(channels)]
        else:
            layers += [draw.choice([nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)])]
        layers += [*(one(channels) for one in norm), act()]
    return nn.Sequential(*layers, nn.Conv2d(channels, 4, 1)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_fast(range(60)))
def test_random_networks_compute_the_same(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model = random_net(random.Random(seed))
    inside = next(module for module in model.modules() if isinstance(module, nn.Conv2d)).in_channels
    first, second, _ = both(model, images(inside), tmp_path, traces_twice=True)
    assert same(first, second, images(inside)) and same(first, second, images(inside), optimize=False)
