"""Writes in place: into tensors, into parts of them, through views, with and without the result being read."""

from __future__ import annotations

from tests.fuzz.program import Variable
from tests.fuzz.scope import Scope, batch_first, given_float
from tests.parameters import listed


def _writable(v: Variable) -> bool:
    return not v.is_overlapping


@given_float(_writable)
def method(scope: Scope, x: Variable) -> bool:
    y = scope.like(x) or x
    forms = listed("""
        {x}.mul_(2) | {x}.add_(1) | {x}.relu_() | {x}.sigmoid_() | {x}.tanh_() | {x}.div_(2) | {x}.clamp_(-1, 1) |
        {x}.neg_() | {x}.zero_() | {x}.fill_(0.5) | {x}.add_({y}) | {x}.sub_({y}) | {x}.mul_({y}) | {x}.copy_({y}) |
        {x}.copy_({y} * 2) | {x}.abs_() | {x}.masked_fill_({x} < 0, 0.) | {x}.add_({y}, alpha=2) |
        {x}.lerp_({y} + 1, 0.5) | {x}.square_() | torch.relu_({x}) | F.relu({x}, inplace=True) | F.relu_({x}) |
        F.leaky_relu_({x}, 0.1) | F.silu({x}, inplace=True) | {x}.clamp_min_(0) | F.hardtanh_({x}) |
        F.dropout({x}, 0.5, training=False, inplace=True) | {x}.addcmul_({y}, {y}) | {x}.sin_() |
        F.elu({x}, inplace=True) | F.hardswish({x}, inplace=True) | F.relu6({x}, True) | torch.sigmoid_({x}) |
        {x}.swapaxes(0, -1).mul_(2) | {x}.index_fill_(-1, torch.tensor([0]), 0.5) | {x}.mul_({x}.shape[0]) |
        {x}.index_add_(-1, torch.tensor([0]), {y}[..., :1]) | {x}.index_copy_(-1, torch.tensor([0]), {y}[..., :1] * 2) |
        {x}.scatter_(-1, torch.zeros_like({x}, dtype=torch.long)[..., :1], 0.5) | {x}.flatten().mul_(2) |
        {x}.masked_scatter_({x} < -9, {y}) | {x}.fill_diagonal_(0.5) | {x}.clone().mul_(2) | {x}.detach().mul_(2)
    """)
    form = scope.choices.pick(forms)
    if "fill_diagonal_" in form and len(x.shape) != 2:
        return False
    text = form.format(x=x.name, y=y.name)
    if scope.choices.chance(35) and not any(word in form for word in ("swapaxes", "flatten")):
        return scope.assign(text, x, is_contiguous=x.is_contiguous)
    return scope.say(text)


@given_float(_writable)
def operator(scope: Scope, x: Variable) -> bool:
    y = scope.like(x) or x
    forms = listed("""
        {x} += {y} | {x} *= 2 | {x} -= {y} | {x} /= 2 | {x} *= {y} | {x} += 1 | {x} **= 2 | {x} -= {x}.mean()
    """)
    return scope.say(scope.choices.pick(forms).format(x=x.name, y=y.name))


@given_float(lambda v: _writable(v) and batch_first(v) and len(v.shape) >= 2 and v.shape[1] >= 2)
def setitem(scope: Scope, x: Variable) -> bool:
    y, half = scope.like(x) or x, x.shape[1] // 2
    forms = listed("""
        {x}[:, :{h}] = 0 | {x}[:, {h}:] = {y}[:, {h}:] | {x}[:, 0] = 1 | {x}[:, ::2] *= 2 | {x}[:, :{h}] += 1 |
        {x}[0] = 0.5 | {x}[..., 0] = {y}[..., -1] | {x}[{x} < 0] = 0 | {x}[:, [0, 1]] = {y}[:, [1, 0]] | {x}[:] = {y} |
        {x}[:, :{h}] = {y}[:, -{h}:] | {x}[:, 0] += {y}[:, 1] | {x}[{x} < 0] *= 0.1 |
        {x}[torch.arange({x}.shape[0]), 0] = 2.0 | {x}[...] = {y} + 1 | {x}[:, -1:] /= 2 | {x}[-1] += {y}[0] |
        {x}[:, 1] = {x}[:, 0]
    """)
    return scope.say(scope.choices.pick(forms).format(x=x.name, y=y.name, h=half))


@given_float(lambda v: _writable(v) and batch_first(v) and len(v.shape) >= 2 and v.shape[1] % 2 == 0)
def through_view(scope: Scope, x: Variable) -> bool:
    """A write into a view that is given no name."""
    half = x.shape[1] // 2
    views = listed("""
        {x}[:, :{h}] | {x}[:, {h}:] | {x}.chunk(2, 1)[0] | {x}.narrow(1, 0, {h}) | {x}.select(1, 0) |
        {x}.transpose(0, 1) | {x}[0] | {x}.unbind(1)[-1] | {x}[..., ::2] | {x}.unsqueeze(0) | {x}.split({h}, 1)[1] |
        {x}.data | {x}.view_as({x})[:, 0]
    """)
    writes = listed("""
        mul_(2) | add_(1) | relu_() | sigmoid_() | zero_() | div_(2) | tanh_() | neg_() | clamp_(0, 1) | fill_(1.5)
    """)
    view = scope.choices.pick(views).format(x=x.name, h=half)
    return scope.say(f"{view}.{scope.choices.pick(writes)}")


@given_float(_writable)
def out_argument(scope: Scope, x: Variable) -> bool:
    y = scope.like(x) or x
    forms = [
        "torch.add({y}, 1, out={o})",
        "torch.mul({y}, {y}, out={o})",
        "torch.relu(-{y}) + torch.sigmoid({y}, out={o})",
        "torch.tanh({y}, out={o})",
        "torch.sub({y}, {y} * 2, out={o})",
    ]
    target = scope.choices.pick([x.name, f"(o := torch.empty_like({x.name}))"])
    if target == x.name:
        # Where both are views of one memory in different orders, torch's own result is undefined.
        read = y.name if x.is_contiguous and y.is_contiguous else f"{y.name}.clone()"
        return scope.say(scope.choices.pick(forms).format(y=read, o=target))
    new = scope.new(x.shape, dtype=x.dtype)
    form = scope.choices.pick([f for f in forms if "relu" not in f])
    return scope.say(
        f"{new.name} = torch.empty_like({x.name})", form.format(y=y.name, o=new.name), target=new, stands_for=x
    )


@given_float(_writable)
def inplace_module(scope: Scope, x: Variable) -> bool:
    """A module that writes into its input; its result may be read or not."""
    kinds = listed("""
        ReLU(inplace=True) | ReLU6(inplace=True) | SiLU(inplace=True) | LeakyReLU(0.1, inplace=True) |
        ELU(inplace=True) | Hardswish(inplace=True) | Dropout(0.5, inplace=True) | Hardtanh(inplace=True)
    """)
    name = f"self.{scope.member()}"
    members = (f"{name} = nn.{scope.choices.pick(kinds)}",)
    if scope.choices.chance(50):
        return scope.say(f"{name}({x.name})", members=members)
    new = scope.new(x.shape, dtype=x.dtype, is_contiguous=x.is_contiguous)
    return scope.say(f"{new.name} = {name}({x.name})", target=new, stands_for=x, members=members)
