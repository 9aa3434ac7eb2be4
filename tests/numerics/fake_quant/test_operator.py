from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparsebit.errors import SpecError
from sparsebit.numerics import reference
from sparsebit.numerics.fake_quant import operator
from sparsebit.numerics.fake_quant.dispatch import fake_quantize
from sparsebit.numerics.spec import PerChannel, PerGroup, TensorSpec
from tests.parameters import first_fast

OPERATOR = torch.ops.sparsebit.fake_quantize.default


class Layer(nn.Module):
    """A linear layer with learned scales at input and weight: all that one operator has to live with."""

    weight_spec = TensorSpec(4, True, PerChannel(0))
    input_spec = TensorSpec(4, False)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.weight_scale = nn.Parameter(torch.full((8,), 0.2))
        self.input_scale = nn.Parameter(torch.tensor(0.1))
        self.input_zero_point = nn.Parameter(torch.tensor(6.8))
        self.register_buffer("zeros", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = fake_quantize(x, self.input_scale, self.input_zero_point, self.input_spec, gradient="lsq", tag="fc.input")
        assert isinstance(self.zeros, Tensor)
        weight = fake_quantize(
            self.weight, self.weight_scale, self.zeros, self.weight_spec, gradient="lsq", tag="fc.weight"
        )
        return nn.functional.linear(x, weight).relu()


def run(layer: Layer, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(x)
    y.float().square().sum().backward()
    grads = [t.grad for t in (x, *layer.parameters())]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6)


FORMS = {
    "tensor": ((4, 6), 1, None, 0),
    "channel": ((4, 6), 4, 0, 0),
    "group": ((4, 6), 12, 1, 2),
    "ragged-group": ((4, 6), 8, 1, 4),
    "channels-last": ((2, 6, 3, 3), 6, 1, 0),
}
LEARNED = {"none": (0, 0, 0), "x": (1, 0, 0), "scale": (0, 1, 0), "all": (1, 1, 1)}
# Each form, gradient and choice of what is learned at least once, then all of them together.
COVERING = [("tensor", "lsq", "all"), ("channel", "ste", "all"), ("group", "lsq", "all"), ("ragged-group", "ste", "x")]
COVERING += [("channels-last", "lsq", "all"), ("group", "ste", "none"), ("channel", "lsq", "scale")]
COMBINED = [case for case in itertools.product(FORMS, ("ste", "lsq"), LEARNED) if case not in COVERING]


@pytest.mark.parametrize(("form", "gradient", "learned"), first_fast([*COVERING, *COMBINED], len(COVERING)))
def test_torch_finds_no_fault(form: str, gradient: str, learned: str) -> None:
    shape, num_params, axis, group_size = FORMS[form]
    x, scale, zero_point = torch.randn(shape), torch.rand(num_params) + 0.1, torch.randn(num_params)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    tensors = [t.requires_grad_(bool(flag)) for t, flag in zip((x, scale, zero_point), LEARNED[learned], strict=True)]
    torch.library.opcheck(OPERATOR, (*tensors, axis, group_size, -8, 7, gradient, "site"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_into_one_graph(dynamic: bool) -> None:
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (3, 7):
        x = torch.randn(batch, 5)
        assert_same(run(layer, compiled, x), run(layer, layer, x))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exports_as_one_node_per_site(strict: bool) -> None:
    layer = Layer()
    program = torch.export.export(
        layer, (torch.randn(3, 5),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict
    )
    tags = [node.args[-1] for node in program.graph.nodes if node.target is OPERATOR]
    assert tags == ["fc.input", "fc.weight"]
    x = torch.randn(6, 5)
    assert torch.equal(program.module()(x), layer(x))


def test_symbolic_trace_keeps_the_operator() -> None:
    graph_module = torch.fx.symbolic_trace(Layer())
    assert [node.args[-1] for node in graph_module.graph.nodes if node.target is OPERATOR] == ["fc.input", "fc.weight"]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradient_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    layer, x = Layer(), torch.randn(3, 5)
    assert_same(run(layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), x), run(layer, layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_keeps_the_type_of_x(dtype: torch.dtype) -> None:
    layer, x = Layer(), torch.randn(3, 5, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fake_quantize(x, layer.input_scale, layer.input_zero_point, layer.input_spec).dtype == dtype
        output, *grads = run(layer, layer, x)
    assert output.dtype == torch.bfloat16
    assert [grad.dtype for grad in grads] == [dtype, *[torch.float32] * 4]


def test_nothing_of_the_size_of_x_is_saved_but_x_itself() -> None:
    layer, x = Layer(), torch.randn(64, 5, requires_grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fake_quantize(x, layer.input_scale, layer.input_zero_point, layer.input_spec, gradient="lsq")
    assert [t.numel() for t in saved] == [x.numel(), 1, 1]
    assert saved[0].data_ptr() == x.data_ptr()


def test_ste_gives_nothing_to_scale_and_zero_point() -> None:
    scale, zero_point = torch.tensor(0.1, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    x = torch.randn(9)
    spec = TensorSpec(4, True)
    assert not fake_quantize(x, scale, zero_point, spec).requires_grad
    x.requires_grad_()
    fake_quantize(x, scale, zero_point, spec).sum().backward()
    assert x.grad is not None
    assert scale.grad is None
    assert zero_point.grad is None


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=lambda guard: guard.__name__)
def test_no_gradient_is_recorded_where_none_is_wanted(guard: Callable[[], torch.no_grad]) -> None:
    layer = Layer()
    with guard():
        y = layer(torch.randn(3, 5))
    assert not y.requires_grad


def test_second_derivatives_by_x_go_through_the_mask() -> None:
    x = torch.tensor([0.31, -0.2, 50.0], requires_grad=True)
    y = fake_quantize(x, torch.tensor(0.1), torch.tensor(0.0), TensorSpec(8, True)).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 2.0, 0.0]))


def test_a_second_derivative_by_a_learned_scale_is_refused() -> None:
    x, scale = torch.randn(4, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    y = fake_quantize(x, scale, torch.tensor(0.0), TensorSpec(8, True), gradient="lsq").square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in torch's own forward mode
class TestTransforms:
    """`torch.func` and forward mode: the straight-through derivative, or an error; never zero in silence."""

    X = torch.tensor([0.31, -0.2, 50.0, 0.04])
    MASK = torch.tensor([1.0, 1.0, 0.0, 1.0])

    @staticmethod
    def quantized(x: Tensor) -> Tensor:
        return fake_quantize(x, torch.tensor(0.1), torch.tensor(0.0), TensorSpec(8, True))

    def squares(self, x: Tensor) -> Tensor:
        return self.quantized(x).square().sum()

    def test_forward_mode(self) -> None:
        value, tangent = torch.func.jvp(self.quantized, (self.X,), (torch.full((4,), 3.0),))
        assert torch.equal(value, self.quantized(self.X)) and torch.equal(tangent, 3 * self.MASK)
        assert torch.equal(torch.func.jacfwd(self.quantized)(self.X), torch.diag(self.MASK))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(self.quantized(forward_ad.make_dual(self.X, torch.ones(4))))
        assert torch.equal(dual.tangent, self.MASK)
        _, twice = torch.autograd.functional.jvp(self.quantized, (self.X,), (torch.ones(4),))
        assert torch.equal(twice, self.MASK)

    def test_reverse_mode(self) -> None:
        expected = 2 * self.quantized(self.X) * self.MASK
        assert torch.equal(torch.func.grad(self.squares)(self.X), expected)
        assert torch.equal(torch.func.jacrev(self.quantized)(self.X), torch.diag(self.MASK))

    def test_batches_and_second_derivatives(self) -> None:
        batch = torch.stack([self.X, -self.X])
        assert torch.equal(torch.func.vmap(self.quantized)(batch), self.quantized(batch))
        per_sample = torch.func.vmap(torch.func.grad(self.squares))(batch)
        assert torch.equal(per_sample, torch.stack([torch.func.grad(self.squares)(x) for x in batch]))
        assert torch.equal(torch.func.hessian(self.squares)(self.X), torch.diag(2 * self.MASK))

    @pytest.mark.parametrize("transform", ["jvp", "grad"])
    def test_learned_scales_are_refused(self, transform: str) -> None:
        def by_scale(scale: Tensor) -> Tensor:
            spec = TensorSpec(8, True)
            return fake_quantize(self.X, scale, torch.tensor(0.0), spec, gradient="lsq", tag="conv.input").sum()

        scale = torch.tensor(0.1)
        with pytest.raises(SpecError, match=r"conv\.input.*by its input alone"):
            torch.func.grad(by_scale)(scale) if transform == "grad" else torch.func.jvp(by_scale, (scale,), (scale,))


class Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_tensor_subclasses_alone_are_intercepted() -> None:
    class Own(Tensor):
        pass

    plain, own = torch.zeros(2), torch.zeros(2).as_subclass(Own)
    assert not operator.is_intercepted(plain, nn.Parameter(plain), plain)
    for place in range(3):
        assert operator.is_intercepted(*(own if number == place else plain for number in range(3)))


@pytest.mark.parametrize("learned", [False, True], ids=["inference", "training"])
def test_a_mode_sees_the_operator_and_not_its_inside(learned: bool) -> None:
    x = torch.randn(4, requires_grad=learned)
    with Watcher() as watcher:
        y = fake_quantize(x, torch.tensor(0.1), torch.tensor(0.0), TensorSpec(8, True))
        if learned:
            y.backward(torch.ones(4))
    ours = ["sparsebit::fake_quantize"] + ["sparsebit::fake_quantize_backward"] * learned
    assert [name for name in watcher.seen if name.startswith("sparsebit")] == ours
    assert not any(name.startswith(("aten::div", "aten::round")) for name in watcher.seen)


@pytest.mark.parametrize("granularity", [PerChannel(0), PerGroup(1, 3)], ids=str)
def test_the_short_way_and_the_operator_agree(granularity: PerChannel | PerGroup) -> None:
    spec = TensorSpec(3, False, granularity)
    x, scale, zero_point = torch.randn(4, 6), torch.rand(1) + 0.1, torch.tensor(2.0)
    numbers = (granularity.axis, granularity.size, spec.qmin, spec.qmax, "ste", "")
    expected = reference.fake_quantize(x, scale, zero_point, spec)
    assert torch.equal(operator.fake_quantize(x, scale, zero_point, *numbers), expected)
    assert torch.equal(OPERATOR(x, scale, zero_point, *numbers), expected)


def test_faults_name_the_site() -> None:
    one, zero, spec = torch.tensor(1.0), torch.tensor(0.0), TensorSpec(8, True)
    with pytest.raises(SpecError, match=r"layer1.conv: .*gradient='ewgs': allowed: .* ste, lsq, pact"):
        fake_quantize(torch.zeros(3), one, zero, spec, gradient="ewgs", tag="layer1.conv")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"layer1.conv: a tensor of torch.int64, .*allowed: floating-point"):
        fake_quantize(torch.zeros(3, dtype=torch.long), one, zero, spec, tag="layer1.conv")
    with pytest.raises(SpecError, match=r"layer1.conv: 2 scales or zero points for a tensor of shape \(3,\)"):
        fake_quantize(torch.zeros(3), torch.ones(2), zero, spec, tag="layer1.conv")
