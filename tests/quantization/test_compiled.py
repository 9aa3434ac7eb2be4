"""A compiled model goes on as the eager one whatever is switched, and looks at little before every call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers.base import Quantizer
from tests.quantization.tiny import qconfig, run, site
from tests.quantization.tiny_training import WAYS, data, ready


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def switch_off(qmodel: QuantModel) -> None:
    site(qmodel, "conv2.input").use_quant = False


def set_fewer_bits(qmodel: QuantModel) -> None:
    for quantizer in qmodel.quantizers():
        quantizer.set_bit(3)


def load_another(qmodel: QuantModel) -> None:
    state = qmodel.state_dict()
    qmodel.load_state_dict({name: value * 1.5 if name.endswith("scale") else value for name, value in state.items()})


def load_one_that_is_off(qmodel: QuantModel) -> None:
    other = copy.deepcopy(qmodel)
    other.set_quant()
    qmodel.load_state_dict(other.state_dict())


def doubled(quantizer: Quantizer) -> None:
    quantizer.fake_quantize = lambda x: x * 2  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[QuantModel], Any]] = {
    "one off": switch_off,
    "one weight off": lambda qmodel: site(qmodel, "fc.weight").disable_quant(),
    "one off for good": lambda qmodel: site(qmodel, "conv2.input").set_fake_fused(),
    "all off": lambda qmodel: qmodel.set_quant(),
    "frozen": lambda qmodel: qmodel.freeze(),
    "eval": lambda qmodel: qmodel.eval(),
    "no gradients": lambda qmodel: qmodel.model.conv1.requires_grad_(False),
    "fewer bits": set_fewer_bits,
    "another state": load_another,
    "a state that is off": load_one_that_is_off,
    "a method of its own": lambda qmodel: doubled(site(qmodel, "fc.input")),
}


def step(model: Callable[..., Any], x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    return loss.detach()


def assert_steps_alike(compiled: Callable[..., Any], qmodel: QuantModel, plain: QuantModel) -> None:
    batch = data()
    for model in (qmodel, plain):
        model.zero_grad()
    torch.testing.assert_close(step(compiled, *batch), step(plain, *batch))
    for name, parameter in qmodel.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name)
    for name, value in qmodel.named_buffers():
        torch.testing.assert_close(value, plain.get_buffer(name), rtol=1e-4, atol=1e-5, msg=name)


# Dynamo notices changes, before any backend does its part; the graphs that differ most in what they train are lowered.
# Ranges that follow the data take three times as long to compile: the switches that they read differently.
LOWERED = [("lsq", "frozen"), ("lsq", "no gradients"), ("following", "eval")]
# One after the other on one compiled model, which costs half as much; the slow tests make each of them alone.
TOGETHER = [
    ("one off", "fewer bits", "another state"),
    ("one weight off", "a method of its own", "eval"),
    ("one off for good", "a state that is off", "all off"),
]
CASES = [
    *(("lsq", changes, "eager") for changes in TOGETHER),
    *((way, (change,), "aot_eager") for way, change in LOWERED),
    *(
        pytest.param(way, (change,), "aot_eager", marks=pytest.mark.slow)
        for way, change in [*(("lsq", change) for change in CHANGES), ("following", "frozen"), ("following", "one off")]
        if (way, change) not in LOWERED
    ),
]


def test_every_change_is_made() -> None:
    made = [change for changes in TOGETHER for change in changes] + [change for way, change in LOWERED if way == "lsq"]
    assert sorted(made) == sorted(CHANGES)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "changes", "backend"), CASES, ids=lambda value: value if isinstance(value, str) else ", ".join(value)
)
def test_changes_are_noticed(way: str, changes: tuple[str, ...], backend: str) -> None:
    qmodel = ready(way)
    plain = copy.deepcopy(qmodel)
    compiled = torch.compile(qmodel, backend=backend, fullgraph=True)
    assert_steps_alike(compiled, qmodel, plain)
    for change in changes:
        for model in (qmodel, plain):
            CHANGES[change](model)
        assert_steps_alike(compiled, qmodel, plain)


@pytest.mark.slow
def test_what_was_compiled_is_found_again() -> None:
    qmodel = ready("lsq")
    plain, (x, labels) = copy.deepcopy(qmodel), data()
    compiled = torch.compile(qmodel, backend="eager", fullgraph=True)
    for _ in range(3):
        for on in (True, False):
            for model in (qmodel, plain):
                site(model, "conv2.input").use_quant = on
            torch.testing.assert_close(step(compiled, x, labels), step(plain, x, labels))
            for model in (qmodel, plain):  # an epoch's end
                model.eval()
                model.train()
    assert counters["stats"]["unique_graphs"] == 2


def multiplied(factor: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * factor


def test_hooks_run() -> None:
    """Those that are there when it is compiled: torch looks for no others."""
    qmodel = ready("lsq")
    plain = copy.deepcopy(qmodel)
    alone = step(copy.deepcopy(plain), *data())
    for factor, name in enumerate(("conv2", "conv2.op", "conv2.input_quantizer", "fc.weight_quantizer"), 2):
        for model in (qmodel, plain):
            hook = functools.partial(multiplied, 1 + factor / 10)
            model.model.get_submodule(name).register_forward_hook(hook)
        now = step(copy.deepcopy(plain), *data())
        assert not torch.equal(now, alone), name  # each of them changes the loss
        alone = now
    assert_steps_alike(torch.compile(qmodel, backend="eager", fullgraph=True), qmodel, plain)


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def count_guards(node: Any) -> int:
    children = list(node.get_child_managers())
    if hasattr(node, "get_key_value_managers"):
        children += [child for pair in node.get_key_value_managers().values() for child in pair if child is not None]
    return len(node.get_leaf_guards()) + sum(map(count_guards, children))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lsq", "fixed"])
def test_a_layer_adds_few_guards(way: str) -> None:
    """A compiled model checks them all before every call: a switch that a forward reads counts three times a layer, and
    an attribute that is a module several times.
    """
    totals = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        qmodel, x = QuantModel(Stack(num_layers), qconfig(WAYS[way][0])), torch.randn(2, 4)
        qmodel.prepare_calibration()
        run(qmodel, [x])
        qmodel.init_QAT()
        torch.compile(qmodel.train(), backend="eager", fullgraph=True)(x)
        (entry,) = _debug_get_cache_entry_list(type(qmodel).forward.__code__)
        totals.append(count_guards(entry.guard_manager.root))
    assert totals[1] - totals[0] < 2 * 105
