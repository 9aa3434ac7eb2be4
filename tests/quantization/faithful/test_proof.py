from __future__ import annotations

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import sparsebit
from sparsebit.errors import CaptureError
from sparsebit.graph.checking.outcome import tensor_at
from sparsebit.graph.checking.verification import Reference
from sparsebit.quantization import QuantModel
from sparsebit.quantization.faithful import gradient_check, proof
from tests.quantization.tiny import calibrated, prepared, qconfig


def factor(x: Any) -> int:
    """2 where the code runs, 1 where it is traced: a difference that no tracer can see."""
    return 1 if isinstance(x, fx.Proxy) else 2


class Block(nn.Module):
    """Its graph computes something else than its code, for a reason that `kind` names."""

    def __init__(self, kind: str = "value") -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(8, 8), kind
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.kind == "value":
            return y * factor(x)
        if self.kind == "dtype":
            return y.to(torch.float64 if factor(x) == 2 else torch.float32)
        if self.kind == "shape":
            return y[: factor(x)]
        if self.kind == "input":
            x.mul_(factor(x))
            return y
        self.seen.add_(factor(x))
        return y


KINDS = ("value", "dtype", "shape", "input", "buffer")


class Net(nn.Module):
    def __init__(self, kind: str = "value") -> None:
        super().__init__()
        self.a, self.block = nn.Linear(8, 8), nn.Sequential(Block(kind), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.a(x).mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("occasion", ["example", "calibration", "one call"])
def test_a_module_whose_graph_differs_runs_its_own_code(kind: str, occasion: str) -> None:
    model, x = Net(kind).eval(), torch.randn(4, 8)
    config = qconfig(bits=16)
    if occasion == "one call":
        qmodel = sparsebit.quantize(model, [x.clone()], config)
    else:
        qmodel = QuantModel(model, config, **({"example_inputs": x} if occasion == "example" else {}))
        qmodel.prepare_calibration()
        with torch.no_grad():
            torch.testing.assert_close(qmodel(x.clone()), model(x.clone()), rtol=0, atol=1e-6)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
    given, expected_given = x.clone(), x.clone()
    torch.testing.assert_close(qmodel(given), model(expected_given), rtol=0, atol=1e-3)
    torch.testing.assert_close(given, expected_given, rtol=0, atol=0)
    (opaque,) = qmodel.coverage.opaque
    assert opaque.path == "block.0" and opaque.quantized_inside == ("block.0.fc",)
    assert "computes something else than its code" in opaque.reason and "test_proof.py" in opaque.line


def test_what_was_found_is_saved(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x])
    loaded = QuantModel.load(qmodel.save(tmp_path / "q"), Net())
    torch.testing.assert_close(loaded(x), qmodel(x), rtol=0, atol=0)
    assert loaded.coverage.opaque == qmodel.coverage.opaque
    assert copy.deepcopy(qmodel).coverage == qmodel.coverage


def test_values_and_gradients_are_compared_in_full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append((run.__name__, torch.backends.cudnn.allow_tf32))
            return run(*args, **kwargs)

        return noted

    for place, name in (
        (proof, "outcome_of"),
        (gradient_check, "with_gradients"),
        (Reference, "outcome"),
        (Reference, "gradients"),
    ):
        monkeypatch.setattr(place, name, noting(getattr(place, name)))
    x = torch.randn(4, 8)
    QuantModel(nn.Linear(8, 8), qconfig(), example_inputs=x).verify_training(x, lambda output: output.square().mean())
    assert set(seen) == {(name, False) for name in ("outcome_of", "with_gradients", "outcome", "gradients")}
    assert torch.backends.cudnn.allow_tf32  # torch's default


def test_verification_can_be_left_out_and_is_told() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig(), example_inputs=x, verify=False)
    assert not torch.allclose(qmodel(x), model(x))
    assert "verify=False" in qmodel.coverage.notes[-1]
    assert not calibrated(model, [x]).coverage.notes


def test_code_that_sees_wrapped_layers_by_their_type_is_left_untouched() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if type(layer) is nn.Linear else x
            return x if x.sum() > 1e9 else x + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.picky = nn.Linear(8, 8), Picky()

        def forward(self, x: Tensor) -> Tensor:
            return self.picky(self.a(x))

    model, x = Outer().eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x], qconfig(bits=16))
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    assert any(layer.name == "picky" and "something else" in layer.reason for layer in qmodel.coverage.float_layers)


def test_own_code_asks_isinstance_of_wrapped_layers() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if isinstance(layer, (nn.Linear, nn.BatchNorm1d, nn.ReLU)) else x * 0
            return x if x.sum() > 1e9 else x + 1

    model, x = Asking().eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x], qconfig(bits=16), verify=False)
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    assert qmodel.coverage.num_weighted_quantized == 1


def test_the_users_model_and_the_random_numbers_are_left_alone() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.log = nn.Linear(8, 8), [0]
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.log.append(1)
            return self.fc(x) + random.random() * 0

    model, x = Stateful().eval(), torch.randn(4, 8)
    torch.manual_seed(0)
    random.seed(0)
    qmodel = QuantModel(model, qconfig(), example_inputs=x)
    assert (float(model.seen), model.log) == (0, [0])  # type: ignore[arg-type]
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0)), random.Random(0).random()
    assert (float(torch.rand(1)), random.random()) == (float(expected[0]), expected[1])
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(x)
    assert (float(model.seen), model.log) == (0, [0])  # type: ignore[arg-type]


def test_a_model_that_differs_from_itself_is_told_and_runs_its_own_code() -> None:
    clock = functools.partial(next, itertools.count())

    class Clock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + clock()

    x = torch.randn(2, 8)
    qmodel = QuantModel(nn.Sequential(nn.Linear(8, 8), Clock()).eval(), qconfig(), example_inputs=x)
    assert "returns another result when example_inputs runs again" in qmodel.coverage.notes[-1]
    assert [module.path for module in qmodel.coverage.opaque] == ["1"]
    with torch.no_grad():
        assert float((qmodel(x) - qmodel(x)).abs().min()) > 0.9


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
def test_code_that_asks_for_the_dtype_is_no_rounding(with_example: bool) -> None:
    """In float64 the copy is right: that proves nothing for float32."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            is_float = not isinstance(x, fx.Proxy) and x.dtype == torch.float32
            return self.one(x) if is_float else self.other(x)

    model, x = Asks().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig(), example_inputs=x if with_example else None)
    torch.testing.assert_close(qmodel(x), model(x), rtol=1e-4, atol=1e-4)
    assert [opaque.path for opaque in qmodel.coverage.opaque] == [""]


def test_rounding_that_a_model_amplifies_is_no_difference() -> None:
    class Chaotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.norm(self.conv(x)) * 1e5)

    qmodel = QuantModel(Chaotic().eval(), qconfig({"SCHEDULE.FUSE_BN": True}), example_inputs=torch.randn(2, 4, 9))
    assert not qmodel.coverage.opaque and not qmodel.coverage.notes


@pytest.mark.parametrize("change", ["training", "loading", "half"])
def test_other_weights_than_the_originals_are_not_compared(change: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig())
    if change == "half":
        qmodel, x = qmodel.double(), x.double()
    elif change == "loading":
        qmodel.load_state_dict({name: value.clone() for name, value in qmodel.state_dict().items()})
    else:
        with torch.no_grad():
            for parameter in qmodel.parameters():
                parameter.add_(1)
    qmodel.prepare_calibration()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        qmodel(x)
    assert not qmodel.coverage.opaque


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("place", ["conv", "norm"])
def test_folding_leaves_hooked_layers_alone(kind: str, place: str) -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    model, x = Folding().eval(), torch.randn(2, 3, 4, 4)
    if kind == "pre":
        model.get_submodule(place).register_forward_pre_hook(lambda _, args: args[0] * 2)
    else:
        model.get_submodule(place).register_forward_hook(lambda _, __, output: output * 2)
    qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}), verify=False)
    torch.testing.assert_close(qmodel(x), model(x))
    assert not QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}), example_inputs=x).coverage.opaque


def test_a_folded_norm_gives_its_input_in_train_mode_too() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                return self.norm(self.conv(x))
            return self.norm(self.conv(x)) + 0

    model = Guarded().eval()
    qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True}), example_inputs=torch.randn(2, 3, 4, 4)).train()
    x = torch.randn(5, 3, 4, 4) * 3 + 1  # fails the guard: the model's own code runs
    torch.testing.assert_close(qmodel(x), model(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class Adversarial(nn.Module):
    """Its value is right in a graph, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x if isinstance(x, fx.Proxy) else Reversed.apply(x)
        return self.b(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(8, 8), Adversarial(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.stem(x))))


def test_gradients_that_differ_are_traced_to_their_module() -> None:
    model, x = Head(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig(), example_inputs=x)
    assert not qmodel.coverage.opaque  # values alone do not tell
    check = qmodel.verify_training(x, lambda output: output.square().mean())
    assert list(check.own_code) == ["inner"] and "the gradient of" in check.own_code["inner"]
    assert "stem.weight" in check.compared and not check.not_compared
    qmodel.train()(x).sum().backward()
    model.train()(x).sum().backward()
    torch.testing.assert_close(qmodel.get_parameter("model.stem.op.weight").grad, model.stem.weight.grad)


def test_gradients_that_differ_in_a_calibrated_model_are_an_error() -> None:
    x = torch.randn(4, 8)
    qmodel = calibrated(Head().eval(), [x])
    with pytest.raises(CaptureError, match=r"in inner: the gradient of .*before calibration"):
        qmodel.verify_training(x, torch.sum)
    assert qmodel.is_quantized("weight") and not qmodel.training


def test_gradients_of_an_ordinary_model_are_equal() -> None:
    class Ordinary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))

    model, x = Ordinary(), torch.randn(4, 3, 8, 8)
    for fold in (False, True):
        qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": fold}), example_inputs=x)
        before = {name: value.clone() for name, value in qmodel.state_dict().items()}
        check = qmodel.verify_training((x, torch.zeros(4)), lambda output: output.square().sum())
        assert "input 0" in check.compared and not check.own_code
        assert check.not_compared == (("conv.bias", "conv.weight", "norm.bias", "norm.weight") if fold else ())
        assert all(torch.equal(value, before[name]) for name, value in qmodel.state_dict().items())
        assert all(parameter.grad is None for parameter in (*model.parameters(), *qmodel.parameters()))


def test_trained_weights_have_nothing_to_be_compared_with() -> None:
    qmodel = QuantModel(Head(), qconfig())
    with torch.no_grad():
        qmodel.get_parameter("model.stem.op.weight").add_(1)
    with pytest.raises(CaptureError, match="after the weights have changed"):
        qmodel.verify_training(torch.randn(2, 8), torch.sum)


def test_own_code_may_index_and_iterate_over_a_captured_container() -> None:
    class Slicing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9 or not isinstance(self.seq, nn.Sequential) or self.seq[0] not in self.seq:
                return x
            for layer in self.seq[:2]:
                x = layer(x)
            return self.seq[-1](x) + len(self.seq) + len(list(self.seq))

    model, x = Slicing().eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x], qconfig(bits=16), verify=False)
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    assert qmodel.coverage.num_weighted_quantized == 2


def test_own_code_that_takes_half_of_a_folded_pair_is_noticed() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seq, self.last = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Conv2d(4, 2, 1)
            self.seq[1].running_var.fill_(9.0)  # type: ignore[union-attr, operator]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.seq[0](x)) if x.sum() < 1e9 else self.seq(x)

    model, x = Half().eval(), torch.randn(2, 3, 4, 4)
    qmodel = calibrated(model, [x], qconfig({"SCHEDULE.FUSE_BN": True}, bits=16))
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    assert qmodel.coverage.num_weighted_quantized == 2  # its layers are quantized all the same


def test_changed_weights_are_not_lost_in_a_new_capture() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
            return self.fc(x) if gain is None else self.fc(x) * gain

    qmodel, x = QuantModel(Optional().eval(), qconfig()), torch.randn(4, 8)
    qmodel(x, gain=x)  # captured again
    with torch.no_grad():
        qmodel.get_parameter("model.fc.op.weight").zero_()
    with pytest.raises(CaptureError, match="would be lost"):
        qmodel(x)


@pytest.mark.parametrize("inner", [False, True], ids=["the whole", "a module inside"])
@pytest.mark.parametrize("differs", [False, True], ids=["its graph is right", "its graph differs"])
@torch.no_grad()
def test_a_compiled_model_is_compared_and_quantized_as_what_was_compiled(inner: bool, differs: bool) -> None:
    part = Block() if differs else nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 8), part).eval()
    x = torch.randn(4, 8)
    expected = model(x)
    if inner:
        model[1] = torch.compile(part, backend="eager")  # type: ignore[assignment]
    compiled: Any = model if inner else torch.compile(model, backend="eager")
    compiled(x)
    qmodel = calibrated(compiled, [x], qconfig(bits=16), example_inputs=x)
    assert qmodel.coverage.num_weighted_quantized == 2
    torch.testing.assert_close(qmodel(x), expected, rtol=1e-3, atol=1e-3)
    assert [untraced.path for untraced in qmodel.coverage.opaque] == ["1"] * differs


def test_parameters_of_an_untouched_module_are_not_quantized() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x) if type(self.fc) is nn.Linear else x
            return x @ self.table if x.sum() < 1e9 else x

    model, x = Picky().eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x], qconfig(bits=2), example_inputs=x)
    torch.testing.assert_close(qmodel(x), model(x))


def test_a_graph_that_cannot_be_prepared_leaves_the_module_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph_module: fx.GraphModule) -> None:
        raise RuntimeError("a fault")

    monkeypatch.delenv("SPARSEBIT_RAISE_OWN_FAULTS", raising=False)
    monkeypatch.setattr("sparsebit.quantization.building.stages.simplify", failing)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))).eval(), torch.randn(4, 8)
    qmodel = calibrated(model, [x], qconfig(bits=16))
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-3)
    assert qmodel.coverage.num_weighted_quantized == 2
    assert all("cannot be prepared" in module.reason for module in qmodel.coverage.opaque)


def test_an_optimizer_made_before_a_new_capture_holds_live_parameters() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig({"W.QUANTIZER.TYPE": "lsq"}))
    before = dict(qmodel.named_parameters())
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(x)
    assert qmodel.coverage.opaque  # it was captured again
    after = dict(qmodel.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


def test_statistics_of_batch_norms_are_compared_in_train_mode() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig(), example_inputs=x)
    assert qmodel.training and not qmodel.coverage.opaque
    qmodel(x)  # moves the copy's statistics, not the model's
    qmodel.prepare_calibration()
    qmodel.train()
    with torch.no_grad():
        qmodel(x)
    assert not qmodel.coverage.opaque


def test_a_copy_of_a_copy_with_a_patched_forward_has_layers_of_its_own() -> None:
    class Patched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() < 1e9 else x

    model, x = nn.Sequential(Patched()).eval(), torch.randn(4, 8)
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) + model[0].fc(x)  # type: ignore[method-assign]
    qmodel = calibrated(model, [x])
    copied = copy.deepcopy(qmodel)
    torch.testing.assert_close(copied(x), qmodel(x), rtol=0, atol=0)
    expected = qmodel(x)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if "fc" in name:
                parameter.zero_()
    assert not copied(x).any()
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=0)


class AsksForType(nn.Module):
    """Its own code sees that layers are wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        return self.fc(x) if type(self.fc) is nn.Linear else x - self.fc(x)


class AsksForChildren(AsksForType):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        return self.fc(x) if any(True for _ in self.fc.children()) else x - self.fc(x)


@pytest.mark.parametrize("kind", [AsksForType, AsksForChildren, Net])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_first_call_is_compared(kind: type[nn.Module], training: bool) -> None:
    model, x = kind().train(training), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig())
    torch.testing.assert_close(qmodel(x), model(x), rtol=0, atol=1e-6)
    qmodel(x).sum().backward()
    assert all(parameter.grad is not None for parameter in qmodel.parameters() if parameter.requires_grad)
    assert not torch.allclose(QuantModel(model, qconfig(), verify=False)(x), model(x))
    assert not torch.allclose(QuantModel(model, qconfig(), verify="calibration")(x), model(x))


def test_comparing_the_first_call_leaves_no_trace() -> None:
    seen: list[Any] = []

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), 0
            self.fc.register_forward_hook(lambda *_: seen.append(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x.add_(torch.rand(()))
            return self.norm(self.fc(x)) * self.calls

    model, twin = Stateful().train(), Stateful().train()
    twin.load_state_dict(model.state_dict())
    qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": False}))
    for call in range(3):
        results = []
        for run in (qmodel, twin):
            torch.manual_seed(call)
            seen.clear()
            x = torch.ones(4, 8)
            results.append((run(x), x, list(seen), torch.rand(3)))
        torch.testing.assert_close(results[0], results[1])
    assert model.calls == 0 and model.norm.num_batches_tracked == 0


def test_first_calls_in_threads_wait_for_the_comparison() -> None:
    model, x = AsksForType().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig())
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: qmodel(x), range(4)))
    for output in outputs:
        torch.testing.assert_close(output, model(x), rtol=0, atol=1e-6)


def test_calls_without_values_are_not_the_first_one() -> None:
    model, x = AsksForType().eval(), torch.randn(4, 8)
    qmodel = QuantModel(Net().eval(), qconfig())
    exported = torch.export.export(qmodel, (x,), strict=False)
    assert exported.module()(x).shape == (4, 8)
    assert torch.func.vmap(qmodel)(x[None]).shape == (1, 4, 8)
    torch.testing.assert_close(qmodel(x), qmodel.original(x), rtol=0, atol=1e-6)
    loaded = prepared(model, [x])
    loaded.calc_qparams()
    loaded(x)
    assert not loaded.proof.first_call_is_due


class Cached(nn.Module):
    """State of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.block = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Identity())
        self.last: Tensor | None = None
        self.block.seen = []  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.last is None else x + self.last
        self.last = x.detach().mean(0)
        self.block.seen.append(float(x.detach().mean()))  # type: ignore[union-attr, operator]
        return self.block(self.norm(self.fc(x))) * len(self.block.seen)  # type: ignore[arg-type, no-any-return]


class Box:
    number = 0


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.box = nn.Linear(8, 8), Box()

    def forward(self, x: Tensor) -> Tensor:
        self.box.number += 1
        return self.fc(x) * self.box.number


class WithOption(nn.Module):
    """Captured again where `y` is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.inner(x)
        return x if y is None else x + y


def test_state_is_kept_in_a_new_capture() -> None:
    model, x = WithOption(Cached()).train(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": False}))
    twin = copy.deepcopy(model)
    for extra in ({}, {}, {"y": x}, {"y": x}, {}):
        torch.testing.assert_close(qmodel(x, **extra), twin(x, **extra))
    assert model.inner.block.seen == []  # type: ignore[union-attr]
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(tensor_at(qmodel.source, name), buffer, rtol=0, atol=1e-5)


def test_a_copy_of_a_copy_knows_what_has_changed() -> None:
    x = torch.randn(4, 8)
    qmodel = QuantModel(WithOption(Cached()).train(), qconfig({"SCHEDULE.FUSE_BN": False}))
    qmodel(x)
    torch.testing.assert_close(copy.deepcopy(qmodel)(x, y=x), qmodel(x, y=x))


def test_state_that_a_new_capture_would_lose_is_an_error() -> None:
    qmodel, x = QuantModel(WithOption(Boxed()), qconfig()), torch.randn(4, 8)
    qmodel(x)
    with pytest.raises(CaptureError, match=r"inner\.box has changed since it was built"):
        qmodel(x, y=x)


class Asks(nn.Module):
    """Captured for batches of four; other ones run this code, which looks at its layer."""

    def __init__(self, by_type: bool) -> None:
        super().__init__()
        self.fc, self.by_type = nn.Linear(8, 8), by_type

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        x = x.reshape(len(x), 8) if len(x) == 4 else x * 1
        x = x if gain is None else x * gain
        is_plain = type(self.fc) is nn.Linear if self.by_type else isinstance(self.fc, nn.Linear)
        return self.fc(x) if is_plain else x


class AsksWithin(nn.Module):
    """Cannot be traced, so that its part has a graph of its own."""

    def __init__(self, by_type: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(Asks(by_type), nn.Linear(8, 8))
        self.gain: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x / 2 if x.sum() > 1e6 else x
        return self.part[1](self.part[0](x, self.gain) if self.gain else self.part[0](x))


_PLACES = {"root": Asks, "nested": AsksWithin}


@pytest.mark.parametrize("verify", [True, "calibration"])
@pytest.mark.parametrize("place", _PLACES)
def test_own_code_that_runs_for_another_form_of_inputs_is_compared_at_its_first_call(place: str, verify: Any) -> None:
    x = torch.randn(4, 8)
    other = x[:3]
    model = _PLACES[place](by_type=True).eval()
    settings = {"example_inputs": x, "verify": verify}
    for qmodel in (QuantModel(model, qconfig(), **settings), calibrated(model, [x], **settings)):
        for _ in range(2):  # what is known to be wrong stays refused
            with pytest.raises(CaptureError, match=r"when its layers are quantized or folded: the output differs"):
                qmodel(other)
        assert qmodel(x).shape == x.shape
        with pytest.raises(CaptureError, match="when its layers are quantized"):
            copy.deepcopy(qmodel)(other)
    model = _PLACES[place](by_type=False).eval()
    qmodel = calibrated(model, [x], qconfig(bits=16), **settings)
    with torch.no_grad():
        torch.testing.assert_close(qmodel(other), model(other), rtol=0, atol=1e-3)
        path = "" if place == "root" else "part.0"
        assert {path: ""} == {
            key[0]: found for key, found in qmodel.first_calls.compared_sources.items()
        } and qmodel.is_quantized("weight")


@pytest.mark.parametrize("change", ["buffer", "weight"])
@pytest.mark.parametrize("by_type", [True, False], ids=["by type", "by isinstance"])
def test_own_code_is_compared_too_where_the_copy_has_changed_since_it_was_built(change: str, by_type: bool) -> None:
    """The original no longer does what the copy does; the copy's code with plain layers does."""

    class Changing(Asks):
        def __init__(self) -> None:
            super().__init__(by_type)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
            if change == "buffer":
                self.mean.copy_(x.mean(0))
            return super().forward(x, gain) + self.mean

    x, other = torch.randn(4, 8), torch.randn(3, 8)
    model = Changing().eval()
    qmodel = calibrated(model, [x], qconfig(bits=16), example_inputs=x)
    for own in (model, qmodel.source):
        if change == "weight":
            with torch.no_grad():
                own.fc.weight.mul_(0.9)
    if by_type:
        with pytest.raises(CaptureError, match=r"when its layers are quantized or folded: the output differs"):
            qmodel(other)
        return
    with torch.no_grad():
        model(x)  # as the calibration did
        torch.testing.assert_close(qmodel(other), model(other), rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["grad_fn", "grad", "_base"])
def test_code_that_asks_whether_a_tensor_has_a_gradient_keeps_its_own_code(name: str) -> None:
    """`is None` of a traced value is never true; on the first batch both branches may give the same."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return y.clamp(max=100.0) if getattr(y, name) is None else y

    model = Asking().eval()
    qmodel = QuantModel(model, qconfig())
    with torch.no_grad():
        for x in (torch.randn(2, 8), 1000 * torch.randn(2, 8)):
            torch.testing.assert_close(qmodel(x), model(x))
    assert f"reads .{name} of a tensor" in str(qmodel.coverage)


def test_own_code_inside_that_is_called_in_another_way_is_compared_at_its_first_call() -> None:
    x, model = torch.randn(4, 8), AsksWithin(by_type=True).eval()
    qmodel = calibrated(model, [x], example_inputs=x)
    qmodel.model.gain = 2.0
    with pytest.raises(CaptureError, match=r"this call of part\.0 have another form.*the module's own code"):
        qmodel(x)
    qmodel.model.gain = None
    qmodel(x)


def test_own_code_inside_that_fails_with_quantized_layers_is_refused() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if len(x) == 4 else {nn.Linear: self.fc}[type(self.fc)](x)

    class Around(AsksWithin):
        def __init__(self) -> None:
            super().__init__(by_type=False)
            self.part[0] = Names()

    x = torch.randn(4, 8)
    qmodel = calibrated(Around().eval(), [x], example_inputs=x)
    with pytest.raises(CaptureError, match="when its layers are quantized or folded: KeyError"):
        qmodel(torch.randn(3, 8))


@pytest.mark.parametrize("place", ["root", "nested"])
def test_frozen_norms_in_train_mode_are_no_difference(place: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x.reshape(len(x), 8) if len(x) == 4 else x * 1))

    class Around(AsksWithin):
        def __init__(self) -> None:
            super().__init__(by_type=False)
            self.part[0] = Normed()

    model = (Normed() if place == "root" else Around()).train()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.normal_()  # type: ignore[union-attr]
            norm.eval()
    x, other = torch.randn(4, 8), torch.randn(3, 8)
    qmodel = QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": False}), example_inputs=x)
    for batch in (other, x):
        torch.testing.assert_close(qmodel(batch), model(batch))
    assert list(qmodel.first_calls.compared_sources.values()) == [""]


def test_a_hook_runs_once_where_a_guard_fails_behind_it() -> None:
    seen: list[int] = []

    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.fc.register_forward_hook(lambda *_: seen.append(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            for index in range(x.shape[0]):
                y[index] += index
            return y

    model, x = Loops().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig(), example_inputs=x)
    with torch.no_grad():
        for batch in (torch.randn(3, 8), x, torch.randn(3, 8), torch.randn(2, 8)):
            seen.clear()
            output = qmodel(batch)
            assert len(seen) == 1
            torch.testing.assert_close(output, model(batch))


def test_observing_the_example_leaves_state_and_inputs_alone() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.randn(8, 8)), 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return y.mul_(x @ self.weight) + self.calls

    model, x, y = Counts().eval(), torch.randn(4, 8), torch.randn(4, 8)
    given = y.clone()
    qmodel = QuantModel(model, qconfig(), example_inputs=(x, given))
    torch.testing.assert_close(given, y, rtol=0, atol=0)
    torch.testing.assert_close(qmodel(x, y.clone()), model(x, y.clone()))
    assert "returns another result" not in str(qmodel.coverage)


class Remembers(nn.Module):
    """Adds the mean of the last call, which is a plain attribute, and reads a weight in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(4, 4)), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...i,ij->...j", x, self.weight) + self.last
        self.last = x.detach().reshape(-1, 4).mean(0)
        return y


def test_a_state_that_earlier_calls_have_moved_is_no_difference() -> None:
    torch.manual_seed(0)
    model, batches = Remembers().eval(), torch.randn(4, 2, 4)
    qmodel = QuantModel(model, qconfig(bits=16), example_inputs=batches[0])
    with torch.no_grad():
        expected = [model(x) for x in batches]
        found = [qmodel(x) for x in batches[:2]]
        qmodel.prepare_calibration()
        found += [qmodel(x) for x in batches[2:]]
    torch.testing.assert_close(found, expected)
    assert "changes the attribute 'last'" in str(qmodel.coverage)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + torch.randn(x.shape, generator=self.generator)
        return y


@pytest.mark.parametrize("settings", [{}, {"example_inputs": torch.ones(4, 8)}], ids=["without an example", "example"])
def test_a_generator_of_the_model_is_where_its_own_code_would_have_it(settings: dict[str, Any]) -> None:
    """What is drawn while the model is captured and compared is not missing afterwards."""
    model, x = OwnGenerator().eval(), torch.ones(4, 8)
    qmodel = QuantModel(model, qconfig(), **settings).eval()
    qmodel.set_quant(w_quant=False, a_quant=False)
    with torch.no_grad():
        found = [qmodel(x) for _ in range(3)]
        expected = [model(x) for _ in range(3)]
    assert all(map(torch.allclose, found, expected))
