from __future__ import annotations

import copy
import pickle
import threading
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.capture import Captured, capture
from sparsebit.graph.region import Region
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.values.call_form import VARYING, call_form


def check_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def called(captured: Captured, path: str = "") -> list[str]:
    return [str(n.target) for n in captured.regions[path].graph_module.graph.nodes if n.op == "call_module"]


def snapshot(model: nn.Module) -> list[Any]:
    """Everything of a model that a capture could spoil."""
    return [
        [(name, id(m), type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)],
        [sorted(set(module.__dict__) - {"_forward_pre_hooks"}) for module in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [(name, id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()],
    ]


class DataBranch(nn.Module):
    """Cannot be traced: it asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return self.linear(-x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + x


class Nested(nn.Module):
    """Untraceable in untraceable, beside a traceable block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block = DataBranch(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if x.mean() > 0 else self.inner(x)


class Host(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))


# --- what cannot be traced


def test_an_untraceable_module_becomes_a_leaf_and_is_entered() -> None:
    model = Host(DataBranch())
    captured = capture(model)
    assert called(captured) == ["first", "part", "last"]
    assert list(captured.loose) == ["part.linear"]
    failure = captured.untraced["part"]
    assert (failure.path, failure.module_type) == ("part", "DataBranch")
    assert "TraceError" in failure.reason
    assert failure.line.endswith("if x.sum() > 0:") and "test_capture.py:" in failure.line
    x = torch.randn(3, 4)
    check_equal(captured.model(x), model(x))


def test_an_untraceable_root_is_entered_too() -> None:
    model = Nested()
    captured = capture(model)
    assert captured.model is not model and type(captured.model) is Nested
    assert set(captured.untraced) == {"", "inner"}
    assert list(captured.regions) == ["block"] and isinstance(captured.model.block, Region)
    assert list(captured.loose) == ["inner.linear"]
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        check_equal(captured.model(x), model(x))


def test_untraceable_in_untraceable_in_a_graph() -> None:
    model = Host(Nested())
    captured = capture(model)
    assert set(captured.untraced) == {"part", "part.inner"}
    assert set(captured.regions) == {"", "part.block"}
    assert list(captured.loose) == ["part.inner.linear"]
    for x in (torch.randn(3, 4), torch.randn(1, 4)):
        check_equal(captured.model(x), model(x))


def test_what_an_opaque_module_holds_can_be_replaced() -> None:
    captured = capture(Host(DataBranch()))
    loose = captured.loose["part.linear"]
    loose.parent._modules[loose.name] = nn.Identity()
    x = torch.randn(3, 4)
    y = captured.regions[""].source.first(x)  # type: ignore[operator]
    expected = captured.regions[""].source.last(y if y.sum() > 0 else -y)  # type: ignore[operator]
    check_equal(captured.model(x), expected)


def test_a_child_of_an_opaque_module_with_optional_arguments_needs_an_example() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.linear(x) if scale is None else self.linear(x) * scale

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x, scale=x) if x.sum() > 0 else self.scaled(x, scale=-x)

    model = Opaque()
    without = capture(model)
    assert "optional arguments" in without.untraced["scaled"].reason
    assert "pass example_inputs" in without.untraced["scaled"].reason
    assert list(without.loose) == ["scaled.linear"]
    x = torch.randn(2, 4)
    captured = capture(model, example=((x,), {}))
    assert list(captured.regions) == ["scaled"]
    check_equal(captured.model(x), model(x))
    check_equal(captured.model.scaled(x), model.scaled(x))  # another form: the module's own code


def test_a_module_registered_twice_in_an_opaque_parent_is_one_thing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Block()
            self.b = self.a
            self.c = nn.Linear(4, 4)
            self.d = self.c

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(self.b(self.a(x)))) if x.sum() > 0 else x

    model = Twice()
    captured = capture(model)
    assert captured.model.a is captured.model.b and isinstance(captured.model.a, Region)
    assert set(captured.loose) == {"c", "d"} and captured.loose["c"].module is captured.loose["d"].module
    x = torch.ones(2, 4)
    check_equal(captured.model(x), model(x))


def test_a_scripted_module_is_a_leaf() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = Host(scripted)
    captured = capture(model)
    assert called(captured) == ["first", "part", "last"] and not captured.untraced
    x = torch.randn(2, 4)
    check_equal(captured.model(x), model(x))


class ListWithCode(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class DictWithCode(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["linear"](x)


def _with_code_of_its_own(model: nn.Module) -> nn.Module:
    model.forward = types.MethodType(lambda self, x: 2 * self.linear(x), model)  # type: ignore[method-assign]
    return model


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    return scripted


def _bare() -> nn.Module:
    model = nn.Module()
    model.linear = nn.Linear(4, 4)
    return model


_CONTAINERS = {
    "a list with a forward": lambda: ListWithCode([nn.Linear(4, 4), nn.Linear(4, 4)]),
    "a dict with a forward": lambda: DictWithCode({"linear": nn.Linear(4, 4)}),
    "a module whose forward is set on it": lambda: _with_code_of_its_own(_bare()),
    "a dict whose forward is set on it": lambda: _with_code_of_its_own(DictWithCode({"linear": nn.Linear(4, 4)})),
}


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("place", ["root", "in a graph", "in own code"])
@pytest.mark.parametrize("make", _CONTAINERS.values(), ids=_CONTAINERS)
def test_containers_with_code_are_captured(make: Any, place: str, with_example: bool) -> None:
    part = make()
    model = part if place == "root" else Host(part) if place == "in a graph" else nn.Sequential(DataBranch(), part)
    x = torch.randn(2, 4)
    captured = capture(model, example=((x,), {}) if with_example else None)
    assert "" in captured.regions and not {"1", "part"} & captured.untraced.keys()
    check_equal(captured.model(x), model(x))


_WITHOUT_A_GRAPH = {
    "TorchScript": (_scripted, "TorchScript"),
    "no forward": (lambda: nn.ModuleList([nn.Linear(4, 4)]), "no forward"),
    "a branch on data": (DataBranch, "control flow"),
    "a policy": (Block, "the policy says so"),
}


@pytest.mark.parametrize(("make", "reason"), _WITHOUT_A_GRAPH.values(), ids=_WITHOUT_A_GRAPH)
def test_a_root_without_a_graph_has_a_reason(make: Any, reason: str) -> None:
    policy = LeafPolicy(own_code={"": reason}) if reason == "the policy says so" else None
    captured = capture(make(), policy)
    assert "" not in captured.regions and reason in captured.untraced[""].reason


def test_a_compiled_model_is_captured_as_what_was_compiled() -> None:
    model = Host(torch.compile(Block(), backend="eager"))  # type: ignore[arg-type]
    captured = capture(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert called(captured) == ["first", "part.linear", "part.act", "last"]


def test_a_parametrized_composite_is_still_traced() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    model = Host(Own())
    nn.utils.parametrize.register_parametrization(model.part, "gain", Scale())
    captured = capture(model)
    assert "part.linear" in called(captured)
    x = torch.randn(2, 4)
    check_equal(captured.model(x), model(x))


# --- the user's model


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.opaque = Nested()
        self.register_buffer("steps", torch.zeros(1))
        self.cache: Tensor | None = None
        self.body[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = x * 2
        x = self.body(x) + self.cache + nn.Tanh()(x)
        x = self.attention(x[None], x[None], x[None])[0][0]
        return F.dropout(self.opaque(x), training=self.training)


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
def test_the_users_model_is_never_changed(with_example: bool) -> None:
    model = Everything().train()
    model.body[1].eval()
    model.opaque.block.register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    captured = capture(model, example=((torch.randn(3, 4),), {}) if with_example else None)
    captured.model.to(torch.float64)
    captured.model.eval()
    assert snapshot(model) == before
    assert model.cache is None


def test_the_users_model_is_never_changed_when_nothing_can_be_traced() -> None:
    model = Nested().eval()
    before = snapshot(model)
    with pytest.raises(CaptureError, match="does not run on its example_inputs"):
        capture(model, example=((torch.randn(3, 7),), {}))
    capture(model)
    assert snapshot(model) == before


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.extra = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"Linear cannot be copied .* make copy.deepcopy\(model\) work"):
        capture(model)


class Counting(nn.Module):
    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.linear, self.rebinds = nn.Linear(4, 4), rebinds
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.rebinds:
            self.steps = self.steps + 1
        else:
            self.steps += 1
        return self.linear(x) * self.steps


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
@pytest.mark.parametrize("rebinds", [False, True], ids=["writes", "rebinds"])
@pytest.mark.parametrize("is_root", [False, True], ids=["part", "root"])
def test_a_buffer_that_forward_changes_counts_on(rebinds: bool, is_root: bool, with_example: bool) -> None:
    model = Counting(rebinds) if is_root else Host(Counting(rebinds))
    captured = capture(model, example=((X,), {}) if with_example else None)
    assert bool(captured.untraced) is rebinds
    for _ in range(3):
        check_equal(captured.model(X), model(X))


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
def test_writing_into_a_tensor_made_on_the_spot(with_example: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        table = torch.zeros(2, 4)
        table[0] = x[0]
        return self.linear(x) + table + (table * 2)

    model = model_with(forward)
    captured = capture(model, example=((X,), {}) if with_example else None)
    assert "" in captured.untraced and list(captured.loose) == ["linear"]
    for x in (X, Y, X):
        check_equal(captured.model(x), model(x))


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
def test_an_in_place_operator_is_seen_by_everyone_who_holds_the_tensor(with_example: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        kept, size = y, x.shape[0]
        count = size
        y += 1
        size += 1
        y *= 2
        return kept * y + count * size

    model = model_with(forward)
    captured = capture(model, example=((X,), {}) if with_example else None)
    assert not captured.untraced
    for x in (X, Y):
        check_equal(captured.model(x), model(x))


# --- inputs and outputs


@dataclass
class Pair:
    x: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    out: Tensor
    rest: tuple[Tensor, ...] = ()


class Named(NamedTuple):
    out: Tensor
    twice: Tensor


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is a dict, as transformers has it."""

    logits: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Outputs(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda y: (y, [y + 1, None], 3), id="tuple"),
        pytest.param(lambda y: {"out": y, "more": {"twice": 2 * y}}, id="dict"),
        pytest.param(lambda y: OrderedDict(out=y, twice=2 * y), id="OrderedDict"),
        pytest.param(lambda y: Named(y, 2 * y), id="namedtuple"),
        pytest.param(lambda y: Frozen(y, (y, 2 * y)), id="dataclass"),
        pytest.param(lambda y: ModelOutput(logits=y), id="model-output"),
        pytest.param(lambda y: defaultdict(list, out=y), id="defaultdict"),
    ],
)
def test_outputs(make: Any) -> None:
    model = Outputs(make)
    captured = capture(model)
    x = torch.randn(2, 4)
    got, expected = captured.model(x), model(x)
    assert type(got) is type(expected)
    if isinstance(expected, Frozen):
        got, expected = (got.out, got.rest), (expected.out, expected.rest)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        got, expected = list(got.values()), list(expected.values())
    check_equal(got, expected)


def forward_plain(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.linear(x) + y


def forward_keyword_only(self: Any, x: Tensor, *, y: Tensor) -> Tensor:
    return self.linear(x) + y


def forward_positional_only(self: Any, x: Tensor, /, y: Tensor) -> Tensor:
    return self.linear(x) + y


def forward_optional_before_required(self: Any, x: Tensor, mask: Tensor | None = None, *, y: Tensor) -> Tensor:
    return self.linear(x) + y if mask is None else self.linear(x) * mask + y


def forward_kwargs(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    return self.linear(x) + kwargs["y"] if "y" in kwargs else self.linear(x)


def forward_var_args(self: Any, *args: Tensor) -> Tensor:
    return self.linear(args[0]) + sum(args[1:])


def model_with(forward: Any) -> nn.Module:
    kind = type("Model", (nn.Module,), {"forward": forward})
    model: nn.Module = kind()
    model.linear = nn.Linear(4, 4)
    return model


X, Y = torch.randn(2, 4), torch.randn(2, 4)


@pytest.mark.parametrize(
    ("forward", "args", "kwargs"),
    [
        pytest.param(forward_plain, (X, Y), {}, id="positional"),
        pytest.param(forward_plain, (X,), {"y": Y}, id="keyword"),
        pytest.param(forward_keyword_only, (X,), {"y": Y}, id="keyword-only"),
        pytest.param(forward_positional_only, (X, Y), {}, id="positional-only"),
        pytest.param(forward_optional_before_required, (X,), {"y": Y}, id="optional-not-given"),
        pytest.param(forward_optional_before_required, (X, X), {"y": Y}, id="optional-given"),
        pytest.param(forward_kwargs, (X,), {"y": Y}, id="var-keyword"),
        pytest.param(forward_kwargs, (X,), {}, id="var-keyword-empty"),
        pytest.param(forward_var_args, (X, Y, Y), {}, id="var-positional"),
    ],
)
@pytest.mark.parametrize("how", ["nothing", "form", "example"])
def test_inputs(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: str) -> None:
    model = model_with(forward)
    form = call_form(model, args, kwargs) if how == "form" else None
    captured = capture(model, example=(args, kwargs) if how == "example" else None, form=form)
    if how != "nothing" and forward is not forward_var_args:
        assert captured.regions[""].bind(args, kwargs) is not None
    check_equal(captured.model(*args, **kwargs), model(*args, **kwargs))


def test_a_call_of_another_form_runs_the_models_own_code() -> None:
    model = model_with(forward_optional_before_required)
    captured = capture(model, example=((X, X), {"y": Y}))
    region = captured.regions[""]
    for args, kwargs in [((X,), {"y": Y}), ((X, None), {"y": Y})]:
        assert region.bind(args, kwargs) is None
        check_equal(captured.model(*args, **kwargs), model(*args, **kwargs))
    with pytest.raises(TypeError):
        captured.model(X)


def test_an_optional_number_may_vary_once_it_was_given() -> None:
    def forward(self: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.linear(x) * scale

    model = model_with(forward)
    captured = capture(model, example=((X, 3.0), {}))
    assert captured.regions[""].bind((X,), {}) == {"x": X, "scale": 2.0}
    for args in ((X,), (X, 5.0)):
        check_equal(captured.model(*args), model(*args))


def test_call_form() -> None:
    model = model_with(forward_optional_before_required)
    assert call_form(model, (X,), {"y": Y}) == {"x": VARYING, "mask": None, "y": VARYING}
    assert call_form(model_with(forward_kwargs), (X,), {"y": True}) == {"x": VARYING, "y": True}
    assert call_form(model_with(forward_var_args), (), {}) == {"args": ()}


def forward_dict(self: Any, batch: dict[str, Tensor]) -> Tensor:
    return self.linear(batch["x"])


def forward_dict_get(self: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("mask")
    return self.linear(batch["x"]) if mask is None else self.linear(batch["x"]) * mask


def forward_dict_loop(self: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: self.linear(value) for key, value in batch.items()}


def forward_dict_in(self: Any, batch: dict[str, Tensor]) -> Tensor:
    return self.linear(batch["x"]) * batch["mask"] if "mask" in batch else self.linear(batch["x"])


def forward_list_loop(self: Any, batch: list[Tensor]) -> list[Tensor]:
    return [self.linear(value) for value in batch]


def forward_dataclass(self: Any, batch: Pair) -> Tensor:
    return self.linear(batch.x) if batch.mask is None else self.linear(batch.x) * batch.mask


def forward_nested_none(self: Any, batch: tuple[Tensor, Tensor | None]) -> Tensor:
    x, mask = batch
    return self.linear(x) if mask is None else self.linear(x) * mask


@pytest.mark.parametrize(
    ("forward", "example", "others"),
    [
        pytest.param(forward_dict, {"x": X}, [{"x": Y}], id="dict"),
        pytest.param(forward_dict_get, {"x": X}, [{"x": X, "mask": Y}], id="dict-get-missing"),
        pytest.param(forward_dict_get, {"x": X, "mask": Y}, [{"x": Y}], id="dict-get-there"),
        pytest.param(forward_dict_loop, {"a": X, "b": Y}, [{"a": X}, {"a": X, "c": Y}], id="dict-loop"),
        pytest.param(forward_dict_in, {"x": X}, [{"x": X, "mask": Y}], id="dict-in"),
        pytest.param(forward_list_loop, [X, Y], [[X], [X, Y, X]], id="list-loop"),
        pytest.param(forward_dataclass, Pair(X), [Pair(Y), Pair(X, Y)], id="dataclass-none"),
        pytest.param(forward_dataclass, Pair(X, Y), [Pair(X)], id="dataclass-given"),
        pytest.param(forward_nested_none, (X, None), [(X, Y), (Y, None)], id="tuple-with-none"),
        pytest.param(forward_nested_none, (X, Y), [(X, None)], id="tuple-without-none"),
    ],
)
def test_nested_inputs_of_any_form(forward: Any, example: Any, others: list[Any]) -> None:
    model = model_with(forward)
    with_example = capture(model, example=((example,), {}))
    assert "" in with_example.regions, with_example.untraced
    for captured in (with_example, capture(model)):
        for batch in (example, *others):
            check_equal(captured.model(batch), model(batch))


# --- modules, weights, constants


def test_a_module_called_several_times_and_under_two_names() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.b(self.block(self.a(x))))

    model = Repeated()
    captured = capture(model)
    assert called(captured) == ["a", "block.linear", "block.act", "a", "block.linear", "block.act"]
    check_equal(captured.model(X), model(X))


def test_tied_weights_survive() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x)) + F.linear(self.embedding(x), self.embedding.weight)

    model = Tied()
    captured = capture(model)
    graph_module = captured.regions[""].graph_module
    assert graph_module.head.weight is graph_module.embedding.weight
    assert graph_module.head.weight is not model.head.weight
    twin = copy.deepcopy(captured.model)
    assert twin.graph_module.head.weight is twin.graph_module.embedding.weight
    x = torch.arange(8)
    check_equal(captured.model(x), model(x))


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.gain = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))
        self.gains = nn.ParameterList([nn.Parameter(torch.randn(4))])
        self.attribute = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner.gain.abs() + self.shift + self.gains[0] + self.attribute + torch.ones(4, dtype=x.dtype)


def test_parameters_and_buffers_in_the_graph_are_live() -> None:
    model = Constants()
    captured = capture(model)
    assert captured.model.graph_module.state_dict().keys() == model.state_dict().keys()
    other = Constants()
    other.attribute = model.attribute
    captured.model.graph_module.load_state_dict(other.state_dict())
    check_equal(captured.model(X), other(X))
    check_equal(captured.model.source(X), other(X))


@pytest.mark.parametrize("run", ["graph", "own code"])
def test_everything_moves_with_to(run: str) -> None:
    model = Constants()
    captured = capture(model)
    captured.model.to(torch.float64)
    model.to(torch.float64).attribute = model.attribute.double()
    x = X.double()
    got = captured.model(x) if run == "graph" else captured.model.source(x)
    assert got.dtype == torch.float64
    check_equal(got, model(x))
    assert captured.model.source.shift is captured.model.graph_module.shift


def test_what_only_the_own_code_uses_moves_too() -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.deep = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.flat(x) if x.dim() == 2 else self.deep(x)

    model = TwoWays()
    captured = capture(model, example=((X,), {}))
    captured.model.double()
    model.double()
    for x in (X.double(), X.double()[None]):
        check_equal(captured.model(x), model(x))


# --- shapes


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        y = self.linear(x).reshape(b, n // 2, 2 * c).transpose(1, 2).reshape(b, -1, n // 2)
        return y + torch.arange(n // 2, device=x.device) + torch.zeros(b, 1, 1)


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
def test_a_dynamic_batch_and_size_run_in_the_graph(with_example: bool) -> None:
    model = Shapes()
    captured = capture(model, example=((torch.randn(2, 6, 4),), {}) if with_example else None)
    region = captured.regions[""]
    for shape in [(2, 6, 4), (5, 6, 4), (1, 2, 4)]:
        x = torch.randn(shape)
        check_equal(region.graph_module(x), model(x))


def test_the_example_answers_questions_about_shapes_and_guards_the_answers() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.dim() == 4:
                x = x.flatten(1, 2)
            if x.shape[1] > 3:
                x = x[:, :3]
            return self.linear(x).reshape(*x.shape[:-1], -1)

    model = Asks()
    assert "" in capture(model).untraced
    captured = capture(model, example=((torch.randn(2, 5, 4),), {}))
    ran_own_code = []
    captured.model.source.register_forward_hook(lambda *args: ran_own_code.append(True))
    for shape, own in [((7, 9, 4), False), ((2, 2, 4), True), ((2, 2, 3, 4), True), ((2, 4, 4), False)]:
        ran_own_code.clear()
        x = torch.randn(shape)
        check_equal(captured.model(x), model(x))
        assert bool(ran_own_code) is own, shape


# --- train and eval


def test_training_passed_on_is_read_at_run_time() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.block(x), 0.5, self.training)

    model = Host(Drops())
    captured = capture(model.eval())
    assert not captured.untraced and not captured.eval_branches
    x = torch.randn(64, 4)
    for mode in (False, True, False):
        model.train(mode)
        captured.model.train(mode)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        check_equal(captured.model(x), expected)


def test_a_stateless_module_that_branches_on_training_stays_right_in_both_modes() -> None:
    class DropPath(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5) / 0.5

    model = Host(DropPath())
    captured = capture(model)
    assert "part" in captured.untraced and "both modes" in captured.untraced["part"].reason
    x = torch.randn(64, 4)
    for mode in (False, True):
        model.train(mode)
        captured.model.train(mode)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        check_equal(captured.model(x), expected)


def test_a_module_with_weights_that_branches_on_training_takes_the_eval_branch_and_says_so() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return self.main(x) + self.extra(x)
            return self.main(x)

    model = Host(Auxiliary())
    captured = capture(model)
    assert list(captured.eval_branches) == ["part"]
    assert captured.eval_branches["part"].endswith("if self.training:")
    check_equal(captured.model.eval()(X), model.eval()(X))


def test_mixed_modes_are_kept() -> None:
    model = Host(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).train()
    model.part[1].eval()
    captured = capture(model)
    graph_module = captured.regions[""].graph_module
    assert graph_module.training and graph_module.first.training
    assert not graph_module.get_submodule("part.1").training
    assert captured.model.source.part.training


def test_a_models_own_train_is_obeyed() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.bn.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x)

    captured = capture(Frozen())
    captured.model.train()
    assert captured.model.graph_module.training and not captured.model.graph_module.bn.training


# --- odd forwards


def test_an_error_in_a_graph_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    captured = capture(model_with(lambda self, x: self.linear(x).missing))
    with pytest.raises(AttributeError, match="missing"):
        captured.model(X)
    assert capsys.readouterr() == ("", "")


def test_modules_made_on_the_spot() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return nn.Softmax(dim=-1)(nn.ReLU()(self.linear(x)) + nn.Sequential(nn.ReLU(), nn.Tanh())(x))

    model = model_with(forward)
    captured = capture(model)
    assert called(captured) == ["linear", "relu0", "sequential0_relu0", "sequential0_tanh0", "softmax0"]
    check_equal(captured.model(X), model(X))


def test_modules_made_on_the_spot_in_given_up_code_leave_nothing_behind() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = nn.ReLU()(self.linear(x))
        return y if y.sum() > 0 else -y

    captured = capture(model_with(forward))
    assert list(captured.loose) == ["linear"]
    captured = capture(Host(model_with(forward)))
    assert list(captured.loose) == ["part.linear"]
    assert [name for name, _ in captured.regions[""].source.named_children()] == ["first", "part", "last"]


def test_a_shape_taken_before_given_up_code_and_used_after_it() -> None:
    class Uses(nn.Module):
        def forward(self, x: Tensor, shape: Any) -> Tensor:
            return x.reshape(shape) if x.sum() > 0 else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.uses = Uses()

        def forward(self, x: Tensor) -> Tensor:
            shape = x.shape
            return self.uses(x, shape).reshape(shape)

    model = Model()
    captured = capture(model)
    captured.regions[""].graph_module.graph.lint()
    check_equal(captured.model(X), model(X))


def test_random_numbers_differ_from_call_to_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x) + torch.randn(2, 4)

    model = model_with(forward)
    captured = capture(model, example=((X,), {}))
    torch.manual_seed(1)
    expected = [model(X), model(X)]
    torch.manual_seed(1)
    check_equal([captured.model(X), captured.model(X)], expected)


def test_hooks_are_part_of_what_is_captured() -> None:
    model = Host(Block())
    model.register_forward_hook(lambda module, args, output: output * 2)
    model.part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.first.register_forward_hook(lambda module, args, output: output - 1)
    captured = capture(model)
    check_equal(captured.model(X), model(X))


def test_what_is_called_on_a_whole_leaf_follows_the_policy() -> None:
    model = Host(nn.Sequential(Block(), nn.Linear(4, 4)))
    captured = capture(model, LeafPolicy(skip=("part.0",)))
    assert called(captured) == ["first", "part.0", "part.1", "last"]
    captured = capture(model, LeafPolicy(extra=(Block,)))
    assert called(captured) == ["first", "part.0", "part.1", "last"]


def test_a_leaf_of_two_holders_is_marked_as_shared() -> None:
    shared = nn.Linear(4, 4)

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = shared

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum() > 0 else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.opaque = shared, nn.Linear(4, 4), Opaque()

        def forward(self, x: Tensor) -> Tensor:
            return self.opaque(self.two(self.one(x)))

    captured = capture(Model())
    assert captured.regions[""].graph_module.meta["shared"] == {"one"}


# --- keeping


class Guarded(nn.Module):
    """Everything that torch.fx alone loses in a pickle: guards, training flags, factories, output classes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Frozen:
        if x.shape[0] == 2:
            x = x + self.shift
        return Frozen(F.dropout(self.block(x), training=self.training) + torch.arange(x.shape[1]))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("keep", [copy.deepcopy, pickled])
@pytest.mark.parametrize("what", ["region", "graph", "captured"])
def test_copies_and_pickles(keep: Any, what: str) -> None:
    model = Guarded().eval()
    captured = capture(model, example=((X,), {}))
    if what == "captured":
        twin = keep(captured).model
    else:
        twin = keep(captured.model if what == "region" else captured.regions[""].graph_module)
    check_equal(twin(X).out, model(X).out)
    graph_module = twin if isinstance(twin, fx.GraphModule) else twin.graph_module
    assert graph_module.source is not captured.regions[""].source
    assert graph_module.block.linear is graph_module.source.block.linear
    assert str(graph_module.graph) == str(captured.regions[""].graph_module.graph)
    graph_module.double()
    assert graph_module.source.shift.dtype == torch.float64 and captured.model.source.shift.dtype == torch.float32
    if what == "region":
        model.double()
        check_equal(twin(torch.ones(3, 4).double()).out, model(torch.ones(3, 4).double()).out)


def test_a_copy_knows_the_nodes_of_its_original() -> None:
    captured = capture(Host(Block()))
    nodes = list(captured.regions[""].graph_module.graph.nodes)
    twin, kept = copy.deepcopy((captured, nodes))
    assert kept == list(twin.regions[""].graph_module.graph.nodes)


def test_region_gives_the_attributes_of_its_source() -> None:
    model = Host(Block())
    model.hidden_size = 4  # type: ignore[assignment]
    captured = capture(model)
    assert captured.model.hidden_size == 4
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = captured.model.no_such_thing


class LateQuestion(nn.Module):
    """Writes into its input and a buffer, draws a number, and asks for a size only then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.seen.add_(1)
        y = F.dropout(self.norm(self.linear(x)), training=self.training)
        return y * 2 if len(y) == 3 else y


class WriteBeforeQuestion(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x * 2 + y
        x[:, :1] = 0
        x -= y
        return z * 2 if len(z) == 3 else z + x


@pytest.mark.parametrize("learns", ["x", "y", "both"])
@pytest.mark.parametrize("size", [3, 5])
def test_a_guard_that_fails_behind_a_write_keeps_gradients(size: int, learns: str) -> None:
    """The values of an input can be put back, its history cannot."""
    captured = capture(WriteBeforeQuestion(), example=((torch.randn(3, 4), torch.randn(3, 4)), {}))
    assert not captured.untraced
    gradients = []
    for model in (WriteBeforeQuestion(), captured.model):
        torch.manual_seed(0)
        x = torch.randn(size, 4).requires_grad_(learns != "y")
        y = torch.randn(size, 4).requires_grad_(learns != "x")
        given = x * 1
        out = model(given, y)
        (out * torch.arange(4.0)).sum().backward()
        gradients.append([given.detach(), *(tensor.grad for tensor in (x, y) if tensor.requires_grad)])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


KEPT: list[Tensor] = []


class InstallsHooks(nn.Module):
    """As models of transformers: hooks are installed at the first call, and collect what inner blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            for block in self.blocks:
                block.register_forward_hook(lambda *call: KEPT.append(call[2]))
            self.installed = True
        KEPT.clear()
        for block in self.blocks:
            x = block(x)
        assert len(KEPT) == 2
        return torch.cat([*KEPT, x], 1)


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize("with_example", [False, True])
def test_hooks_that_a_first_call_installs(with_example: bool, is_called_before: bool) -> None:
    model, x = InstallsHooks(), torch.randn(3, 4)
    if is_called_before:
        model(x)
    captured = capture(model, example=((x,), {}) if with_example else None)
    assert [len(block._forward_hooks) for block in model.blocks] == [int(is_called_before)] * 2
    for size in (3, 5, 3):
        x = torch.randn(size, 4)
        torch.testing.assert_close(captured.model(x), model(x), rtol=0, atol=0)


class AsksAboutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        x.mul_(3)
        return y * 2 if y.requires_grad else y + x


def test_a_guard_that_the_mode_of_gradients_answers() -> None:
    """What held without gradients is asked again with them; a write in front of the guard happens once."""
    model, x = AsksAboutGradients(), torch.randn(3, 4)
    captured = capture(model, example=((x.clone(),), {}))
    for enabled in (False, True, False):
        given, copied = x.clone(), x.clone()
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(captured.model(copied), model(given), rtol=0, atol=0)
        torch.testing.assert_close(copied, given, rtol=0, atol=0)


class HiddenWriteBeforeQuestion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x * 2 if len(x) == 3 else x + 1


def test_a_guard_that_fails_behind_a_write_through_data() -> None:
    """Torch does not count such a write; it must not happen twice."""
    captured = capture(HiddenWriteBeforeQuestion(), example=((torch.randn(3, 4),), {}))
    for size in (3, 5):
        x = torch.randn(size, 4)
        given, copied = x.clone(), x.clone()
        torch.testing.assert_close(captured.model(copied), HiddenWriteBeforeQuestion()(given), rtol=0, atol=0)
        torch.testing.assert_close(copied, given, rtol=0, atol=0)


class AsksAboutTraining(nn.Module):
    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.question, self.layer = question, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if self.question(self.layer.weight) else x - y


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize(
    "question",
    [lambda w: w.requires_grad, lambda w: not w.requires_grad, lambda w: w.grad is None],
    ids=["requires_grad", "not requires_grad", "grad is None"],
)
def test_questions_about_a_parameter_that_training_answers(
    question: Callable[[Tensor], bool], with_example: bool
) -> None:
    model, x = AsksAboutTraining(question), torch.randn(3, 4)
    captured = capture(model, example=((x,), {}) if with_example else None)
    copied = next(m for m in captured.model.modules() if isinstance(m, AsksAboutTraining))
    for change in ("nothing", "trained", "frozen"):
        for one in (model, copied):
            one.layer.weight.requires_grad_(change != "frozen")
            one.layer.weight.grad = torch.zeros(4, 4) if change == "trained" else None
        torch.testing.assert_close(captured.model(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("training", [False, True])
def test_a_guard_that_fails_late_leaves_nothing_behind(training: bool) -> None:
    model = LateQuestion().train(training)
    captured = capture(model, example=((torch.randn(3, 4),), {}))
    assert not captured.untraced
    captured.model.train(training)
    for size in (3, 5, 5, 3, 7):
        x = torch.randn(size, 4)
        given, copied = x.clone(), x.clone()
        torch.manual_seed(size)
        expected = model(given)
        torch.manual_seed(size)
        torch.testing.assert_close(captured.model(copied), expected, rtol=0, atol=0)
        torch.testing.assert_close(copied, given, rtol=0, atol=0)
        region = captured.regions[""]
        torch.testing.assert_close(region.source.seen, model.seen, rtol=0, atol=0)
        torch.testing.assert_close(region.source.norm.running_mean, model.norm.running_mean, rtol=0, atol=0)
