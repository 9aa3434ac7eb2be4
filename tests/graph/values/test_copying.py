from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.values.copying import copy_model, uncompiled
from sparsebit.sparse import SparseModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.log.append(len(self.log))
        return self.fc(x)


def with_weak_reference(net: Net) -> None:
    net._me = weakref.ref(net)  # type: ignore[assignment]
    net.forward = types.MethodType(lambda self, x: self._me().fc(x) * 2, net)  # type: ignore[method-assign]


def with_proxy(net: Net) -> None:
    net.parts = {"layer": weakref.proxy(net.fc)}  # type: ignore[assignment]
    net.forward = types.MethodType(lambda self, x: self.parts["layer"](x) * 2, net)  # type: ignore[method-assign]


def with_closure(net: Net) -> None:
    def forward(x: Tensor) -> Tensor:
        return net.fc(x) * 2

    net.forward = forward  # type: ignore[method-assign]


def with_default(net: Net) -> None:
    def forward(x: Tensor, layer: nn.Module = net.fc) -> Tensor:
        return layer(x) * 2

    net.forward = forward  # type: ignore[method-assign]


def with_method(net: Net) -> None:
    net.forward = types.MethodType(lambda self, x: self.fc(x) * 2, net)  # type: ignore[method-assign]


def with_partial(net: Net) -> None:
    net.forward = functools.partial(lambda layers, x: layers["fc"](x) * 2, {"fc": net.fc})  # type: ignore[method-assign]


def with_partial_of_a_closure(net: Net) -> None:
    net.forward = functools.partial(lambda factor, x: net.fc(x) * factor, 2)  # type: ignore[method-assign]


def doubled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) * 2


def with_a_wrapped_method(net: Net) -> None:
    net.forward = doubled(net.forward)  # type: ignore[method-assign]


def with_a_wrapped_method_of_a_layer(net: Net) -> None:
    net.fc.forward = doubled(net.fc.forward)  # type: ignore[method-assign]


def with_a_wrapped_partial(net: Net) -> None:
    net.forward = doubled(functools.partial(lambda layer, x: layer(x), net.fc))  # type: ignore[method-assign]


def with_nested_closure(net: Net) -> None:
    layers = [net.fc]

    def inner(x: Tensor) -> Tensor:
        return layers[0](x) * 2

    net.forward = lambda x: inner(x)  # type: ignore[method-assign]


def with_a_name(net: Net) -> None:
    scope = {"net": net, "factor": 1}
    exec("def forward(x):\n    return (lambda y: net.fc(y) * factor)(x)", scope)
    net.forward = scope["forward"]  # type: ignore[assignment, method-assign]
    scope["factor"] = 2  # other names are read when they are used


@pytest.mark.parametrize("patch", [
    with_closure, with_default, with_weak_reference, with_proxy, with_method, with_partial, with_partial_of_a_closure,
    with_a_wrapped_method, with_a_wrapped_method_of_a_layer, with_a_wrapped_partial, with_nested_closure, with_a_name,
])  # fmt: skip
def test_a_patched_forward_calls_the_layers_of_the_copy(patch: Callable[[Net], None]) -> None:
    net, x = Net(), torch.randn(2, 4)
    patch(net)
    copied = copy_model(net)
    torch.testing.assert_close(copied(x), net(x), rtol=0, atol=0)
    before = net(x)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)


def test_a_hook_reads_the_copy_and_writes_where_it_wrote() -> None:
    net, features = Net(), []

    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor:
        features.append(output)
        return output + net.fc.bias

    net.fc.register_forward_hook(hook)
    copied = copy_model(net)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, 4)).any() and len(features) == 1


def test_gradient_hooks_of_parameters_are_kept() -> None:
    net = Net()
    net.fc.weight.register_hook(lambda gradient: gradient * 0)
    copied = copy_model(net)
    copied(torch.ones(1, 4)).sum().backward()
    assert not copied.fc.weight.grad.any() and net.fc.weight.grad is None  # type: ignore[union-attr]


def test_hooks_behind_gradients_of_parameters_are_kept() -> None:
    net = Net()

    def clear(weight: Tensor) -> None:
        weight.grad = torch.zeros_like(weight)

    net.fc.weight.register_post_accumulate_grad_hook(clear)
    copied = copy_model(net)
    copied(torch.ones(1, 4)).sum().backward()
    assert not copied.fc.weight.grad.any() and net.fc.weight.grad is None  # type: ignore[union-attr]


def test_computed_weights_are_copied() -> None:
    net = Net()
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(net.fc)
    x = torch.randn(2, 4)
    expected = net(x)
    copied = copy_model(net)
    torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)
    copied(x).sum().backward()
    assert net.fc.weight_v.grad is None  # type: ignore[union-attr]


def test_shared_parameters_and_separate_state() -> None:
    net = Net()
    shadow = copy_model(net, share_parameters=True)
    assert shadow.fc.weight is net.fc.weight
    shadow(torch.ones(1, 4))
    assert float(net.seen) == 0 and net.log == [] and shadow.log == [0]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_scripted_child_of_the_copy_trains_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    list(net.parameters())[-1].requires_grad_(False)
    copied = copy_model(net)
    copied(torch.randn(3, 4)).sum().backward()
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in net.parameters()]
    assert all(p.is_leaf and (p.grad is not None) == p.requires_grad for p in copied.parameters())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_wrappers_are_taken_off(tmp_path: Path) -> None:
    net = Net()
    assert uncompiled(nn.DataParallel(net)) is net
    assert uncompiled(torch.compile(nn.DataParallel(torch.compile(net)))) is net  # type: ignore[arg-type]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
        assert uncompiled(wrapped) is net
        config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "RATIO": 0.5}}
        assert type(SparseModel(wrapped, config).model) is Net
        plain = nn.Sequential(wrapped, nn.Linear(4, 4))
        assert type(uncompiled(plain)[0]) is Net
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_that_stay_behind_are_not_copied() -> None:
    class Hook:
        stays_behind = True

        def __call__(self, module: nn.Module, *_: object) -> None:
            raise AssertionError

    net = Net()
    net.fc.register_forward_pre_hook(Hook())
    net.fc.register_state_dict_pre_hook(Hook())
    copied = copy_model(net)
    copied(torch.randn(1, 4))
    assert copied.state_dict().keys() and len(net.fc._forward_pre_hooks) == 1
