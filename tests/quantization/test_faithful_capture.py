"""A quantized copy computes what the model computes, or runs the model's own code and says so."""

from __future__ import annotations

import copy
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization import QuantModel
from tests.parameters import first_fast, listed
from tests.quantization.tiny import prepared, qconfig


def plain_copy(model: nn.Module, *args: Any, with_example: bool = True) -> QuantModel:
    """The captured model, quantization off."""
    return QuantModel(model, qconfig(bits=16), example_inputs=args if with_example else None)


def assert_faithful(model: nn.Module, *args: Any, with_example: bool = True) -> QuantModel:
    """Float, then 16 bits, against the model's own output; gives the quantized model."""
    model.eval()
    with torch.no_grad():
        expected = model(*args)
        qmodel = plain_copy(model, *args, with_example=with_example)
        torch.testing.assert_close(qmodel(*args), expected)
        qmodel.prepare_calibration()
        qmodel(*args)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        torch.testing.assert_close(qmodel(*args), expected, rtol=1e-2, atol=1e-2)
    return qmodel


def reasons(qmodel: QuantModel) -> dict[str, str]:
    return {module.path: module.reason for module in qmodel.coverage.opaque}


class Chain(nn.Module):
    """Linear, a child under any name, linear."""

    def __init__(self, child: nn.Module, name: str = "child") -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Linear(8, 8), nn.Linear(8, 8), name
        self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.get_submodule(self.name)(self.first(x)))


class Opaque(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class OwnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight)


both = pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])


@pytest.mark.sample(2)
@both
@pytest.mark.parametrize(
    "name", first_fast(listed("source | graph | _graph | self | code | user_graph | inputs | _source"), 4)
)
def test_children_of_any_name(name: str, with_example: bool) -> None:
    x = torch.randn(4, 8)
    for outer in (Chain, Opaque):
        for child in (nn.Linear(8, 8), OwnWeight(), Doubled(), Chain(OwnWeight(), name)):
            qmodel = assert_faithful(outer(child, name), x, with_example=with_example)
            assert torch.equal(copy.deepcopy(qmodel)(x), qmodel(x))
            layers = {layer.name for layer in qmodel.coverage.quantized}
            assert not isinstance(child, nn.Linear) or name in layers
            assert not isinstance(child, Chain) or f"{name}.first" in layers


class AsksLayer(Chain):
    """Asks one of its layers for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y) if self.first.training else y - self.last(y)


def test_the_mode_of_a_layer_is_asked_at_run_time_or_reported() -> None:
    qmodel = assert_faithful(AsksLayer(nn.Identity()), torch.randn(4, 8))
    assert any("first branches on self.training" in note for note in qmodel.coverage.notes)


def test_parameters_of_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.graph = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.graph

    assert "'graph'" in reasons(assert_faithful(Named(), torch.randn(4, 8)))[""]


@both
def test_a_graph_inside_opaque_code_inside_a_graph(with_example: bool) -> None:
    class Optional(Chain):
        def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
            return super().forward(x)

    assert_faithful(Chain(Opaque(Optional(OwnWeight()))), torch.randn(4, 8), with_example=with_example)


@both
@pytest.mark.parametrize("compiled", ["script", "trace"])
@pytest.mark.parametrize("outer", [Chain, Opaque])
def test_scripted_children(outer: type[Chain], compiled: str, with_example: bool) -> None:
    child, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(child) if compiled == "script" else torch.jit.trace(child, x)
    assert_faithful(outer(scripted), x, with_example=with_example)


@both
def test_a_linear_function_with_a_vector(with_example: bool) -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.vector = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.linear(x), self.vector)

    assert_faithful(Score(), torch.randn(4, 8), with_example=with_example)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@both
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_and_buffers(layout: torch.layout, with_example: bool) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("fixed", torch.eye(4).to_sparse())

        def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
            return self.fixed @ self.linear(adjacency @ x)

    adjacency = (torch.rand(4, 4) > 0.5).float().to_sparse(layout=layout)
    assert_faithful(Graph(), adjacency, torch.randn(4, 8), with_example=with_example)


@both
def test_a_model_that_would_exit_in_a_trace(with_example: bool) -> None:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if type(x).__name__ != "Tensor" and not hasattr(torch.Tensor, type(x).__name__):
                sys.exit(3)
            return self.linear(x)

    assert_faithful(Chain(Exits()), torch.randn(4, 8), with_example=with_example)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_an_encoder_with_a_padding_mask(nested: bool, norm: bool) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            final = nn.LayerNorm(8) if norm else None
            self.encoder = nn.TransformerEncoder(layer, 2, norm=final, enable_nested_tensor=nested)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    model, x, mask = Padded().eval(), torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    qmodel = plain_copy(model, x, mask)
    for hidden in (slice(3, 5), slice(0, 2)):  # padding at the end, and elsewhere
        mask.zero_()[0, hidden] = True
        with torch.no_grad():
            torch.testing.assert_close(qmodel(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(qmodel(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)
    assert not reasons(qmodel)


def test_a_capture_anew_keeps_the_mode() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            x = self.dropout(self.linear(x))
            return x if scale is None else x * scale

    model, x = Optional().eval(), torch.randn(4, 8)
    qmodel = QuantModel(model, qconfig())
    torch.testing.assert_close(qmodel(x, x), model(x, x))


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, gain: Any = 1.0) -> Tensor:
        return self.fc(x) * gain


class WritesAfterwards(nn.Module):
    """Its own code writes into what its part has read."""

    def __init__(self, gain: Any) -> None:
        super().__init__()
        self.part, self.gain = Gained(), gain

    def forward(self, x: Tensor) -> Tensor:
        x = x / 2 if x.sum() > 1e6 else x * 1
        y = self.part(x, self.gain)
        x += 1
        return y + x


@pytest.mark.parametrize("gain", [1.5, 2, torch.full((8,), 1.5)], ids=["float", "int", "tensor"])
def test_a_number_in_the_place_of_a_tensor_is_read_as_it_is(gain: Any) -> None:
    qmodel = assert_faithful(WritesAfterwards(gain), torch.randn(4, 8))
    assert list(reasons(qmodel)) == [""]


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_own_code_may_write_into_what_an_attention_has_read(training: bool, with_example: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x / 2 if x.sum() > 1e6 else x * 1
            y = self.attention(x, x, x)[0]
            x += 1
            return y

    model, x = Attends().train(training), torch.randn(3, 5, 8)
    qmodel = QuantModel(model, qconfig(bits=16), example_inputs=x if with_example else None)
    expected = torch.autograd.grad(model(x).square().sum(), model.attention.out_proj.weight)[0]
    for is_on in (False, True):
        if is_on:
            qmodel.prepare_calibration()
            qmodel(x)
            qmodel.init_QAT()
            qmodel.train(training)
        qmodel.zero_grad()
        qmodel(x).square().sum().backward()
        (weight,) = (p for name, p in qmodel.named_parameters() if name.endswith("out_proj.op.weight"))
        torch.testing.assert_close(weight.grad, expected, rtol=1e-2, atol=1e-2)


class Halves(nn.Module):
    """Writes into what its layer has read; the float layer saves a contiguous copy for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.fc = nn.MaxPool1d(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x.swapaxes(1, 2))
        y: Tensor = self.fc(pooled)
        pooled /= 2
        return y * 2 if len(x) > 2 else y


class InBfloat16(nn.Module):
    """Code of its own, since it holds an autocast; the float layer saves what was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.fc(x).float()


class WritesBehindCode(nn.Module):
    """Its graph writes into what a part with code of its own has read."""

    def __init__(self) -> None:
        super().__init__()
        self.part = InBfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y: Tensor = self.part(x)
        x += 1
        return y * x.detach()


@pytest.mark.parametrize(
    ("make", "example", "batch"),
    [(Halves, (2, 4, 8), (3, 4, 8)), (WritesBehindCode, (2, 8), (2, 8))],
    ids=["after a failed guard", "behind own code"],
)
def test_what_a_quantizer_saves_may_be_overwritten(make: Any, example: Any, batch: Any) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(batch, requires_grad=True)
    qmodel = prepared(model, [torch.randn(example) * 4], qconfig(bits=16), example_inputs=torch.randn(example))
    qmodel.init_QAT()
    qmodel.accelerate(False)  # every quantizer by itself
    for net in (model, qmodel):
        net.zero_grad()
        net(x).square().sum().backward()
    expected = next(p.grad for name, p in model.named_parameters() if name.endswith("fc.weight"))
    (weight,) = (p for name, p in qmodel.named_parameters() if name.endswith("fc.op.weight"))
    torch.testing.assert_close(weight.grad, expected, rtol=3e-2, atol=3e-2)


class Changing(nn.Module):
    """Its forward changes its own parameters or children."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return self.b(torch.relu(self.a(x)))

    def change(self) -> None:
        raise NotImplementedError


class Decays(Changing):
    def change(self) -> None:
        with torch.no_grad():
            self.a.weight.mul_(0.9)


class Shifts(Changing):
    def change(self) -> None:
        self.a.bias.data.add_(0.1)


class Clips(Changing):
    def change(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Normalizes(Changing):
    @staticmethod
    def normalize(weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.data.div_(weight.norm())

    def change(self) -> None:
        self.normalize(self.a.weight)


class Replaces(Changing):
    def change(self) -> None:
        self.a.weight.data = self.a.weight.data * 0.9


class Swaps(Changing):
    def change(self) -> None:
        self.a, self.b = self.b, self.a


class Bounded(nn.Sequential):
    """`max_norm` shortens the rows that a forward reads, in place."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8))


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("kind", [Decays, Shifts, Clips, Normalizes, Replaces, Swaps, Bounded])
def test_a_model_that_changes_its_own_weights(kind: type[nn.Module], with_example: bool) -> None:
    model = kind().eval()
    x = torch.randint(0, 10, (3, 4)) if kind is Bounded else torch.randn(4, 8)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    reference, qmodel = copy.deepcopy(model), plain_copy(model, x, with_example=with_example)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(qmodel(x), reference(x))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        torch.testing.assert_close(tensor, before[name][1], rtol=0, atol=0)


class Tags(Changing):
    """Leaves a note on a tensor, for whoever reads it outside."""

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.b(torch.relu(self.a(x)))
        y.note = "seen"
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
def test_what_is_set_on_a_tensor_is_there(with_example: bool) -> None:
    x = torch.randn(4, 8)
    qmodel = plain_copy(Tags().eval(), x, with_example=with_example)
    assert qmodel(x).note == "seen"
    assert "sets the attribute 'note' of a tensor" in reasons(qmodel)[""]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return y + 1 if x.shape[0] > 4 else y  # type: ignore[no-any-return]


def test_a_layer_that_is_replaced_in_the_copy_is_replaced_in_its_own_code_too() -> None:
    torch.manual_seed(0)
    qmodel = QuantModel(Branching(), qconfig(bits=16), example_inputs=torch.randn(2, 8), verify=False)
    other = nn.Linear(8, 8)
    qmodel.model.b = other
    for batch in (2, 6):  # the graph, then own code behind a guard that does not hold
        x = torch.randn(batch, 8)
        expected = other(qmodel.original.a(x).relu()) + (batch > 4)
        torch.testing.assert_close(qmodel(x), expected)


GENERATOR, PYTHON_GENERATOR = np.random.default_rng(3), random.Random(3)
NEW_NUMBERS: dict[str, Callable[[], float]] = {
    "default_rng": lambda: float(np.random.default_rng().random()),
    "Random": lambda: random.Random().random(),
    "RandomState": lambda: float(np.random.RandomState().rand()),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "urandom": lambda: float(os.urandom(1)[0]) + random.SystemRandom().random(),
    "a global of NumPy": lambda: float(GENERATOR.random()),
    "a global of Python": lambda: PYTHON_GENERATOR.random(),
    "clock": lambda: time.perf_counter() % 1,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", NEW_NUMBERS)
def test_numbers_that_are_new_at_every_call_are_no_constants(kind: str) -> None:
    draw = NEW_NUMBERS[kind]

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + draw()

    x = torch.randn(2, 8)
    qmodel = plain_copy(Chain(Draws()).eval(), x)
    with torch.no_grad():
        assert len({float(qmodel(x).sum()) for _ in range(3)}) == 3
    assert list(reasons(qmodel)) == ["child"]


RARELY: dict[str, Callable[[], bool]] = {
    "default_rng": lambda: np.random.default_rng().random() < 1e-9,
    "RandomState": lambda: np.random.RandomState(None).rand() < 1e-9,
    "Random": lambda: any(random.Random().random() < limit for limit in [1e-9]),
    "SystemRandom": lambda: random.SystemRandom().random() < 1e-9,
    "urandom": lambda: os.urandom(8) == bytes(8),
}


@pytest.mark.parametrize("kind", RARELY)
def test_an_unseeded_draw_that_rarely_matters_is_no_constant(kind: str) -> None:
    """No comparison of a few calls shows it."""
    happens = RARELY[kind]

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0 if happens() else x * 2

    assert list(reasons(plain_copy(Chain(Drops()).eval(), torch.randn(2, 8)))) == ["child"]


class Loads(nn.Module):
    def load(self) -> float:
        return float(os.urandom(8) == bytes(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class LoadsAtEveryCall(Loads):
    def weight(self) -> float:
        return 2 - self.load()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight()


def test_a_draw_matters_where_forward_reaches_it() -> None:
    """Models of transformers have methods that fetch files, and these draw names."""
    assert not reasons(assert_faithful(Chain(Loads()), torch.randn(2, 8)))
    assert list(reasons(plain_copy(Chain(LoadsAtEveryCall()).eval(), torch.randn(2, 8)))) == ["child"]


def test_a_draw_in_a_method_of_a_child_matters() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LoadsAtEveryCall()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.inner.weight()

    assert "child" in reasons(plain_copy(Chain(Calls()).eval(), torch.randn(2, 8)))


def test_a_seeded_generator_is_a_constant() -> None:
    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + np.random.default_rng(7).random() + random.Random(7).random()

    assert not reasons(assert_faithful(Chain(Seeded()), torch.randn(2, 8)))
