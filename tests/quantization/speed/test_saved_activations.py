from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.speed import recomputation
from sparsebit.quantization.speed.fused_layer import FusedLayer
from sparsebit.quantization.speed.fusion_guards import substitute_of
from tests.quantization.tiny import prepared


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def network() -> nn.Module:
    """Chains of batch norm and ReLU, a residual, a layer norm, a GELU: everything that is computed again."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(8), Block(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
    )


def ready(weights: str = "lsq", activations: str = "lsq") -> QuantModel:
    config = {
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"TYPE": weights, "BIT": 4}},
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": activations, "BIT": 4}},
    }
    qmodel = prepared(network(), [images()], parse_qconfig(config))
    qmodel.init_QAT()
    return qmodel.train()


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def everything(qmodel: QuantModel) -> None:
    qmodel.pack_saved_activations(True)


def quantized_copies(qmodel: QuantModel) -> None:
    for module in qmodel.train().modules():
        forward = substitute_of(module)
        if isinstance(forward, FusedLayer):
            forward.packs = True


def nothing(qmodel: QuantModel) -> None:
    qmodel.pack_saved_activations(False)


def gradients(qmodel: QuantModel, *, half: bool = False, times: int = 1) -> dict[str, Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = qmodel(images()).float().square().mean()
    for _ in range(times):
        qmodel.zero_grad()
        loss.backward(retain_graph=times > 1)
    return {name: parameter.grad for name, parameter in qmodel.named_parameters()}


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, grad in expected.items():
        other = found[name]
        assert (grad is None) == (other is None), name
        assert grad is None or (other is not None and torch.equal(grad, other)), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("pack", [everything, quantized_copies])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "types", [("lsq", "lsq"), ("lsq+", "lsq+"), ("dorefa", "pact"), ("uniform", "uniform")], ids="/".join
)
def test_gradients_and_statistics_are_equal_bit_by_bit(
    types: tuple[str, str], half: bool, pack: Callable[[QuantModel], None]
) -> None:
    plain = ready(*types)
    packed = copy.deepcopy(plain)
    nothing(plain)
    pack(packed)
    packed.train()
    for times in (1, 2):  # the second time from a graph that was kept
        assert_equal(gradients(packed, half=half, times=times), gradients(plain, half=half, times=times))
    for (name, one), two in zip(plain.named_buffers(), packed.buffers(), strict=True):
        assert torch.equal(one, two), name


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """Bytes of distinct memory that autograd keeps for the backward of a call."""
    pack = recomputation._pack

    def count(call: Callable[[], Any]) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

        def counting(tensor: Tensor) -> Any:
            found = pack(tensor)
            note_all(found)
            return found

        def note_all(found: Any) -> None:
            if isinstance(found, recomputation.View | recomputation.Kept):
                note_all(found.base if isinstance(found, recomputation.View) else found.tensor)
            elif isinstance(found, recomputation.Recompute):
                for each in (*found.watched, *found.args):
                    note_all(each)
            elif isinstance(found, Tensor):
                note(found)

        monkeypatch.setattr(recomputation, "_pack", counting)
        with torch.autograd.graph.saved_tensors_hooks(counting, recomputation._unpack):
            output = call()
        del output
        return sum(storages.values())

    return count


def test_less_is_kept_than_by_the_float_model(kept: Callable[[Callable[[], Any]], int]) -> None:
    x = torch.randn(16, 3, 32, 32)
    floating = network().train()
    in_float = kept(lambda: floating(x))
    amounts = {}
    for pack in (nothing, quantized_copies, everything):
        qmodel = ready()
        pack(qmodel)
        amounts[pack.__name__] = kept(lambda q=qmodel: q(x)) / in_float
    assert amounts["nothing"] > 1.3
    assert amounts["quantized_copies"] < 1.1
    assert amounts["everything"] < 0.9


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
def test_a_linear_layer_keeps_no_matrix_of_its_input(kept: Callable[[Callable[[], Any]], int]) -> None:
    """With more than two dimensions it keeps a view, and under autocast a copy in half precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).train()
    config = {
        "DEVICE": "cpu",
        "A": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
        "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
    }
    qmodel = QuantModel(model, parse_qconfig(config))
    x = torch.randn(8, 40, 32)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.train()
    plain = copy.deepcopy(qmodel)
    everything(qmodel)
    for half in (False, True):
        grads = []
        for candidate in (plain, qmodel):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = candidate(x).float().square().sum()
            candidate.zero_grad()
            loss.backward()
            grads.append({name: parameter.grad for name, parameter in candidate.named_parameters()})
        assert_equal(grads[1], grads[0])

    def autocast(candidate: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return candidate(x)

    in_float, packed = (kept(lambda m=each: autocast(m)) for each in (model, qmodel))
    assert packed < 0.9 * in_float


def test_functions_without_a_quantizer_are_computed_again(kept: Callable[[Callable[[], Any]], int]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc1, self.fc2 = nn.Parameter(torch.ones(32)), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.layer_norm(x, (32,), weight=self.scale)
            return self.fc2(nn.functional.gelu(self.fc1(x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    config = {
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
        "A": {
            "QUANTIZER": {"TYPE": "lsq", "BIT": 4},
            "SPECIFIC": [{"layer_norm*": ["QUANTIZER.DISABLE", True], "gelu*": ["QUANTIZER.DISABLE", True]}],
        },
    }
    qmodel = QuantModel(Net(), parse_qconfig(config))
    x = torch.randn(8, 40, 32, requires_grad=True)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.train()
    plain = copy.deepcopy(qmodel)
    nothing(plain)
    everything(qmodel)
    assert kept(lambda: qmodel(x)) < 0.5 * kept(lambda: plain(x))
    grads = []
    for candidate in (plain, qmodel):
        candidate(x).square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in candidate.named_parameters()})
    assert_equal(grads[1], grads[0])
    assert torch.equal(qmodel.eval()(x), plain.eval()(x))


def test_a_change_before_the_backward_is_refused() -> None:
    qmodel = ready()
    everything(qmodel)
    loss = qmodel(images()).sum()
    with torch.no_grad():
        for quantizer in qmodel.quantizers():
            quantizer.scale.mul_(2)
    with pytest.raises(SparsebitError, match=r"changed in place .* pack_saved_activations\(False\)"):
        loss.backward()


def test_a_changed_input_is_refused() -> None:
    qmodel = ready()
    everything(qmodel)
    x = images()
    loss = qmodel(x).sum()
    x.zero_()
    with pytest.raises(SparsebitError, match="changed in place"):
        loss.backward()


def test_switched_off_nothing_is_left() -> None:
    qmodel = ready()
    everything(qmodel)
    nothing(qmodel)
    found = (substitute_of(module) for module in qmodel.modules())
    assert {type(forward).__name__ for forward in found if forward is not None} == {"FusedLayer", "TrainingGraph"}
    qmodel.eval()
    assert not any(substitute_of(module) for module in qmodel.modules())


def test_the_model_is_the_same_in_eval_mode_saved_and_copied() -> None:
    qmodel = ready()
    everything(qmodel)
    expected = qmodel.eval()(images())
    assert torch.equal(copy.deepcopy(qmodel)(images()), expected)
    with torch.no_grad():
        assert torch.equal(qmodel(images()), expected)


class TestWhatMayHappenInBetween:
    """Forward and backward of a packed model with something between them that a recompute function could miss."""

    def check(self, run: Callable[[QuantModel], Tensor], qmodel: QuantModel) -> None:
        packed = copy.deepcopy(qmodel)
        nothing(qmodel)
        everything(packed)
        grads = []
        for candidate in (qmodel, packed):
            candidate.train()
            run(candidate).backward()
            grads.append({name: parameter.grad for name, parameter in candidate.named_parameters()})
        assert_equal(grads[1], grads[0])

    def test_eval_mode(self) -> None:
        def run(qmodel: QuantModel) -> Tensor:
            loss = qmodel(images()).square().sum()
            qmodel.eval()
            return loss

        self.check(run, ready())

    def test_other_parameters(self) -> None:
        def run(qmodel: QuantModel) -> Tensor:
            doubled = {name: parameter * 2 for name, parameter in qmodel.named_parameters()}
            output: Tensor = torch.func.functional_call(qmodel, doubled, (images(),))
            return output.square().sum()

        self.check(run, ready())

    def test_a_hook_that_changes_what_a_norm_gives(self) -> None:
        def run(qmodel: QuantModel) -> Tensor:
            return qmodel(images()).square().sum()  # type: ignore[no-any-return]

        qmodel = ready()
        norms = [module for module in qmodel.modules() if isinstance(module, nn.BatchNorm2d)]
        norms[0].register_forward_hook(lambda module, args, output: output * 2)
        self.check(run, qmodel)

    def test_a_second_forward_of_ranges_that_follow(self) -> None:
        def run(qmodel: QuantModel) -> Tensor:
            first: Tensor = qmodel(images()).square().sum()
            return first + qmodel(images() * 3).square().sum()

        qmodel = ready("uniform", "uniform")
        for quantizer in qmodel.quantizers():
            quantizer.follow_range(True)
        self.check(run, qmodel)

    def test_a_tensor_that_opaque_code_changes_in_place(self) -> None:
        class Opaque(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

            def forward(self, x: Tensor) -> Tensor:
                if float(x.sum()) > 1e9:
                    return x
                y = self.norm(input=self.conv1(x))
                y += 1.0
                return self.conv2(y)  # type: ignore[no-any-return]

        torch.manual_seed(0)
        config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}}
        qmodel = prepared(Opaque(), [images()], parse_qconfig(config | {"A": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}}))
        qmodel.init_QAT()
        self.check(lambda candidate: candidate(images()).square().sum(), qmodel)

    def test_nothing_stays_alive_without_a_backward(self) -> None:
        config = {"DEVICE": "cpu", "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}}
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Conv2d(4, 2, 3), nn.Softmax(1))
        qmodel = prepared(model, [images()], parse_qconfig(config | {"A": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}}}))
        qmodel.init_QAT()
        everything(qmodel)
        qmodel.train()
        outputs = []
        qmodel.model.get_submodule("0").register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))
        for _ in range(3):
            qmodel(images())
        gc.collect()
        assert len(outputs) == 3 and all(output() is None for output in outputs)
