from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sparsebit.deploy.audit.tensorrt_rules import tensorrt_violations
from sparsebit.deploy.onnx_graph import model_file
from sparsebit.errors import CalibrationError, DeploymentError, MissingExtraError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting.export import export_call
from tests.deploy.exported_files import EXACT, differences, initializers, op_types, opset, types, worst
from tests.quantization.tiny import ConvBnRelu, Opaque, Residual, TwoLayers, calibrated, qconfig

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 10, (2, 7), generator=torch.Generator().manual_seed(0))


# --- layers


class Convolutions(nn.Module):
    """Every kind of convolution on one image, each with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2)
        self.bare = nn.Conv2d(4, 6, 1, bias=False)
        self.grouped, self.depthwise = nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(4, 4, 3, groups=4, padding="same")
        self.reflect = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")
        self.circular = nn.Conv2d(4, 6, 3, padding=(0, 2), padding_mode="circular")
        self.line, self.volume = nn.Conv1d(4, 5, 3), nn.Conv3d(2, 3, 2)
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1)
        self.up_grouped = nn.ConvTranspose2d(4, 4, 2, groups=2, bias=False)
        self.up_line = nn.ConvTranspose1d(4, 3, 3)
        self.unbatched = nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        layers = ("plain", "bare", "grouped", "depthwise", "reflect", "circular", "up", "up_grouped")
        line = x.flatten(2)
        return {name: self.get_submodule(name)(x) for name in layers} | {
            "line": self.line(line),
            "up_line": self.up_line(line),
            "volume": self.volume(x.reshape(2, 2, 2, 9, 9)),
            "unbatched": self.unbatched(x[0]),
        }


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Computed(nn.Module):
    """Weights that are arguments, or are computed on the way; layers that share one or run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.matrix = nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Parameter(torch.randn(5, 9))
        self.bias = nn.Parameter(torch.randn(5))
        self.standardized = Standardized(4, 4, 3, padding=1)
        self.normed = weight_norm(nn.Linear(9, 9))
        self.first, self.tied = nn.Linear(9, 9), nn.Linear(9, 9, bias=False)
        self.tied.weight = self.first.weight
        self.added = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = F.conv2d(self.standardized(x), self.kernel, groups=4, padding=1)
        tokens = self.tied(torch.tanh(self.first(torch.tanh(self.first(self.normed(y))))))
        rows = tokens.mean((1, 2))
        return [y, F.linear(tokens, self.matrix, self.bias), torch.addmm(self.bias[:4], rows, self.added)]


class Linears(nn.Module):
    """Inputs of one to four dimensions, and HF's transposed linear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 3), nn.Linear(6, 5), nn.Linear(6, 4, bias=False)
        self.four = nn.Linear(6, 3)
        self.table = nn.Embedding(10, 6, padding_idx=0)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.table(ids)
        return [self.one(x[0, 0]), self.two(x[:, 0]), self.three(x), self.four(x[:, None])]


def hugging_face() -> nn.Module:
    layers = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(layers.Conv1D(5, 6), nn.Tanh(), layers.Conv1D(3, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolutions": (Convolutions, IMAGES),
    "computed": (Computed, IMAGES),
    "linears": (Linears, IDS),
    "hugging_face": (hugging_face, X[None]),
    "residual": (Residual, IMAGES[:, :3]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 8) for name in MODELS), ("convolutions", 5), ("linears", 5)], ids=str
)
def test_every_layer_computes_what_was_simulated(name: str, bits: int, tmp_path: Path) -> None:
    make, x = MODELS[name]
    torch.manual_seed(1)
    qmodel = calibrated(make().eval(), [x], qconfig(bits=bits))
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    found = differences(qmodel, tmp_path / "m.onnx", x)
    assert {output: gap for output, gap in found.items() if gap > EXACT} == {}
    stored = types(tmp_path / "m.onnx")
    floats = [n for n, kind in stored.items() if kind == "FLOAT" and n.endswith(("weight", "kernel", "matrix"))]
    assert [name for name in floats if "bn" not in name] == []  # nothing is kept twice
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["convolutions", "computed", "linears", "hugging_face", "residual"])
@pytest.mark.exact_sums
def test_onnxruntime_computes_what_was_simulated_bit_by_bit(name: str, tmp_path: Path) -> None:
    make, x = MODELS[name]
    torch.manual_seed(1)
    qmodel = calibrated(make().eval(), [x], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    found = differences(qmodel, tmp_path / "m.onnx", x, optimize=True)
    # Transposed convolutions stay in float there, whose sums have another order.
    assert {output: gap for output, gap in found.items() if gap > (EXACT if output.startswith("up") else 0)} == {}


def test_a_layer_that_runs_twice_and_a_tied_one_are_stored_once(tmp_path: Path) -> None:
    qmodel = calibrated(Computed().eval(), [IMAGES])
    qmodel.export_onnx(IMAGES, tmp_path / "m.onnx")
    codes = [name for name in initializers(tmp_path / "m.onnx") if name.startswith("first") and "codes" in name]
    assert codes == ["first.weight/codes"]


def test_int32_biases_are_the_codes_of_the_simulation(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 1e-14, 3.0  # next to nothing beside its bias
    qmodel = calibrated(model, [x], qconfig(backend="onnxruntime"))
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    values = initializers(tmp_path / "m.onnx")
    assert types(tmp_path / "m.onnx")["0.bias/codes"] == "INT32"
    assert abs(values["0.bias/codes"][1]) > 1 << 29
    assert parity is not None and parity.is_exact


# --- quantizers


def trained(qmodel: QuantModel, x: Tensor, steps: int = 3) -> QuantModel:
    """A few steps away from the calibrated numbers."""
    qmodel.train()
    before = [quantizer.qparams()[0].detach().clone() for quantizer in qmodel.quantizers() if quantizer.is_enable]
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        qmodel(x).square().mean().backward()
        optimizer.step()
    after = [quantizer.qparams()[0].detach() for quantizer in qmodel.quantizers() if quantizer.is_enable]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return qmodel


LEARNED = {
    "lsq": {"W.QUANTIZER.TYPE": "lsq", "A.QUANTIZER.TYPE": "lsq"},
    "lsq_plus_affine": {"W.QUANTIZER.TYPE": "lsq+", "A.QUANTIZER.TYPE": "lsq_plus", "W.QSCHEME": "per-channel-affine"},
    "dorefa_and_pact": {"W.QUANTIZER.TYPE": "dorefa", "A.QUANTIZER.TYPE": "pact", "A.QUANTIZER.PACT.ALPHA_VALUE": 2.0},
    "mixed": {
        "A.QUANTIZER.TYPE": "lsq",
        "W.SPECIFIC": [{"second": ["QUANTIZER.TYPE", "dorefa", "QUANTIZER.BIT", 6]}],
        "A.SPECIFIC": [{"second": ["QUANTIZER.TYPE", "pact", "QUANTIZER.BIT", 7]}],
    },
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_quantizers_export_what_they_simulate(name: str, tmp_path: Path) -> None:
    qmodel = trained(calibrated(TwoLayers(), [X], qconfig(LEARNED[name], bits=4)), X)
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert qmodel.training
    assert worst(qmodel, tmp_path / "m.onnx", 2 * X) <= EXACT


def test_dorefa_squashes_weights_that_are_arguments_too(tmp_path: Path) -> None:
    qmodel = calibrated(Computed().eval(), [IMAGES], qconfig({"W.QUANTIZER.TYPE": "dorefa"}, bits=6))
    qmodel.export_onnx(IMAGES, tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", IMAGES) <= EXACT
    assert op_types(tmp_path / "m.onnx")["Tanh"] == 2  # the model's own: the weights' are folded


# --- sizes


def test_int8_files_are_a_quarter_of_float_ones(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 128, 3, bias=False), nn.ReLU(), nn.Conv2d(128, 512, 3), nn.ReLU())
    x = torch.randn(1, 3, 8, 8)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    qmodel = calibrated(model, [x], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert num_bytes > 2_000_000
    assert (tmp_path / "m.onnx").stat().st_size <= 0.27 * num_bytes


def test_int4_files_of_linears_are_a_seventh(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(1, 4, 768)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    changes = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.BIT": 4, "A.QUANTIZER.DISABLE": True}
    qmodel = calibrated(model, [x], qconfig(changes, backend="onnxruntime"))
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert num_bytes > 2_000_000
    assert (tmp_path / "m.onnx").stat().st_size <= 0.16 * num_bytes


# --- what the model is


class Leaf(nn.Module):
    """A loop over a shape: torch.fx cannot follow it, torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.stack([x[:, column] * self.weight[column] for column in range(x.shape[1])], 1))


def around(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), middle, nn.Linear(6, 3))


@pytest.mark.parametrize("skip", [False, True], ids=["entered", "SKIP_TRACE_MODULES"])
def test_untraced_modules_are_exported_too(skip: bool, tmp_path: Path) -> None:
    qmodel = calibrated(around(Leaf()), [X], qconfig({"SKIP_TRACE_MODULES": ["2"]} if skip else {}))
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", X) <= EXACT
    assert ("2.fc.weight/codes" in initializers(tmp_path / "m.onnx")) == (not skip)


def test_a_branch_on_data_is_named(tmp_path: Path) -> None:
    qmodel = calibrated(Opaque(), [X])
    with pytest.raises(DeploymentError, match=r"at Opaque, .*tiny\.py:\d+: `if float\(x\.abs"):
        qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


@torch.library.custom_op("sparsebit_tests::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x * 2


odd.register_fake(torch.empty_like)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return odd(x)


def test_an_op_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    qmodel = calibrated(around(Odd()), [X])
    with pytest.raises(DeploymentError, match=r"the op sparsebit_tests\.odd has no ONNX form; in the graph: `\w*odd"):
        qmodel.export_onnx(X, tmp_path / "m.onnx")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 5e-3), (torch.float64, EXACT)], ids=str)
def test_models_of_other_precision(dtype: torch.dtype, allowed: float, tmp_path: Path) -> None:
    x = X.to(dtype)
    qmodel = calibrated(TwoLayers().to(dtype), [x], qconfig({"A.QUANTIZER.BIT": 6}))
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference <= allowed
    assert worst(qmodel, tmp_path / "m.onnx", x) <= allowed
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


def test_bfloat16_that_no_runtime_loads_is_refused(tmp_path: Path) -> None:
    x = X.bfloat16()
    for model, inputs in ((TwoLayers(), x), (nn.Sequential(nn.Conv2d(3, 4, 3)), IMAGES[:, :3].bfloat16())):
        qmodel = calibrated(model.bfloat16(), [inputs])
        with pytest.raises(DeploymentError, match=r"m\.onnx does not load[^$]*half precision[^$]*qmodel\.float\(\)"):
            qmodel.export_onnx(inputs, tmp_path / "m.onnx")
        assert os.listdir(tmp_path) == []
    for backend, runtime in (
        ("onnxruntime", "onnxruntime"),
        ("openvino", "openvino"),
        ("tensorrt", "ONNX Runtime, .*,"),
    ):
        qmodel = calibrated(TwoLayers().bfloat16(), [x], qconfig(backend=backend))
        with pytest.raises(DeploymentError, match=rf"bfloat16, for which {runtime} has no kernels.*qmodel\.float\(\)"):
            qmodel.export_onnx(x, tmp_path / "n.onnx")
        assert os.listdir(tmp_path) == []


def test_float64_that_no_runtime_has_integer_kernels_for_is_refused(tmp_path: Path) -> None:
    images = IMAGES[:, :3].double()
    qmodel = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3)).double(), [images])
    with pytest.raises(DeploymentError, match=r"m\.onnx does not load[^$]*double precision[^$]*qmodel\.float\(\)"):
        qmodel.export_onnx(images, tmp_path / "m.onnx")
    for backend in ("onnxruntime", "openvino", "tensorrt"):
        for model, x in ((TwoLayers(), X.double()), (nn.Sequential(nn.Conv2d(3, 4, 3)), images)):
            qmodel = calibrated(model.double(), [x], qconfig(backend=backend))
            with pytest.raises(DeploymentError, match=r"float64, for which .* no integer kernels"):
                qmodel.export_onnx(x, tmp_path / "m.onnx")
            assert os.listdir(tmp_path) == []
    x = X.float()
    qmodel = calibrated(TwoLayers().double(), [X.double()], qconfig(backend="onnxruntime")).float()
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.max_difference <= EXACT


def test_tensorrt_files(tmp_path: Path) -> None:
    qmodel = calibrated(Residual().eval(), [IMAGES[:, :3]], qconfig(backend="tensorrt"))
    qmodel.export_onnx(IMAGES[:, :3], tmp_path / "m.onnx")
    values, kinds = initializers(tmp_path / "m.onnx"), types(tmp_path / "m.onnx")
    zero_points = {name: value for name, value in values.items() if name.endswith("/zero_point")}
    assert zero_points and not any(value.any() for value in zero_points.values())
    assert {kinds[name] for name in kinds if name.endswith(("/codes", "/zero_point"))} == {"INT8"}
    assert not any("bias/codes" in name for name in values)
    assert [v for v in tensorrt_violations(tmp_path / "m.onnx") if v.severity == "error"] == []
    assert opset(tmp_path / "m.onnx") == 20
    assert worst(qmodel, tmp_path / "m.onnx", IMAGES[:, :3]) <= EXACT


# --- how it is called


def test_the_signature_is_the_specs() -> None:
    parameters = list(inspect.signature(QuantModel.export_onnx).parameters.values())[1:]
    names = ["dummy_data", "name", "input_names", "output_names", "dynamic_axes", "opset_version", "verbose"]
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == [*names, "extra_info"]
    assert [parameter.default for parameter in parameters[2:5]] == [None, None, None]
    assert [parameter.default for parameter in parameters[6:8]] == [False, False]


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Any, other: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        return self.fc(x) * factor if other is None else self.fc(x + other) * factor


@pytest.mark.parametrize(
    ("dummy", "args", "kwargs"),
    [
        (X, (X,), {}),
        ([X], (X,), {}),
        ((X, X), (X, X), {}),
        ((X, {"factor": 2.0}), (X,), {"factor": 2.0}),
        ((X, {"other": X, "factor": 2.0}), (X,), {"other": X, "factor": 2.0}),
        (({"x": X}, {"factor": 2.0}), ({"x": X},), {"factor": 2.0}),
        ({"factor": 2.0, "x": X}, (), {"x": X, "factor": 2.0}),
        ((X, X, X), (X,), {}),  # more than forward takes: a loader's batch
    ],
    ids=["tensor", "list", "positional", "keywords", "all_keywords", "dict_first", "mapping", "loader"],
)
def test_the_forms_of_an_example_call(dummy: Any, args: Any, kwargs: Any) -> None:
    found = export_call(QuantModel(Options(), qconfig()), dummy)
    assert str(found) == str((args, kwargs))


def test_coarse_steps_keep_a_float_bias(tmp_path: Path) -> None:
    """ONNX Runtime would round it with the product of both steps, which at 2 bits is no smaller than the output's."""
    torch.manual_seed(0)
    calibrated(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), [X], qconfig(bits=2)).export_onnx(
        X, tmp_path / "m.onnx"
    )
    assert op_types(tmp_path / "m.onnx")["Max"] == 1


@pytest.mark.filterwarnings("ignore:A.QSCHEME")  # they are slower than float
@pytest.mark.parametrize("backend", ["onnxruntime", "virtual"])
def test_signed_activations_of_linear_layers_load_in_onnxruntime(backend: str, tmp_path: Path) -> None:
    x = torch.randn(2, 6, 8)
    config = qconfig({"A.QSCHEME": "per-tensor-symmetric"}, backend=backend)
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), [x], config)
    parity = qmodel.export_onnx(x, tmp_path / "m.onnx", check=[x])
    assert parity is not None and parity.worst.is_equal and opset(tmp_path / "m.onnx") == 20


def test_opset_versions(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [X], qconfig({"W.SPECIFIC": [{"second": ["QUANTIZER.BIT", 4]}]}))
    for given in (13, 20):  # 13 is enough for the layers of 8 bits
        words = rf"opset_version={given}: second\.weight \(int4, per channel\) needs 21; leave"
        with pytest.raises(DeploymentError, match=words):
            qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=given)
    with pytest.raises(DeploymentError, match="opset_version=99: torch does not write it"):
        qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=99)
    qmodel = calibrated(TwoLayers(), [X])
    qmodel.export_onnx(X, tmp_path / "m.onnx", opset_version=18)
    assert opset(tmp_path / "m.onnx") == 18
    assert worst(qmodel, tmp_path / "m.onnx", X) <= EXACT


def test_ports_may_be_called_like_values_inside(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [X])
    qmodel.export_onnx(X, tmp_path / "m.onnx", input_names=["first.weight/codes"], output_names=["second.input/dq"])
    assert worst(qmodel, tmp_path / "m.onnx", X) <= EXACT


@pytest.mark.exact_sums
def test_a_dynamic_batch_of_a_quantized_net(tmp_path: Path) -> None:
    x = IMAGES[:, :3]
    qmodel = calibrated(Residual().eval(), [x], qconfig(backend="onnxruntime"))
    axes = {"image": {0: "batch", 2: "height", 3: "width"}}
    qmodel.export_onnx(x, tmp_path / "m.onnx", ["image"], ["scores"], axes)
    found = differences(qmodel, tmp_path / "m.onnx", torch.randn(3, 3, 16, 11), optimize=True)
    assert found == {"scores": 0.0}


# --- what is left behind


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    qmodel = calibrated(nn.Sequential(ConvBnRelu(), nn.Dropout(0.5)), [x], qconfig({"W.QUANTIZER.TYPE": "lsq"}))
    qmodel.train()
    qmodel.get_submodule("model.0.bn").eval()

    def snapshot() -> tuple[Any, ...]:
        state = {name: value.clone() for name, value in qmodel.state_dict().items()}
        modules = [(name, id(module), module.training) for name, module in qmodel.named_modules()]
        return state, modules, [(id(p), p.requires_grad) for p in qmodel.parameters()]

    before = snapshot()
    qmodel.export_onnx(x, tmp_path / "m.onnx", extra_info=True)
    with pytest.raises(DeploymentError):
        qmodel.export_onnx(x, tmp_path / "m.onnx", dynamic_axes={"input": {1: "channels"}})
    after = snapshot()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert before[1:] == after[1:]
    qmodel(x).sum().backward()


def test_paths_are_checked_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = calibrated(TwoLayers(), [X])

    def worked(*args: Any, **settings: Any) -> None:
        pytest.fail("the model was exported first")

    monkeypatch.setattr("sparsebit.quantization.exporting.export.build_onnx", worked)
    (tmp_path / "m_extra.onnx").mkdir()
    for name in (tmp_path, tmp_path / "nowhere" / "m.onnx"):
        with pytest.raises(DeploymentError, match=r"is a folder|does not exist"):
            qmodel.export_onnx(X, name)
    with pytest.raises(DeploymentError, match=r"m_extra\.onnx is a folder"):
        qmodel.export_onnx(X, tmp_path / "m.onnx", extra_info=True)
    monkeypatch.setattr(model_file.os, "access", lambda path, mode: False)
    with pytest.raises(DeploymentError, match="cannot be written to"):
        qmodel.export_onnx(X, tmp_path / "m.onnx")


def test_a_missing_package_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = calibrated(TwoLayers(), [X])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install "):
        qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_a_model_with_nothing_to_export(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    with pytest.raises(CalibrationError, match="the model is not calibrated"):
        QuantModel(TwoLayers(), qconfig()).export_onnx(X, file)
    with pytest.raises(DeploymentError, match="nothing of the model is quantized with BACKEND: onnxruntime"):
        QuantModel(nn.ConvTranspose2d(3, 3, 3), qconfig(backend="onnxruntime")).export_onnx(IMAGES[:, :3], file)


def test_a_calibrated_model_is_exported_quantized_whatever_its_switches_say(tmp_path: Path) -> None:
    qmodel = calibrated(TwoLayers(), [X])
    expected = qmodel.eval()(X)
    qmodel.set_quant()
    floats = qmodel(X)
    assert not torch.equal(floats, expected)
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.max_difference <= EXACT
    assert qmodel.check_onnx(tmp_path / "m.onnx", [X]).worst.max_difference <= EXACT
    assert torch.equal(qmodel(X), floats) and not any(quantizer.use_quant for quantizer in qmodel.quantizers())
    qmodel.set_quant(w_quant=True, a_quant=False)  # one of the two is a wish
    qmodel.export_onnx(X, tmp_path / "w.onnx", check=[X])
    assert "QuantizeLinear" not in op_types(tmp_path / "w.onnx")


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_ragged_groups_of_a_computed_weight_are_refused_by_name(backend: str, tmp_path: Path) -> None:
    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / 2)

    changes = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 4, "A.QUANTIZER.DISABLE": True}
    config = qconfig({**changes, "W.QUANTIZER.BIT": 4}, backend=backend)
    qmodel = calibrated(nn.Sequential(Halved(6, 3)), [X], config)
    with pytest.raises(DeploymentError, match=r"linear\.weight: 6 numbers in groups of 4, .*that divides 6"):
        qmodel.export_onnx(X, tmp_path / "m.onnx")


def test_an_example_without_samples_is_refused(tmp_path: Path) -> None:
    qmodel = calibrated(nn.Linear(6, 2), [X], qconfig(backend="onnxruntime"))
    with pytest.raises(DeploymentError, match="holds no samples"):
        qmodel.export_onnx(X[:0], tmp_path / "empty.onnx")
