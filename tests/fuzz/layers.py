"""Layers and functions: what gives a new tensor."""

from __future__ import annotations

from tests.fuzz.program import BATCH, Variable
from tests.fuzz.scope import Scope, batch_first, given_float, has_rank
from tests.parameters import listed


def _is_single(v: Variable) -> bool:
    return v.dtype == "float"


@given_float(lambda v: _is_single(v) and batch_first(v) and len(v.shape) >= 2)
def linear(scope: Scope, x: Variable) -> bool:
    width = scope.choices.pick([8, 4, x.shape[-1]])
    bias = scope.choices.pick(["", ", bias=False"])
    return scope.layer(f"nn.Linear({x.shape[-1]}, {width}{bias})", x, (*x.shape[:-1], width))


@given_float(lambda v: _is_single(v) and has_rank(3, 4)(v))
def convolution(scope: Scope, x: Variable) -> bool:
    dims, channels = len(x.shape) - 2, x.shape[1]
    width = scope.choices.pick([4, 8])
    kind = scope.choices.pick([f"Conv{dims}d", f"ConvTranspose{dims}d"])
    form = scope.choices.pick(["1", "3, padding=1", "3, padding=1, bias=False"])
    if kind.startswith("Conv") and "Transpose" not in kind and width % 2 == 0 and channels % 2 == 0:
        form += scope.choices.pick(["", ", groups=2"])
    init, out = f"nn.{kind}({channels}, {width}, {form})", (x.shape[0], width, *x.shape[2:])
    if scope.choices.chance(40):
        return scope.layer(f"nn.Sequential({init}, nn.BatchNorm{dims}d({width}))", x, out)
    if not scope.layer(init, x, out):
        return False
    if scope.choices.chance(40):  # what folding looks for
        return scope.layer(f"nn.BatchNorm{dims}d({width})", scope.variables[-1], out)
    return True


@given_float(lambda v: _is_single(v) and batch_first(v) and len(v.shape) >= 2)
def norm(scope: Scope, x: Variable) -> bool:
    channels = x.shape[1]
    options = [f"nn.LayerNorm({x.shape[-1]})"] if x.shape[-1] >= 4 else []
    if len(x.shape) <= 4:
        options.append(f"nn.BatchNorm{max(1, len(x.shape) - 2)}d({channels})")
    if len(x.shape) in (3, 4) and channels % 2 == 0:
        options.append(f"nn.GroupNorm(2, {channels})")
    return scope.layer(scope.choices.pick(options), x, x.shape) if options else False


@given_float()
def activation(scope: Scope, x: Variable) -> bool:
    kinds = listed("""
        ReLU() | ReLU6() | GELU() | SiLU() | Hardswish() | Sigmoid() | Tanh() | LeakyReLU(0.1) | ELU() | Hardsigmoid() |
        Softplus() | Identity() | Dropout(0.5) | PReLU() | Mish() | Hardtanh() | CELU() | ReLU()
    """)
    kind = scope.choices.pick(kinds)
    if kind == "PReLU()" and x.dtype != "float":
        kind = "ReLU()"
    return scope.layer(f"nn.{kind}", x, x.shape)


@given_float()
def function(scope: Scope, x: Variable) -> bool:
    forms = listed("""
        torch.relu({x}) | {x}.relu() | F.relu({x}) | torch.sigmoid({x}) | {x}.tanh() | F.gelu({x}) | F.silu({x}) |
        {x} * 2 | {x} + 1 | 1 - {x} | -{x} | {x}.clamp(-1, 1) | torch.clamp({x}, min=0.) | {x}.abs() | {x} * {x} |
        F.leaky_relu({x}, 0.2) | {x}.square() | torch.sin({x}) | F.hardswish({x}) | {x} / 2 | {x}.softmax(-1) |
        F.dropout({x}, 0.5, self.training) | {x}.clone() | torch.where({x} > 0, {x}, 0.1 * {x}) | {x}.flip(-1) |
        torch.roll({x}, 1, -1) | {x} - {x}.mean() | {x}.contiguous() | F.normalize({x} + 3, dim=-1) |
        {x} / (1 + {x}.abs()) | F.hardtanh({x}) | {x}.cumsum(-1) | torch.maximum({x}, -{x}) | F.relu6({x}) |
        {x} * torch.ones({x}.shape[-1]) | {x} + torch.arange({x}.shape[-1]) | {x} * self.training |
        {x}.masked_fill({x} < 0, 0.) | {x}.sort(-1).values | F.softplus({x}) | torch.einsum('...i->...i', {x}) |
        {x}.neg()
    """)
    return scope.assign(scope.choices.pick(forms).format(x=x.name), x)


def binary(scope: Scope) -> bool:
    x = scope.float()
    y = scope.like(x) if x is not None else None
    if x is None or y is None:
        return False
    forms = listed("""
        {x} + {y} | {x} - {y} | {x} * {y} | torch.add({x}, {y}) | torch.add({x}, {y}, alpha=2) | torch.mul({x}, {y}) |
        {x}.add({y}) | torch.maximum({x}, {y}) | {x} / (2 + {y}.abs()) | torch.lerp({x}, {y}, 0.3) | sum([{x}, {y}]) |
        torch.stack([{x}, {y}]).sum(0) | torch.where({x} > 0, {x}, {x} * 0) + {y} | torch.addcmul({x}, {y}, {y}) |
        torch.stack(({x}, {y}), -1).mean(-1)
    """)
    return scope.assign(scope.choices.pick(forms).format(x=x.name, y=y.name), x)


def concat(scope: Scope) -> bool:
    x = scope.float(lambda v: batch_first(v) and len(v.shape) >= 2)
    y = scope.like(x) if x is not None else None
    if x is None or y is None or x.shape[-1] > 8:
        return False
    form = scope.choices.pick(
        ["torch.cat([{x}, {y}], -1)", "torch.cat(({x}, {y}), dim=-1)", "torch.hstack([{x}, {y}])"]
    )
    if "hstack" in form and len(x.shape) != 2:
        return False
    return scope.assign(form.format(x=x.name, y=y.name), x, (*x.shape[:-1], 2 * x.shape[-1]))


@given_float(lambda v: len(v.shape) >= 3 and batch_first(v))
def reduce(scope: Scope, x: Variable) -> bool:
    dim = scope.choices.between(1, len(x.shape) - 1)
    form = scope.choices.pick(
        ["{x}.mean({d})", "{x}.sum({d})", "{x}.amax({d})", "torch.mean({x}, dim={d})", "{x}.max({d})[0]"]
    )
    return scope.assign(form.format(x=x.name, d=dim), x, tuple(n for i, n in enumerate(x.shape) if i != dim))


@given_float(lambda v: has_rank(3)(v) and _is_single(v))
def matmul(scope: Scope, x: Variable) -> bool:
    rows = x.shape[1]
    square, same = (BATCH, rows, rows), x.shape
    forms = [
        ("{x} @ {x}.transpose(1, 2)", square),
        ("torch.bmm({x}, {x}.transpose(-2, -1))", square),
        ("torch.einsum('bij,bkj->bik', {x}, {x})", square),
        ("({x} @ {x}.transpose(1, 2)).softmax(-1) @ {x}", same),
        ("F.scaled_dot_product_attention({x}, {x}, {x})", same),
        ("torch.matmul({x}.softmax(-1), {x}.mT)", square),
    ]
    form, shape = scope.choices.pick(forms)
    return scope.assign(form.format(x=x.name), x, shape)


@given_float(lambda v: _is_single(v) and batch_first(v) and len(v.shape) >= 2)
def own_weight(scope: Scope, x: Variable) -> bool:
    name, width = f"self.{scope.member()}", x.shape[-1]
    forms = [
        (f"nn.Parameter(torch.randn({width}))", "{x} * {m}", width),
        (f"nn.Parameter(torch.randn(4, {width}))", "F.linear({x}, {m})", 4),
        (f"nn.Parameter(torch.randn({width}, 8))", "{x} @ {m}", 8),
        (f"nn.Parameter(torch.randn({width}, 8))", "torch.einsum('...i,ij->...j', {x}, {m})", 8),
        (f"nn.Parameter(torch.randn({width}))", "{x} + {m}.view(-1)", width),
        (f"nn.Linear({width}, 4)", "F.linear({x}, {m}.weight, {m}.bias)", 4),
        (f"nn.Linear({width}, 4)", "{x} @ {m}.weight.t()", 4),
        (f"nn.Linear({width}, {width})", "{m}({x}) + {m}.weight.sum()", width),
        (f"nn.Linear({width}, {width})", "{x} + {m}.bias", width),
    ]
    init, form, out = scope.choices.pick(forms)
    new = scope.new((*x.shape[:-1], out))
    line = f"{new.name} = {form.format(x=x.name, m=name)}"
    return scope.say(line, target=new, stands_for=x, members=(f"{name} = {init}",))


@given_float(lambda v: has_rank(3)(v) and _is_single(v) and v.shape[2] in (4, 8))
def attention(scope: Scope, x: Variable) -> bool:
    call = scope.choices.pick(["{m}({x}, {x}, {x})[0]", "{m}({x}, {x}, {x}, need_weights=False)[0]"])
    return scope.layer(f"nn.MultiheadAttention({x.shape[2]}, 2, batch_first=True)", x, x.shape, call=call)


@given_float(lambda v: has_rank(3)(v) and _is_single(v))
def recurrent(scope: Scope, x: Variable) -> bool:
    kind = scope.choices.pick(["LSTM", "GRU"])
    return scope.layer(f"nn.{kind}({x.shape[2]}, 4, batch_first=True)", x, (*x.shape[:2], 4), call="{m}({x})[0]")


def embedding(scope: Scope) -> bool:
    x = scope.find(lambda v: v.dtype == "long")
    if x is None:
        return False
    name, new = f"self.{scope.member()}", scope.new((*x.shape, 8))
    form = scope.choices.pick(["{m}({x})", "F.embedding({x}, {m}.weight)"])
    return scope.say(
        f"{new.name} = {form.format(m=name, x=x.name)}", target=new, members=(f"{name} = nn.Embedding(10, 8)",)
    )


@given_float(lambda v: has_rank(3, 4)(v) and all(n % 2 == 0 for n in v.shape[2:]) and _is_single(v))
def pool(scope: Scope, x: Variable) -> bool:
    dims = len(x.shape) - 2
    half = (*x.shape[:2], *(n // 2 for n in x.shape[2:]))
    double = (*x.shape[:2], *(n * 2 for n in x.shape[2:]))
    options = [
        (f"nn.AvgPool{dims}d(2)", half),
        (f"nn.MaxPool{dims}d(2)", half),
        (f"nn.AdaptiveAvgPool{dims}d(1)", (*x.shape[:2], *[1] * dims)),
        (f"nn.MaxPool{dims}d(3, 1, 1)", x.shape),
    ]
    if max(x.shape[2:]) <= 4:
        options.append(("nn.Upsample(scale_factor=2)", double))
    init, out = scope.choices.pick(options)
    return scope.layer(init, x, out)


def call_again(scope: Scope) -> bool:
    """A layer once more, on its own output or on anything of the right shape."""
    for name, shape, out in reversed(scope.layers):
        x = scope.find(lambda v, shape=shape: v.shape == shape and v.dtype == "float")  # type: ignore[misc]
        if x is not None:
            new = scope.new(out)
            return scope.say(f"{new.name} = {name}({x.name})", target=new, stands_for=x)
    return False


@given_float(lambda v: _is_single(v) and batch_first(v) and len(v.shape) >= 2)
def share_weight(scope: Scope, x: Variable) -> bool:
    """Two layers with one weight, or one layer under two names."""
    one, other, width = f"self.{scope.member()}", f"self.{scope.member()}", x.shape[-1]
    shares = scope.choices.pick(
        ["{o}.weight = {m}.weight", "{o} = {m}", "{o}.weight = nn.Parameter({m}.weight.detach())"]
    )
    members = (
        f"{one} = nn.Linear({width}, {width})",
        f"{other} = nn.Linear({width}, {width}, bias=False)",
        shares.format(o=other, m=one),
    )
    return scope.say(
        f"{(new := scope.new(x.shape)).name} = {other}({one}({x.name}))", target=new, stands_for=x, members=members
    )
