from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sparsebit.errors import CalibrationError, DeploymentError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import ConvBnRelu, Residual, TwoLayers, calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    """Inputs by name, a reshape between quantized layers, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 16, 5)

    def forward(self, image: Tensor, offset: Tensor) -> dict[str, Tensor]:
        y = F.max_pool2d(F.relu(self.conv(image)), 2)
        return {"scores": self.linear(y.flatten(1)) + offset, "features": y}


MODELS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "residual": (Residual, (IMAGES,)),
    "batch norm": (ConvBnRelu, (IMAGES,)),
    "linear": (TwoLayers, (ROWS,)),
    "named": (Named, (IMAGES, torch.zeros(5))),
}


def made(name: str, backend: str = "openvino", **changes: Any) -> tuple[QuantModel, tuple[Tensor, ...]]:
    build, call = MODELS[name]
    torch.manual_seed(0)
    return calibrated(build().eval(), [call], qconfig(changes, backend=backend)), call


def targets(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def same(found: Any, expected: Any, steps: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=steps)


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_the_program_computes_what_is_simulated(name: str, backend: str) -> None:
    qmodel, call = made(name, backend)
    program = qmodel.export_program(call)
    assert not any("sparsebit" in target for target in targets(program))
    same(program.module()(*call), qmodel(*call))


@torch.no_grad()
def test_weights_are_integers_and_nothing_else_is_kept() -> None:
    qmodel, call = made("linear")
    program = qmodel.export_program(call)
    kinds = {name: tensor.dtype for name, tensor in program.state_dict.items()}
    weights = [name for name, kind in kinds.items() if kind == torch.int8]
    assert len(weights) == 2 and all(name.endswith("weight_codes") for name in weights)
    matrices = [name for name, tensor in program.state_dict.items() if tensor.dim() == 2]
    assert matrices == weights, "a float copy of a weight was kept"


@torch.no_grad()
def test_activations_are_signed_and_keep_their_numbers() -> None:
    qmodel, call = made("residual")
    program = qmodel.export_program(call)
    pairs = [node for node in program.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert pairs and {node.args[3:6] for node in pairs} == {(-128, 127, torch.int8)}
    grids = {q.name: (float(q.scale), int(q.zero_point)) for q in qmodel.quantizers() if q.target == "activation"}
    assert {(node.args[1], node.args[2] + 128) for node in pairs} <= set(grids.values())


@pytest.mark.parametrize("bits", [4, 7, 16])
@torch.no_grad()
def test_other_widths(bits: int) -> None:
    qmodel, call = made("linear", "virtual", **{"A.QUANTIZER.BIT": bits, "W.QUANTIZER.BIT": min(bits, 8)})
    same(qmodel.export_program(call).module()(*call), qmodel(*call))


@torch.no_grad()
def test_sizes_that_are_left_open() -> None:
    qmodel, call = made("residual")
    name = "x"
    program = qmodel.export_program(call, dynamic_shapes={name: {0: Dim("batch")}})
    more = torch.cat([IMAGES, IMAGES.flip(0), IMAGES[:1]])
    same(program.module()(more), qmodel(more))


@torch.no_grad()
def test_every_reader_has_a_dequantize_op_of_its_own() -> None:
    qmodel, call = made("residual")
    readers = [len(node.users) for node in qmodel.export_program(call).graph.nodes if "dequantize" in str(node.target)]
    assert readers and set(readers) == {1}


@torch.no_grad()
def test_pairs_behind_reshapes_change_no_number() -> None:
    qmodel, call = made("named")
    plain, paired = (qmodel.export_program(call, pairs_around_moves=on) for on in (False, True))
    assert len(targets(paired)) > len(targets(plain))
    assert all(torch.equal(a, b) for a, b in zip(*(p.module()(*call).values() for p in (plain, paired)), strict=True))
    for node in paired.graph.nodes:
        if "max_pool2d" in str(node.target) or "flatten" in str(node.target):
            assert all("quantize_per_tensor" in str(user.target) for user in node.users)


def test_a_saved_program_runs_without_this_package(tmp_path: Path) -> None:
    qmodel, call = made("named")
    torch.export.save(qmodel.export_program(call), tmp_path / "model.pt2")
    with torch.no_grad():
        torch.save([*call, *qmodel(*call).values()], tmp_path / "call.pt")
    code = (
        "import sys, torch; from torch.ao.quantization.fx import _decomposed\n"
        "module = torch.export.load('model.pt2').module(); *call, scores, features = torch.load('call.pt')\n"
        "found = module(*call); assert torch.allclose(found['scores'], scores, rtol=0, atol=1e-5)\n"
        "assert torch.allclose(found['features'], features, rtol=0, atol=1e-5) and 'sparsebit' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


class Counting(nn.Module):
    """A buffer that every call changes, on the way to a quantized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(0.5)
        return x + self.linear(self.calls[None])


@torch.no_grad()
def test_a_state_that_calls_change_is_no_constant() -> None:
    qmodel = calibrated(Counting().eval(), [(ROWS,), (ROWS,)], qconfig(backend="virtual"))
    before = {name: buffer.clone() for name, buffer in qmodel.named_buffers()}
    program = qmodel.export_program(ROWS).module()
    assert all(torch.equal(buffer, before[name]) for name, buffer in qmodel.named_buffers())
    for _ in range(3):
        same(program(ROWS), qmodel(ROWS))


@torch.no_grad()
def test_the_model_is_left_as_it_was() -> None:
    qmodel, call = made("named")
    qmodel.set_quant(False, False)
    before = {key: value.clone() for key, value in qmodel.state_dict().items()}
    expected = qmodel(*call)
    program = qmodel.export_program(call)
    assert any("quantize_per_tensor" in target for target in targets(program)) and not qmodel.is_quantized("weight")
    assert all(torch.equal(value, before[key]) for key, value in qmodel.state_dict().items())
    same(qmodel(*call), expected, 0.0)


def test_what_has_no_form_is_named() -> None:
    grouped = {"W.QSCHEME": "per-group-symmetric", "W.QUANTIZER.GROUP_SIZE": 2, "W.QUANTIZER.BIT": 4}
    with pytest.raises(DeploymentError, match=r"weight: groups of 2 numbers have no form"):
        made("linear", "virtual", **grouped)[0].export_program((ROWS,))
    with pytest.raises(DeploymentError, match="8-bit floats have no form in a program"):
        made("linear", "virtual", **{"W.QUANTIZER.TYPE": "fp8"})[0].export_program((ROWS,))
    with pytest.raises(CalibrationError, match="not calibrated"):
        QuantModel(TwoLayers(), qconfig()).export_program((ROWS,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # in inductor's own code
@torch.no_grad()
def test_aot_inductor_packages_it(tmp_path: Path) -> None:
    qmodel, call = made("named")
    package = torch._inductor.aoti_compile_and_package(
        qmodel.export_program(call), package_path=str(tmp_path / "model.pt2")
    )
    same(torch._inductor.aoti_load_package(package)(*call), qmodel(*call))


class Joined(nn.Module):
    """A concat of two parts on one grid, and a reshape in front of a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        part = F.relu(self.conv(x))
        joined = torch.cat([part, part], 1)
        return self.linear(joined.mean((2, 3), keepdim=True).expand(-1, -1, 6, 6).flatten(1))


@torch.no_grad()
def test_pairs_around_a_concat_and_in_front_of_a_reshape_change_no_number() -> None:
    qmodel = calibrated(Joined().eval(), [IMAGES], qconfig(backend="openvino"))
    plain, paired = (qmodel.export_program(IMAGES, pairs_around_moves=on) for on in (False, True))
    assert torch.equal(plain.module()(IMAGES), paired.module()(IMAGES))
    (cat,) = paired.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert all("quantize_per_tensor" in str(user.target) for user in cat.users)
    flat = next(node for node in paired.graph.nodes if "flatten" in str(node.target))
    assert "dequantize_per_tensor" in str(flat.args[0].target)
