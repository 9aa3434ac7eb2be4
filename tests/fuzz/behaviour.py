"""Code that does more than compute: state, branches, hooks, random numbers, autograd, number types.

What depends on earlier calls has a period of two calls, as the inputs have: calibration then sees every range.
"""

from __future__ import annotations

from tests.fuzz.program import Variable
from tests.fuzz.scope import Scope, batch_first, given_float
from tests.parameters import listed

REVERSAL = """\
class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0
    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad
"""
PASSED = """\
class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.gain = gain
        return x.clamp(-1, 1) * gain
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.gain, None
"""
HOOKS = """\
def watch(module, args, output):
    LOG.append(float(output.float().mean()))
def change(module, args, output):
    return output * 2
def change_in_place(module, args, output):
    output.mul_(2)
def before(module, args):
    return (args[0] + 1,)
def watch_before(module, args):
    LOG.append(tuple(args[0].shape))
def count(module, args, output):
    module.calls = getattr(module, 'calls', 0) + 1
    return output + module.calls % 2
"""
WRAP = """\
def doubled(forward):
    def patched(x):
        return forward(x) * 2
    return patched
def shifted(self, x):
    return type(self).forward(self, x) + 1
"""


def _plain(v: Variable) -> bool:
    return batch_first(v) and len(v.shape) >= 2 and v.dtype == "float"


@given_float(_plain)
def state(scope: Scope, x: Variable) -> bool:
    """Attributes that forward reads and writes."""
    m, new, width = f"self.{scope.member()}", scope.new(x.shape), x.shape[-1]
    a, b = x.name, new.name
    flat = f"{a}.detach().reshape(-1, {width}).mean(0)"
    buffer = f"self.register_buffer('{m[5:]}', torch.zeros({width}))"
    forms = [
        ([f"{m} = 0"], [f"{m} += 1", f"{b} = {a} + 0.5 * ({m} % 2)"]),
        ([f"{m} = 0"], [f"{b} = {a} * (1 + {m} % 2)", f"{m} = {m} + 1"]),
        ([f"{m} = None"], [f"{b} = {a} if {m} is None else {a} + {m}", f"{m} = {flat}"]),
        ([f"{m} = []"], [f"{m}.append(len({a}))", f"{b} = {a} + len({m}) % 2"]),
        ([f"{m} = []"], [f"{b} = {a} + {m}[-1] if {m} else {a} * 1", f"{m}.append({flat})"]),
        ([f"{m} = {{}}"], [f"{b} = {a} + {m}.get('last', 0.0)", f"{m}['last'] = {flat}"]),
        ([f"{m} = torch.zeros({width})"], [f"{b} = {a} + {m}", f"{m} = {flat}"]),
        ([f"{m} = torch.zeros({width})"], [f"{b} = {a} + {m}", f"{m}.copy_({flat})"]),
        ([buffer], [f"{b} = {a} + {m}", f"{m}.copy_({flat})"]),
        ([buffer], [f"{b} = {a} + {m}", f"{m} = {flat}"]),
        ([buffer], [f"{m}[:] = {flat}", f"{b} = {a} - {m}"]),
        ([buffer], [f"{m} += 1", f"{b} = {a} + {m} % 2"]),
        ([buffer], [f"{m}.add_(1).fmod_(2)", f"{b} = {a} * {m}"]),
        ([buffer], [f"{m}.zero_()", f"{m}.add_({flat})", f"{b} = {a} * 2"]),
        ([f"{m} = types.SimpleNamespace(n=0)"], [f"{m}.n += 1", f"{b} = {a} + {m}.n % 2"]),
        ([f"{m} = 2.0"], [f"{b} = {a} * {m}"]),
        ([f"{m} = [1.0, 2.0]"], [f"{m}.reverse()", f"{b} = {a} * {m}[0]"]),
    ]
    members, lines = scope.choices.pick(forms)
    return scope.say(*lines, target=new, stands_for=x, members=tuple(members))


QUESTIONS = listed("""
    {a}.shape[0] > 2 | {a}.dim() == 2 | self.training | not self.training | self.training == False |
    self.training is False | isinstance({a}, torch.Tensor) | torch.is_tensor({a}) | type({a}) is torch.Tensor |
    hasattr({a}, 'shape') | hasattr({a}, 'tensors') | {a}.dtype == torch.float32 | {a}.requires_grad | {a}.is_cuda |
    torch.is_grad_enabled() | {a}.sum() > 0 | float({a}.mean()) > 0 | torch.any({a} > 0) | {a}.max().item() > 0.5 |
    len({a}) == 2 | {a}.is_contiguous() | isinstance({a}, nn.Parameter) | torch.jit.is_scripting() |
    {a}.device.type == 'cpu' | {a}.shape[-1] % 4 == 0 | {a}.numel() > 16 | isinstance({a}, (list, tuple)) |
    {a}.ndim > 2 and {a}.size(1) == 4 | bool(({a} > 0).all()) | {a} is None | {a}.is_floating_point() |
    torch.is_floating_point({a}) | {a}.size() == torch.Size([2, 8]) | {a}.grad_fn is None | callable({a}) |
    isinstance({a}, (torch.Tensor, list)) | {a}.is_leaf | id({a}) == 0 | type({a}).__name__ == 'Tensor' |
    isinstance({a}.shape[0], int) | {a}.stride(-1) == 1 | {a}.shape == (3, 8) | issubclass(type({a}), torch.Tensor) |
    getattr({a}, 'mask', None) is None | {a}.__class__ is torch.Tensor
""")


@given_float(_plain)
def branch(scope: Scope, x: Variable) -> bool:
    new = scope.new(x.shape)
    a, b, question = x.name, new.name, scope.choices.pick(QUESTIONS).format(a=x.name)
    forms = [
        [f"if {question}:", f"    {b} = {a} * 2", "else:", f"    {b} = {a} - 1"],
        [f"{b} = {a} * 2 if {question} else {a} + 1"],
        [f"{b} = {a} * 1", f"if {question}:", f"    {b}[:, 0] = 0"],
        [f"{b} = {a} * (2 if {question} else 3)"],
    ]
    return scope.say(*scope.choices.pick(forms), target=new, stands_for=x)


@given_float(_plain)
def layer_branch(scope: Scope, x: Variable) -> bool:
    """A branch on what a layer is."""
    m, new, width = f"self.{scope.member()}", scope.new(x.shape), x.shape[-1]
    a, b = x.name, new.name
    questions = listed(f"""
        isinstance({m}, nn.Linear) | type({m}) is nn.Linear | hasattr({m}, 'weight') | {m}.in_features == {width} |
        {m}.weight.shape[0] == 4 | {m}.bias is not None | isinstance({m}, nn.Module) | len({m}._forward_hooks) > 0 |
        {m}.__class__.__name__ == 'Linear' | {m}.training | {m}.weight.requires_grad |
        any(True for _ in {m}.children())
    """)
    question = scope.choices.pick(questions)
    body = scope.choices.pick(["", f"if {a}.sum() > 1e9:|    {a} = {a} / 2"]).split("|")
    lines = [line for line in body if line]
    lines += [f"if {question}:", f"    {b} = {m}({a})", "else:", f"    {b} = {a} - {m}({a})"]
    return scope.say(*lines, target=new, stands_for=x, members=(f"{m} = nn.Linear({width}, {width})",))


@given_float(_plain)
def loop(scope: Scope, x: Variable) -> bool:
    new = scope.new(x.shape)
    a, b = x.name, new.name
    forms = [
        [f"{b} = {a}", "for i in range(2):", f"    {b} = {b} + i"],
        [f"{b} = torch.stack([row * (i + 1) for i, row in enumerate({a})])"],
        [f"{b} = {a} * 1", f"for i in range({a}.shape[0]):", f"    {b}[i] += i"],
        [f"{b} = {a} * 1", f"for i in range({a}.shape[1]):", f"    {b}[:, i].mul_(i)"],
        [f"{b}, i = {a}, 0", "while i < 2:", f"    {b}, i = {b} * 2, i + 1"],
        [f"{b} = {a} * 1", f"for part in {b}.chunk(2, 1):", "    part.add_(1)"],
        [f"{b} = torch.cat([t + 1 for t in {a}.split(1, 0)])"],
        ["try:", f"    {b} = {a} + float({a}.shape[0])", "except TypeError:", f"    {b} = {a}"],
        [f"{b} = (lambda t: t * 2)({a})"],
        [f"{b} = functools.reduce(lambda s, t: s + t, [{a}, {a} * 2])"],
        [f"values = {{'a': {a}, 'b': {a} + 1}}", f"{b} = values['b'] - values.pop('a') * 2"],
        [f"{b} = {a} * 1", f"same = {b}", "same += 1", f"{b} = {b} * 2"],
        [f"assert {a}.dim() == {len(x.shape)}, {a}.shape", f"{b} = {a} * 2"],
        [f"{b} = [{a}, {a} * 2][{a}.shape[0] % 2]"],
    ]
    return scope.say(*scope.choices.pick(forms), target=new, stands_for=x)


@given_float(_plain)
def hook(scope: Scope, x: Variable) -> bool:
    """Hooks on a leaf layer, on what folding folds, or on a block."""
    width = x.shape[-1]
    inits = [f"nn.Linear({width}, {width})", "nn.ReLU()", f"nn.Sequential(nn.Linear({width}, {width}), nn.ReLU())"]
    afters = [
        "{m}.register_forward_hook(watch)",
        "{m}.register_forward_hook(change)",
        "{m}.register_forward_hook(change_in_place)",
        "{m}.register_forward_pre_hook(before)",
        "{m}.register_forward_pre_hook(watch_before)",
        "{m}.register_forward_hook(count)",
    ]
    if len(x.shape) in (3, 4):
        dims, channels = len(x.shape) - 2, x.shape[1]
        inits += [f"nn.Sequential(nn.Conv{dims}d({channels}, {channels}, 1), nn.BatchNorm{dims}d({channels}))"]
    init, after = scope.choices.pick(inits), scope.choices.pick(afters)
    if init.startswith("nn.Sequential") and scope.choices.chance(60):
        after = after.replace("{m}", "{m}[" + str(scope.choices.below(2)) + "]")
    return scope.layer(init, x, x.shape, after, prelude=(HOOKS,))


@given_float(_plain)
def patched_forward(scope: Scope, x: Variable) -> bool:
    width = x.shape[-1]
    init = scope.choices.pick(
        [f"nn.Linear({width}, {width})", f"nn.Sequential(nn.Linear({width}, {width}), nn.ReLU())"]
    )
    afters = [
        "{m}.forward = doubled({m}.forward)",
        "{m}.forward = types.MethodType(shifted, {m})",
        "{m}.forward = functools.partial(type({m}).forward, {m})",
    ]
    return scope.layer(init, x, x.shape, scope.choices.pick(afters), prelude=(WRAP,))


@given_float(_plain)
def random_numbers(scope: Scope, x: Variable) -> bool:
    forms = listed("""
        F.dropout({x}, 0.5) | F.dropout({x}, 0.5, training=True) | {x} * torch.rand_like({x}) |
        {x} + torch.randn({x}.shape) | {x} * torch.bernoulli(torch.full_like({x}, 0.5)) |
        {x} + torch.normal(0., 1., size={x}.shape) | {x} * torch.rand(()) | {x} + torch.empty_like({x}).normal_() |
        {x} * random.random() | {x}[..., torch.randperm({x}.shape[-1])] | {x} + torch.randint(0, 3, {x}.shape) |
        {x} + torch.empty({x}.shape[-1]).uniform_() | F.alpha_dropout({x}, 0.5, True) |
        {x} + torch.zeros_like({x}).bernoulli_(0.5) | {x} if random.random() < 0.5 else -{x} |
        {x} * torch.randn(1).item() | {x} * torch.rand({x}.shape[0], *[1] * ({x}.dim() - 1)).round() |
        {x} + torch.normal(torch.zeros_like({x}), 1.)
    """)
    return scope.assign(scope.choices.pick(forms).format(x=x.name), x)


@given_float(_plain)
def autograd(scope: Scope, x: Variable) -> bool:
    new, width = scope.new(x.shape), x.shape[-1]
    a, b, m = x.name, new.name, f"self.{scope.member()}"
    layer = (f"{m} = nn.Linear({width}, {width})",)
    forms: list[tuple[list[str], tuple[str, ...], tuple[str, ...]]] = [
        (["with torch.no_grad():", f"    {b} = {m}({a})"], layer, ()),
        (["with torch.no_grad():", f"    {b} = {a} * 2", f"{b} = {b} + {a}"], (), ()),
        ([f"{b} = {a}.detach() * {a}"], (), ()),
        ([f"{b} = Reversal.apply({a})"], (), (REVERSAL,)),
        ([f"{b} = Passed.apply({a}, 0.5)"], (), (PASSED,)),
        (["with torch.set_grad_enabled(False):", f"    {b} = {a} + 1"], (), ()),
        (["with torch.enable_grad():", f"    {b} = {m}({a})"], layer, ()),
        ([f"{b} = {a} + (torch.round({a}) - {a}).detach() * 0"], (), ()),
        (["with torch.autocast('cpu', dtype=torch.bfloat16):", f"    {b} = {m}({a})", f"{b} = {b}.float()"], layer, ()),
        (["with torch.autocast('cpu', enabled=False):", f"    {b} = {m}({a})"], layer, ()),
        ([f"{b} = torch.utils.checkpoint.checkpoint({m}, {a}, use_reentrant=False)"], layer, ()),
    ]
    lines, members, prelude = scope.choices.pick(forms)
    return scope.say(*lines, target=new, stands_for=x, members=members, prelude=prelude)


@given_float()
def number_type(scope: Scope, x: Variable) -> bool:
    if x.dtype == "double":
        form = scope.choices.pick(["{x}.float()", "{x}.to(torch.float32)", "{x}.type(torch.float32)"])
        return scope.assign(form.format(x=x.name), x, dtype="float")
    forms = listed("""
        {x}.double() | {x}.to(torch.float64) | {x}.half().float() | {x}.to({x}.dtype) | {x}.bfloat16().to({x}.dtype) |
        {x}.float() | {x}.type_as({x}) | {x}.to({x}) | ({x}.double() * 2).to({x}.dtype) | {x}.to('cpu') |
        {x} * {x}.new_ones(1)
    """)
    form = scope.choices.pick(forms)
    is_double = form in ("{x}.double()", "{x}.to(torch.float64)")
    return scope.assign(form.format(x=x.name), x, dtype="double" if is_double else "float")
