"""Where planned quantizers end up in the graph. Which ones are planned: test_plan.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization import QIdentity, QuantModel, QuantOpr
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from tests.quantization.tiny import Opaque, Residual, calibrated, qconfig, site, sites


def modules(qmodel: QuantModel) -> dict[str, nn.Module]:
    graph_module = qmodel.model
    assert isinstance(graph_module, fx.GraphModule)
    nodes = graph_module.graph.find_nodes(op="call_module")
    return {str(node.target): graph_module.get_submodule(str(node.target)) for node in nodes}


def test_a_lone_reader_holds_the_quantizer_itself() -> None:
    found = modules(QuantModel(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), qconfig()))
    assert {name: type(module) for name, module in found.items()} == {"0": WeightedQuantOpr, "1": QuantOpr}


def test_functions_become_modules_under_their_nodes_name() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(torch.sigmoid(torch.sigmoid(x)), -1)

    assert list(modules(QuantModel(Functional(), qconfig()))) == ["sigmoid", "sigmoid_1", "softmax"]


def test_names_that_are_taken_are_avoided() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.sigmoid(x) * 2)

    qmodel, x = QuantModel(Taken(), qconfig()), torch.randn(2, 4)
    assert torch.equal(qmodel(x), qmodel.original(x))
    assert len(sites(qmodel)) == 4


def test_a_shared_quantizer_stands_behind_its_source() -> None:
    qmodel = QuantModel(Residual(), qconfig({"A.QADD.ENABLE_QUANT": True}))
    (node,) = [n for n in qmodel.model.graph.nodes if n.target == "stem_relu_shared"]
    assert isinstance(qmodel.model.get_submodule("stem_relu_shared"), QIdentity)
    assert [n.target for n in node.all_input_nodes] == ["stem.relu"]
    assert {n.name for n in node.users} == {"conv", "add"}


def test_the_graphs_source_has_the_same_wrapped_layers() -> None:
    qmodel = QuantModel(Residual(), qconfig())
    root = qmodel.built.root
    assert root is not None
    assert root.source.conv is qmodel.model.conv and root.source.stem.conv is qmodel.model.stem.conv


def test_layers_inside_an_untraced_module_are_wrapped_in_place() -> None:
    qmodel = QuantModel(Opaque(), qconfig())
    assert isinstance(qmodel.model.first, WeightedQuantOpr) and isinstance(qmodel.model.second, WeightedQuantOpr)
    assert sites(qmodel) == {"first.input", "first.weight", "second.input", "second.weight"}


def test_a_module_shared_by_graph_and_untraced_code_is_wrapped_once() -> None:
    class Inner(nn.Module):
        def __init__(self, fc: nn.Linear) -> None:
            super().__init__()
            self.fc = fc

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if float(x.detach().sum()) < 1e9 else x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.inner = Inner(self.fc)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.fc(x))

    model, x = Outer(), torch.randn(2, 4)
    qmodel = calibrated(model, [x])
    assert qmodel.model.fc is qmodel.model.inner.fc
    assert len([module for module in qmodel.modules() if isinstance(module, WeightedQuantOpr)]) == 1
    torch.testing.assert_close(qmodel(x), model(x), atol=0.05, rtol=0.05)


def test_quantizer_names_are_unique() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(self.fc(x)))

    names = [q.name for q in QuantModel(Twice(), qconfig()).quantizers() if not q.fake_fused]
    assert sorted(names) == ["fc.input.0", "fc.input.0.2", "fc.input.0.3", "fc.weight"]


def test_weights_computed_on_the_way_are_observed_over_all_batches() -> None:
    """And in constant memory, whatever the observer keeps of a weight that is a parameter."""

    class Dynamic(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return F.linear(x, w)

    batches = [(torch.randn(2, 4), torch.full((3, 4), float(value))) for value in (1, 8, 2)]
    for observer in ("minmax", "mse"):
        qmodel = QuantModel(Dynamic(), qconfig({"W.OBSERVER.TYPE": observer, "W.QSCHEME": "per-tensor-symmetric"}))
        qmodel.prepare_calibration()
        sizes = []
        for batch in batches:
            qmodel(*batch)
            state = site(qmodel, "linear.weight").observer.state()
            sizes.append(sum(tensor.numel() for tensor in state.values()))
        qmodel.calc_qparams()
        assert sizes[0] == sizes[-1]
        assert site(qmodel, "linear.weight").dequantized_range()[1] > 6


def test_setters_of_an_input_that_others_read_name_its_quantizer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) - self.c(y)

    qmodel = calibrated(Shared(), [torch.randn(2, 4)])
    for bits in (4, 8):
        with pytest.raises(ConfigError, match=r"b\.input.*quantized by a\.shared"):
            qmodel.model.b.input_quantizer.set_bit(bits)
    qmodel.model.a.input_quantizer.set_bit(4)  # it reads alone
    site(qmodel, "a.shared").set_bit(4)
    assert site(qmodel, "a.shared").spec.bits == 4


class TestSwitchesOfAnInputThatOthersQuantize:
    class Shared(nn.Module):
        """`b` and `c` read one tensor, and `a` is called on two."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.a(x))
            return self.b(y) - self.c(y)

    def test_one_that_would_change_something_is_refused(self) -> None:
        qmodel, x = calibrated(self.Shared(), [torch.randn(2, 4)]), torch.randn(2, 4)
        before = qmodel(x)
        with pytest.raises(ConfigError, match=r"b\.input\.disable_quant\(\).*quantized by a.*shared \(module "):
            qmodel.model.b.input_quantizer.disable_quant()
        with pytest.raises(ConfigError, match=r"b\.input\.set_fake_fused\(\)"):
            qmodel.model.b.input_quantizer.set_fake_fused()
        with pytest.raises(ConfigError, match=r"b\.input\.disable_quant\(\)"):
            qmodel.model.b.set_quant(w_quant=False, a_quant=False)
        assert qmodel.model.b.weight_quantizer.is_enable and torch.equal(qmodel(x), before)
        qmodel.set_quant()
        with pytest.raises(ConfigError, match=r"b\.input\.enable_quant\(\)"):
            qmodel.model.b.input_quantizer.enable_quant()

    def test_all_quantizers_of_a_layer_that_is_called_twice_are_named(self) -> None:
        qmodel = calibrated(self.Shared(), [torch.randn(2, 4)])
        with pytest.raises(ConfigError, match=r"quantized by a\.input\.0 .*, a\.input\.0\.2 "):
            qmodel.model.a.input_quantizer.disable_quant()

    def test_one_that_agrees_with_what_is_in_force_is_fine(self) -> None:
        qmodel = calibrated(self.Shared(), [torch.randn(2, 4)])
        qmodel.model.b.input_quantizer.enable_quant()
        next(q for q in qmodel.model.b.input_quantizer.replaced_by.values()).disable_quant()
        qmodel.model.b.set_quant(w_quant=True, a_quant=False)
        qmodel.set_quant(w_quant=True, a_quant=True)
        qmodel.set_quant()
        qmodel.model.b.set_quant()
        assert not any(q.is_enable for q in qmodel.quantizers())

    def test_copies_and_loaded_models_switch_their_own(self) -> None:
        qmodel = calibrated(self.Shared(), [torch.randn(2, 4)])
        copied = copy.deepcopy(qmodel)
        copied.set_quant()
        assert qmodel.is_quantized("activation") and not copied.is_quantized("activation")
        copied.model.b.set_quant()


class WritesLater(nn.Module):
    """Code that is no graph writes into what a layer, or a block with a graph of its own, has read."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        view = (x * 1)[:, ::2]
        y = self.part(view)
        view[..., 0] = view[..., -1]
        return y


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh()


@pytest.mark.parametrize(
    "part", [nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), Sum()], ids=str
)
def test_own_code_may_write_into_what_a_quantizer_has_read(part: nn.Module) -> None:
    model, x = WritesLater(part).train(), torch.randn(3, 4, 2).repeat(1, 1, 2).transpose(1, 2)
    qmodel = calibrated(model, [x], qconfig(bits=16)).train()
    for quantizer in qmodel.quantizers():
        quantizer.scale.data *= 1.01  # what rounds to beyond the end of its range has no gradient
    gradients = []
    for run in (model, qmodel):
        given = x.clone().requires_grad_()
        run(given).square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0.05)


class WritesBehindForward(nn.Module):
    """Its layer is called without its hooks, and saves a copy: what it has read may be overwritten."""

    def __init__(self, split: Callable[[Tensor], Any], write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.split, self.write = nn.Linear(4, 4), split, write

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        y = self.layer.forward(self.split(x)[1])
        self.write(x)
        return y


@pytest.mark.parametrize("is_packed", [None, False, True], ids=["plain", "fused", "packed"])
@pytest.mark.parametrize(
    "write",
    [lambda x: x.detach().mul_(2), lambda x: x.data.mul_(2), lambda x: x[:, :1].add_(1)],
    ids=["detach", "data", "view"],
)
@pytest.mark.parametrize("split", [
    lambda x: x.split(2, 2), lambda x: x.chunk(2, 2), lambda x: x.tensor_split(2, 2), lambda x: x.hsplit(2),
    lambda x: x.unbind(1),
], ids=["split", "chunk", "tensor_split", "hsplit", "unbind"])  # fmt: skip
@pytest.mark.sample(18)
def test_own_code_may_write_into_what_a_layers_forward_has_read(split: Any, write: Any, is_packed: bool | None) -> None:
    model, x = WritesBehindForward(split, write).train(), torch.randn(3, 2, 4, 4)
    qmodel = calibrated(model, [2 * x], qconfig(bits=16)).train()
    qmodel.accelerate(is_packed is not None)
    qmodel.pack_saved_activations(bool(is_packed))
    gradients = []
    for run in (model, qmodel):
        given = x.clone().requires_grad_()
        run(given * 1).square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0.05)
