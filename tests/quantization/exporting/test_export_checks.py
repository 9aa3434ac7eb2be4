from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import sparsebit
from sparsebit.deploy.comparing import default_session
from sparsebit.deploy.comparing.parity import Tolerance
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting import export_checks
from sparsebit.quantization.exporting.export_checks import (
    NUM_SAMPLES,
    check_loads,
    check_parity,
    check_rules,
    compare_model,
)
from sparsebit.quantization.exporting.stored_parameters import stored_difference
from tests.quantization.tiny import MaskFirst, calibrated, masked_batches, qconfig

X = torch.randn(6, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x


@pytest.mark.parametrize("axes", [None, {"x": {0: "batch"}}], ids=["fixed", "dynamic"])
def test_scales_per_channel_that_onnxruntime_fuses_wrongly(
    axes: dict[str, dict[int, str]] | None, tmp_path: Path
) -> None:
    qmodel = calibrated(Swish(), [X], qconfig({"A.QSCHEME": "per-channel-affine"}))
    file = tmp_path / "m.onnx"
    with pytest.warns(
        UserWarning, match=r"m\.onnx does not load.*scale per channel.*session\.disable_quant_qdq=1.*node by"
    ):
        parity = qmodel.export_onnx(X, file, dynamic_axes=axes, check=[X])
    assert parity is not None and parity.worst.max_difference < 1e-5
    with pytest.raises(DeploymentError, match="disable_quant_qdq"):
        open_session(file)
    plain = open_session(file, options={"session.disable_quant_qdq": "1"})
    (found,) = plain.run({"x": X.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), qmodel(X), atol=1e-5)


class Made:
    def __init__(self, backend: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.qmodel: QuantModel = calibrated(Net(), [X], qconfig(backend=backend))
        self.file = folder / "m.onnx"
        # OpenVINO 2026.4 on Arm does not round where shapes are dynamic; the gate refuses such a file, and rightly.
        axes = {} if backend == "openvino" else {"x": {0: "batch"}}
        self.qmodel.export_onnx(X, self.file, dynamic_axes=axes)

    def broken(self, folder: Path, change: Callable[[Any], Any], *names: str) -> Path:
        """A copy of the file with some initializers changed."""
        model = onnx.load(str(self.file))
        found = [tensor for tensor in model.graph.initializer if tensor.name in names]
        assert len(found) == len(names)
        for tensor in found:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(array)).astype(array.dtype), tensor.name))
        onnx.save(model, str(folder / "broken.onnx"))
        return folder / "broken.onnx"


@pytest.fixture(scope="module", params=["virtual", "onnxruntime", "openvino", "tensorrt"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip("openvino" if request.param == "openvino" else "onnxruntime")
    return Made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ort(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("onnxruntime", tmp_path_factory.mktemp("ort"))


def doubled(array: Any) -> Any:
    return array * np.float32(2)


# Where each runtime's graph first shows that a layer is wrong.
BEHIND = {
    "virtual": {"first": "second.input", "second": "mean.input"},
    "onnxruntime": {"first": "relu.output", "second": "relu_1.output"},
    "openvino": {"first": "relu.output", "second": "relu_1.output"},
    "tensorrt": {"first": "second.input", "second": "head.input"},
}


@pytest.mark.sample(2)
@pytest.mark.exact_sums
def test_a_good_file_passes(made: Made) -> None:
    parity = made.qmodel.check_onnx(made.file, [X])
    assert parity.worst.max_difference <= 1e-6 and parity.worst.num_samples == 6
    assert parity.worst.noise_db is not None and parity.worst.noise_db < 60


@pytest.mark.parametrize("layer", ["first", "second"])
@pytest.mark.exact_sums
def test_a_wrong_layer_is_named_by_the_first_site_behind_it(layer: str, made: Made, tmp_path: Path) -> None:
    file = made.broken(tmp_path, doubled, f"{layer}.weight/scale")
    site = BEHIND[made.qmodel.config.BACKEND][layer]
    with pytest.raises(
        DeploymentError, match=rf"broken\.onnx does not compute .*the first site that differs is {site}: "
    ):
        made.qmodel.check_onnx(file, [X])


@pytest.mark.exact_sums
def test_a_wrong_last_layer_lies_behind_all_sites(made: Made, tmp_path: Path) -> None:
    file = made.broken(tmp_path, doubled, "head.weight/scale")
    words = r"agree( but for single steps)? up to the last one, head\.input: the fault is after it"
    with pytest.raises(DeploymentError, match=words):
        made.qmodel.check_onnx(file, [X])


def test_a_wrong_code_is_found_although_the_output_hardly_moves(ort: Made, tmp_path: Path) -> None:
    def flipped(codes: Any) -> Any:
        codes = codes.copy()
        codes[0, 0] = -codes[0, 0]
        return codes

    file = ort.broken(tmp_path, flipped, "first.weight/codes")
    with pytest.raises(DeploymentError, match=r"relu\.output"):
        ort.qmodel.check_onnx(file, [X], tolerance=Tolerance(sqnr_db=-99, top1=0))
    with pytest.raises(DeploymentError, match=r"one of its kernels is wrong.*relu\.output"):  # whatever is allowed
        ort.qmodel.check_onnx(file, [X], tolerance=Tolerance(sqnr_db=-99, top1=0, exact=False))


def one_more(codes: Any) -> Any:
    """One code, moved by one."""
    codes = codes.copy()
    codes.flat[0] += -1 if codes.flat[0] > 0 else 1
    return codes


def hundredth(array: Any) -> Any:
    return array * np.float32(1.01)


SMALL = {
    "a code of the first layer": (one_more, "first.weight/codes"),
    "a code of the second layer": (one_more, "second.weight/codes"),
    "a code of the last layer": (one_more, "head.weight/codes"),
    "a code of a bias": (one_more, "head.bias/codes"),
    "a weight's scale": (hundredth, "first.weight/scale"),
    "the last weight's scale": (hundredth, "head.weight/scale"),
    "an activation's scale": (hundredth, "relu_1.output/scale"),
    "the input's scale": (hundredth, "first.input/scale"),
}


@pytest.mark.parametrize("kind", SMALL)
def test_what_is_simulated_exactly_must_be_exact(kind: str, ort: Made, tmp_path: Path) -> None:
    file = ort.broken(tmp_path, SMALL[kind][0], SMALL[kind][1])
    with pytest.raises(DeploymentError, match="does not compute what was simulated"):
        ort.qmodel.check_onnx(file, [X])
    with pytest.raises(DeploymentError, match=r"bit by bit|one of its kernels is wrong"):
        ort.qmodel.check_onnx(file, [X], tolerance=Tolerance(sqnr_db=0, top1=0, exact=True))


def damages(file: Path) -> list[tuple[str, Callable[[Any], Any]]]:
    """Every stored number that belongs to a site or to a float bias, changed a little."""
    changes: dict[str, list[Callable[[Any], Any]]] = {
        "codes": [one_more],
        "scale": [hundredth],
        "zero_point": [lambda array: array + 1, lambda array: array - 1],
        "bias": [hundredth],
    }
    names = [tensor.name for tensor in onnx.load(str(file)).graph.initializer]
    parts = {name: re.split(r"[/.]", name)[-1] for name in names}
    return [(name, change) for name, part in parts.items() for change in changes.get(part, [])]


def test_every_stored_number_is_compared_with_the_simulation(made: Made, tmp_path: Path) -> None:
    """Outputs alone do not show each of them: a zero point behind a ReLU, scales in OpenVINO's coarser comparison."""
    assert stored_difference(made.qmodel, made.file) == ""
    found = damages(made.file)
    assert len(found) >= 20
    for name, change in found:
        file = made.broken(tmp_path, change, name)
        assert stored_difference(made.qmodel, file).startswith(f"{name.removeprefix('module.model.')}: "), name


def test_a_square_weight_may_be_stored_transposed(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8)
    qmodel = calibrated(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), [x], qconfig())
    qmodel.export_onnx(x, tmp_path / "m.onnx")
    assert stored_difference(qmodel, tmp_path / "m.onnx") == ""


def test_a_number_that_no_output_shows_is_an_error(made: Made, tmp_path: Path) -> None:
    name = f"{BEHIND[made.qmodel.config.BACKEND]['second']}/zero_point"
    file = made.broken(tmp_path, lambda array: array + 1, name)
    black = [torch.zeros_like(X)]
    words = rf"stores other numbers than the simulation has, {re.escape(name)}: -?\d+ in the file, -?\d+ in the sim"
    for exact in (None, True):
        with pytest.raises(DeploymentError, match=words):
            made.qmodel.check_onnx(file, black, tolerance=Tolerance(exact=exact))


def test_exactness_is_only_asked_for_where_the_user_wants_it(ort: Made, tmp_path: Path) -> None:
    file = ort.broken(tmp_path, one_more, "head.weight/codes")
    parity = ort.qmodel.check_onnx(file, [X], tolerance=Tolerance(exact=False))
    assert not parity.is_exact
    assert ort.qmodel.check_onnx(ort.file, [X], tolerance=Tolerance(exact=True, min_sqnr_db=300)).is_exact
    with pytest.raises(DeploymentError, match=r"90\.0 dB is required"):
        ort.qmodel.check_onnx(file, [X], tolerance=Tolerance(exact=False, min_sqnr_db=90))


def test_a_processor_whose_sums_clip_is_told_from_a_wrong_file(
    ort: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On x86 without VNNI the file is checked again with exact products; what fails then too is a wrong file."""
    monkeypatch.setattr(export_checks, "saturates", lambda: True)
    real, sessions = export_checks.open_session, []

    def clipping(file: Path, *args: Any, **settings: Any) -> Any:
        session = real(file, *args, **settings)
        sessions.append(settings["options"])
        if settings["options"].get("session.x64quantprecision") != "1":
            run = session.run
            monkeypatch.setattr(session, "run", lambda feeds: [np.zeros_like(output) for output in run(feeds)])
        return session

    monkeypatch.setattr(export_checks, "open_session", clipping)
    with caplog.at_level("WARNING"):
        parity = ort.qmodel.check_onnx(ort.file, [X])
    assert parity.is_exact and "session.x64quantprecision=1" in parity.runtime
    assert any("no VNNI" in record.getMessage() for record in caplog.records) and len(sessions) == 2
    with pytest.raises(DeploymentError, match="does not compute what was simulated"):
        ort.qmodel.check_onnx(ort.broken(tmp_path, doubled, "first.weight/scale"), [X])


def test_a_wrong_file_is_not_run_twice_where_sums_do_not_clip(
    ort: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_checks, "saturates", lambda: False)
    real, sessions = export_checks.open_session, []

    def counted(*args: Any, **settings: Any) -> Any:
        sessions.append(args)
        return real(*args, **settings)

    monkeypatch.setattr(export_checks, "open_session", counted)
    with pytest.raises(DeploymentError, match="does not compute what was simulated"):
        ort.qmodel.check_onnx(ort.broken(tmp_path, doubled, "first.weight/scale"), [X])
    assert len(sessions) == 1


@pytest.mark.parametrize("made", ["virtual", "tensorrt"], indirect=True)
def test_a_default_session_that_differs_matters_to_files_without_a_runtime(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file for TensorRT runs elsewhere: only a warning."""
    real = default_session.open_session

    def zeros(*args: Any, **settings: Any) -> Any:
        session = real(*args, **settings)
        run = session.run
        monkeypatch.setattr(session, "run", lambda feeds: [np.zeros_like(output) for output in run(feeds)])
        return session

    monkeypatch.setattr(default_session, "open_session", zeros)
    is_told: Any = pytest.warns(UserWarning, match="the optimizations of a default session of ONNX Runtime change it")
    if made.qmodel.config.BACKEND == "virtual":
        is_told = pytest.raises(DeploymentError, match="the optimizations of a default session")
    with is_told:
        made.qmodel.check_onnx(made.file, [X])


def test_the_batch_that_differs_is_looked_into(ort: Made, tmp_path: Path) -> None:
    """The first batch shows nothing of the fault: its images are black."""
    file = ort.broken(tmp_path, one_more, "first.weight/codes")
    with pytest.raises(DeploymentError, match=r"relu\.output"):
        ort.qmodel.check_onnx(file, [torch.zeros_like(X), X])


class Roots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.conv(x))


def test_nan_on_both_sides_is_refused(tmp_path: Path) -> None:
    qmodel = calibrated(Roots(), [X], qconfig(backend="onnxruntime"))
    with pytest.raises(DeploymentError, match="values are NaN, in the simulation too"):
        qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert not (tmp_path / "m.onnx").exists()
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X], tolerance=Tolerance(allow_nan=True))
    assert parity is not None and not parity.is_exact and "NaN in both" in str(parity)


def test_what_is_no_number_is_refused(ort: Made, tmp_path: Path) -> None:
    file = ort.broken(tmp_path, lambda array: array * np.nan, "head.weight/scale", "head.bias/scale")
    with pytest.raises(DeploymentError, match="NaN or infinite in the file or in the simulation, not in both"):
        ort.qmodel.check_onnx(file, [X])


def test_a_file_of_another_model_is_refused(ort: Made, tmp_path: Path) -> None:
    model = onnx.load(str(ort.file))
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("relu.output/dq"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(
        DeploymentError, match=r"output relu\.output/dq: shape \(6, 8, 7, 7\) in the file, not \(6, 5\)"
    ):
        ort.qmodel.check_onnx(tmp_path / "m.onnx", [X])
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("relu_1.output/dq"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(DeploymentError, match=r"the file has 2 outputs .*, the model 1"):
        ort.qmodel.check_onnx(tmp_path / "m.onnx", [X])


def test_the_first_samples_in_batches_of_any_size(ort: Made) -> None:
    loader = [(X[:4], torch.zeros(4)), (X[4:], torch.zeros(2))]  # (images, labels)
    assert check_parity(ort.qmodel, ort.file, loader).worst.num_samples == 6
    assert check_parity(ort.qmodel, ort.file, loader, num_samples=5).worst.num_samples == 5
    assert check_parity(ort.qmodel, ort.file, X, num_samples=2).worst.num_samples == 2
    assert check_parity(ort.qmodel, ort.file, {"x": X}).worst.num_samples == 6
    many = check_parity(ort.qmodel, ort.file, X.repeat(11, 1, 1, 1))
    assert many.worst.num_samples == NUM_SAMPLES == 64


def test_against_a_float_model_every_sample_is_judged(ort: Made) -> None:
    """Also those whose best two classes are near: of another model nearly all."""
    torch.manual_seed(1)
    model, x = Net().eval(), torch.randn(64, 3, 9, 9)
    (found,) = open_session(ort.file).run({"x": x.numpy()})
    with torch.no_grad():
        same = (model(x).argmax(1) == torch.from_numpy(found).argmax(1)).float().mean().item()
    assert same < 1
    assert compare_model(model, ort.file, [x]).worst.top1 == pytest.approx(same)


def test_no_data_is_no_success(ort: Made) -> None:
    with pytest.raises(DeploymentError, match="nothing was compared"):
        ort.qmodel.check_onnx(ort.file, [])


def test_a_file_of_fixed_batch_takes_its_size_from_any_batch(ort: Made, tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    ort.qmodel.export_onnx(X[:4], file)
    assert ort.qmodel.check_onnx(file, [X, X[:2]]).worst.num_samples == 4
    with pytest.raises(DeploymentError, match="takes batches of 4, the data has 2; export with dynamic_axes"):
        ort.qmodel.check_onnx(file, [X[:2]])


def test_data_that_does_not_fit_is_a_clear_fault(ort: Made) -> None:
    with pytest.raises(DeploymentError, match="does not run in ONNX Runtime"):
        ort.qmodel.check_onnx(ort.file, [torch.randn(2, 3, 12, 12)])


def test_checking_leaves_the_model_as_it_was(ort: Made) -> None:
    ort.qmodel.train()
    ort.qmodel.model.first.eval()  # type: ignore[union-attr]
    modes = [module.training for module in ort.qmodel.modules()]
    enabled = [quantizer.is_enable for quantizer in ort.qmodel.quantizers()]
    ort.qmodel.check_onnx(ort.file, [X])
    assert modes == [module.training for module in ort.qmodel.modules()]
    assert enabled == [quantizer.is_enable for quantizer in ort.qmodel.quantizers()]
    assert not any(module._forward_hooks for module in ort.qmodel.modules())
    ort.qmodel.eval()


def test_a_file_that_does_not_pass_leaves_the_older_one(ort: Made, tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    ort.qmodel.export_onnx(X, file)
    before = file.read_bytes()
    with pytest.raises(DeploymentError, match=rf"{file}.*of its range; -1 is allowed"):
        ort.qmodel.export_onnx(X, file, check=[X], tolerance=Tolerance(max_difference=-1.0), extra_info=True)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.onnx"]


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        total = self.a(x) + self.b(torch.where(mask, x, 2 * x))
        return {"total": total * scale, "best": total.argmax(1), "is_high": total > 0}


def test_inputs_are_matched_by_their_names_not_their_order(tmp_path: Path) -> None:
    batch = {"x": torch.randn(8, 4), "mask": torch.rand(8, 4) > 0.5, "scale": torch.rand(8, 1)}
    qmodel = QuantModel(Several(), qconfig(backend="onnxruntime"), example_inputs=batch)
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(**batch)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    turned = dict(reversed(batch.items()))
    parity = qmodel.export_onnx(turned, tmp_path / "m.onnx", input_names=["values"], check=[batch, turned])
    assert parity is not None and [output.name for output in parity.outputs] == ["total", "best", "is_high"]
    assert parity.worst.max_difference <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_files_of_other_precision_are_opened(dtype: torch.dtype, tmp_path: Path) -> None:
    qmodel = calibrated(nn.Sequential(nn.Linear(4, 4)).to(dtype), [torch.randn(2, 4).to(dtype)])
    is_opened = pytest.raises(DeploymentError, match="half precision") if dtype != torch.float32 else nullcontext()
    with is_opened:
        check_loads(qmodel, tmp_path / "missing.onnx", "m.onnx")


def test_the_last_bit_is_that_of_the_largest_number() -> None:
    expected = np.array([1e-3, 1e-6], np.float32)
    assert export_checks._is_rounded_alike(expected, expected + np.float32(1e-10))
    assert not export_checks._is_rounded_alike(expected, expected + np.float32(1e-8))
    missing = np.array([np.nan, 1e-3], np.float32)
    assert export_checks._is_rounded_alike(missing, missing + np.float32(1e-10))
    codes = np.array([10**7])
    assert export_checks._is_rounded_alike(codes, codes) and not export_checks._is_rounded_alike(codes, codes + 1)


def test_tensorrt_files_must_follow_its_rules(tmp_path: Path) -> None:
    made = Made("tensorrt", tmp_path)
    check_rules(made.file, "m.onnx")
    file = made.broken(tmp_path, lambda array: array + 3, "first.input/zero_point")
    with pytest.raises(DeploymentError, match=r"^m\.onnx: TensorRT would refuse it:\n  first\.input/q: zero point 3"):
        check_rules(file, "m.onnx")
    points = [f"{name}/zero_point" for name in ("first.input", "head.weight", "head.input", "second.input")]
    for count, shown in ((1, 3), (3, 6), (4, 7)):  # a line for each node; of more than five, how many are left out
        file = made.broken(tmp_path, lambda array: array + 3, *points[:count])
        with pytest.raises(DeploymentError) as fault:
            check_rules(file, "m.onnx")
        lines = str(fault.value).splitlines()
        assert len(lines) == shown and lines[-1].endswith("and 2 more") == (count == 4)


def test_the_rows_of_a_mask_are_no_samples(tmp_path: Path) -> None:
    """A file of one sample whose first input is a mask of 5 positions, checked on batches of 4 samples."""
    qmodel, file = sparsebit.quantize(MaskFirst(), masked_batches(first=True), "onnxruntime"), tmp_path / "m.onnx"
    mask, x = masked_batches(first=True)[0]
    qmodel.export_onnx((mask, x[:1]), file)
    assert check_parity(qmodel, file, masked_batches(first=True)).outputs[0].num_samples == 8
    assert compare_model(MaskFirst(), file, masked_batches(first=True)).outputs[0].num_samples == 8
