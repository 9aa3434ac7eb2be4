"""The statements of random nets: each adds a layer or a function to a forward, on tensors of real sizes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.program import Variable
from tests.fuzz.scope import Scope
from tests.parameters import listed

LARGEST = 1500  # numbers in a tensor: nets are small
ACTIVATIONS = listed("""
    ReLU() | ReLU() | ReLU6() | Hardtanh(-0.7, 0.9) | SiLU() | Hardswish() | GELU() | GELU(approximate='tanh') |
    Sigmoid() | Tanh() | LeakyReLU(0.1) | ELU() | Softplus() | Mish() | PReLU() | Hardsigmoid()
""")


def added(scope: Scope, init: str, x: Variable, call: str = "{m}({x})") -> bool:
    """A member and its call on `x`; nothing where the layer does not take the shape of `x`."""
    shape = shape_of(call.format(m="m", x="x"), x=torch.zeros(x.shape), init=init)
    if shape is None:
        return False
    return scope.layer(init, x, shape, call=call)


def computed(scope: Scope, expression: str, x: Variable, y: Variable | None = None) -> bool:
    values = {"x": torch.zeros(x.shape), **({"y": torch.zeros(y.shape)} if y else {})}
    shape = shape_of(expression.format(x="x", y="y"), **values)
    if shape is None:
        return False
    return scope.assign(expression.format(x=x.name, y=y.name if y else ""), x, shape)


def shape_of(expression: str, *, init: str = "", **values: Tensor) -> tuple[int, ...] | None:
    """The shape that an expression gives; None where it fails, or is empty or large."""
    names = {"torch": torch, "F": F, "nn": nn, **values}
    with warnings.catch_warnings(), torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, IndexError):
        warnings.simplefilter("ignore")
        if init:
            names["m"] = eval(init, names).eval()
        shape = tuple(eval(expression, names).shape)
        return shape if 0 < torch.Size(shape).numel() <= LARGEST else None
    return None


def convolution(scope: Scope) -> bool:
    """With odd sizes, strides, dilations, groups, a norm and an activation behind it."""
    x = _of_rank(scope, 3, 4)
    if x is None:
        return False
    pick, dims, channels = scope.choices.pick, len(x.shape) - 2, x.shape[1]
    kernel = pick(["3", "1", "2", "5", "(1, 3)" if dims == 2 else "4"])
    groups, width = pick([1, 1, channels, 2]), pick([4, 8, 3, 5, 6, channels])
    width = channels * pick([1, 1, 2]) if groups == channels else width
    if channels % groups or width % groups:
        groups = 1
    padding = pick(["1", "0", "2", "'same'" if channels else ""])
    stride = "1" if padding == "'same'" else pick(["1", "1", "2", "3"])
    mode = pick([*[""] * 12, ", padding_mode='reflect'", ", padding_mode='circular'", ", padding_mode='replicate'"])
    rest = f", {kernel}, stride={stride}, padding={padding}, dilation={pick([1, 1, 1, 2])}, groups={groups}"
    bias = pick(["", "", ", bias=False"])
    if not added(scope, f"nn.LazyConv{dims}d({width}{rest}{bias}{mode})", x):
        return False
    _behind(scope, dims)
    return True


def transposed(scope: Scope) -> bool:
    x = _of_rank(scope, 3, 4)
    if x is None:
        return False
    pick, dims = scope.choices.pick, len(x.shape) - 2
    groups, width = pick([1, 1, 2]), pick([4, 3, 6])
    if x.shape[1] % groups or width % groups:
        groups = 1
    form = pick(["2, 2", "3, 2, 1, 1", "3, 1, 1", "4, 2, 1", "3, 2"])
    bias = pick(["", ", bias=False"])
    if not added(scope, f"nn.LazyConvTranspose{dims}d({width}, {form}, groups={groups}{bias})", x):
        return False
    _behind(scope, dims)
    return True


def linear(scope: Scope) -> bool:
    x = _of_rank(scope, 2, 3, 4)
    if x is None:
        return False
    bias = scope.choices.pick(["", "", ", bias=False"])
    if not added(scope, f"nn.LazyLinear({scope.choices.pick([4, 8, 3, 7, 1, 16])}{bias})", x):
        return False
    _behind(scope, 0)
    return True


def _behind(scope: Scope, dims: int) -> None:
    """A batch norm (of so many dimensions, none for 0) and an activation, each often left out."""
    last = scope.variables[-1]
    if dims and scope.choices.chance(35):
        added(scope, f"nn.LazyBatchNorm{dims}d()", last)
    if scope.choices.chance(60):
        activation(scope)


def activation(scope: Scope) -> bool:
    return added(scope, f"nn.{scope.choices.pick(ACTIVATIONS)}", scope.variables[-1])


def norm(scope: Scope) -> bool:
    x = _of_rank(scope, 2, 3, 4)
    if x is None:
        return False
    channels, last = x.shape[1], x.shape[-1]
    options = [f"nn.LayerNorm({last})", f"nn.RMSNorm({last})"]
    if len(x.shape) > 2:
        kind = len(x.shape) - 2
        options += [f"nn.GroupNorm({2 if channels % 2 == 0 else 1}, {channels})", f"nn.LazyBatchNorm{kind}d()"]
        options += [f"nn.LazyInstanceNorm{kind}d(affine=True)"]
    return added(scope, scope.choices.pick(options), x)


def pool(scope: Scope) -> bool:
    x = _of_rank(scope, 3, 4)
    if x is None:
        return False
    dims = len(x.shape) - 2
    forms = listed("""
        MaxPool{d}d(2) | MaxPool{d}d(3, 2, 1) | MaxPool{d}d(2, ceil_mode=True) | AvgPool{d}d(2) | AvgPool{d}d(3, 2, 1) |
        AvgPool{d}d(3, 1, 1, count_include_pad=False) | AdaptiveAvgPool{d}d(1) | AdaptiveAvgPool{d}d(2) |
        AvgPool{d}d(2, ceil_mode=True) | AdaptiveMaxPool{d}d(1)
    """)
    return added(scope, f"nn.{scope.choices.pick(forms).format(d=dims)}", x)


def binary(scope: Scope) -> bool:
    """Two values of one shape, or one value and another that broadcasts."""
    x = scope.choices.pick(scope.variables[-3:])
    y = scope.like(x)
    if y is None:
        return False
    forms = listed("""
        {x} + {y} | {x} + {y} | {x} * {y} | {x} - {y} | torch.cat([{x}, {y}], 1) | torch.cat([{y}, {x}], -1) |
        {x} + {y}.mean(-1, keepdim=True) | {x} * {y}.sigmoid() | torch.stack([{x}, {y}], 1).flatten(1, 2) |
        torch.cat([{x}, {x}, {y}], 1) | torch.maximum({x}, {y}) | {x} / ({y}.abs() + 1)
    """)
    return computed(scope, scope.choices.pick(forms), x, y)


def residual(scope: Scope) -> bool:
    """A convolution of the same size, and the sum or the product of both."""
    x = _of_rank(scope, 3, 4)
    if x is None or not added(scope, f"nn.LazyConv{len(x.shape) - 2}d({x.shape[1]}, 3, padding=1)", x):
        return False
    y, form = scope.variables[-1], scope.choices.pick(["{x} + {y}", "torch.relu({x} + {y})", "{y} * {x}", "{y} + {x}"])
    return computed(scope, form, x, y)


def squeeze_excite(scope: Scope) -> bool:
    x = _of_rank(scope, 4)
    if x is None or not added(scope, f"nn.LazyConv2d({x.shape[1]}, 1)", x, "{m}({x}.mean((2, 3), keepdim=True))"):
        return False
    gate = scope.choices.pick(["{y}.sigmoid()", "F.hardsigmoid({y})"])
    return computed(scope, f"{{x}} * {gate}", x, scope.variables[-1])


def function(scope: Scope) -> bool:
    forms = listed("""
        torch.relu({x}) | F.silu({x}) | F.gelu({x}) | {x} * 2 | {x} + 0.5 | 1 - {x} | {x}.clamp(-0.8, 1.1) |
        {x}.softmax(-1) | {x}.flatten(1) | {x}.transpose(1, -1) | {x}.mean(-1) | F.pad({x}, (1, 0)) |
        F.pad({x}, (0, 1), value=0.5) | {x}[:, 1:] | {x}.chunk(2, 1)[0] * {x}.chunk(2, 1)[1] | {x}.unsqueeze(1) |
        F.interpolate({x}, scale_factor=2) | {x}.flip(-1) | torch.roll({x}, 1, -1) | {x}.mean((2, 3)) | {x}.abs() |
        F.interpolate({x}, scale_factor=2, mode='bilinear') | F.pixel_shuffle({x}, 2) | F.pixel_unshuffle({x}, 2) |
        {x}.flatten(2).transpose(1, 2) | {x}.reshape({x}.shape[0], 2, -1) | {x}.amax(-1) | {x}.sum(1, keepdim=True) |
        {x}.exp() / (1 + {x}.exp()) | {x}.square() | F.log_softmax({x}, 1) | torch.tanh({x}) | {x}.log1p() |
        {x}[..., ::2] | {x}.sqrt() | {x}.expand(2, *{x}.shape[1:])
    """)
    return computed(scope, scope.choices.pick(forms), scope.choices.pick(scope.variables[-2:]))


def attention(scope: Scope) -> bool:
    x = _of_rank(scope, 3)
    if x is None:
        return False
    width = x.shape[-1]
    forms = [
        "F.scaled_dot_product_attention({x}, {x}, {x})",
        "({x} @ {x}.transpose(1, 2)).softmax(-1) @ {x}",
        "torch.bmm({x}, {x}.transpose(1, 2))",
        "torch.einsum('bij,bkj->bik', {x}, {x})",
        "{x}.softmax(-1).transpose(1, 2) @ {x}",
    ]
    if width % 2 == 0 and scope.choices.chance(40):
        return added(scope, f"nn.MultiheadAttention({width}, 2, batch_first=True)", x, "{m}({x}, {x}, {x})[0]")
    return computed(scope, scope.choices.pick(forms), x)


def call_again(scope: Scope) -> bool:
    """A layer once more, on another value of the same shape."""
    for name, shape, out in reversed(scope.layers):
        x = scope.find(lambda v, shape=shape: v.shape == shape)  # type: ignore[misc]
        if x is not None:
            new = scope.new(out)
            return scope.say(f"{new.name} = {name}({x.name})", target=new, stands_for=x)
    return False


def _of_rank(scope: Scope, *ranks: int) -> Variable | None:
    return scope.find(lambda v: len(v.shape) in ranks)


STATEMENTS: dict[str, tuple[int, Callable[[Scope], bool]]] = {
    "convolution": (10, convolution),
    "residual": (3, residual),
    "linear": (6, linear),
    "transposed": (2, transposed),
    "pool": (4, pool),
    "binary": (5, binary),
    "activation": (2, activation),
    "norm": (2, norm),
    "function": (5, function),
    "attention": (2, attention),
    "squeeze_excite": (1, squeeze_excite),
    "call_again": (1, call_again),
}
