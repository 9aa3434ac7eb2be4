"""Modules in modules: blocks of their own classes, containers and loops over them, computed weights."""

from __future__ import annotations

from tests.fuzz.program import Variable
from tests.fuzz.scope import Scope, batch_first, given_float
from tests.parameters import listed

DOUBLE = """\
class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2
"""


def _plain(v: Variable) -> bool:
    return batch_first(v) and len(v.shape) >= 2 and v.dtype == "float"


def block(scope: Scope) -> bool:
    """A child module with a random forward of its own."""
    x = scope.float(_plain)
    if x is None or scope.make_class is None or scope.depth >= 2:
        return False
    module_class, out = scope.make_class(scope, x.shape)
    name = f"self.{scope.member()}"
    new = scope.new(out)
    if out == x.shape and scope.choices.chance(20):
        lines = [f"{new.name} = {name}({name}({x.name}))"]
    elif out == x.shape and scope.choices.chance(20):
        lines = [f"{new.name} = {x.name} + {name}({x.name})"]
    else:
        lines = [f"{new.name} = {name}({x.name})"]
    scope.layers.append((name, x.shape, out))
    return scope.say(
        *lines, target=new, stands_for=x, members=(f"{name} = {module_class.name}()",), classes=(module_class,)
    )


@given_float(_plain)
def container(scope: Scope, x: Variable) -> bool:
    m, other, new, n = f"self.{scope.member()}", f"self.{scope.member()}", scope.new(x.shape), x.shape[-1]
    a, b = x.name, new.name
    layers = f"{m} = nn.ModuleList([nn.Linear({n}, {n}), nn.Linear({n}, {n})])"
    acts = f"{other} = nn.ModuleList([nn.ReLU(), nn.Tanh()])"
    sequence = f"{m} = nn.Sequential(nn.Linear({n}, {n}), nn.ReLU(inplace=True), nn.Linear({n}, {n}))"
    named = f"{m} = nn.ModuleDict({{'one': nn.Linear({n}, {n}), 'two': nn.GELU()}})"
    forms = [
        ([sequence], [f"{b} = {m}({a})"]),
        ([layers], [f"{b} = {a}", f"for layer in {m}:", f"    {b} = layer({b})"]),
        ([layers], [f"{b} = {a}", f"for i, layer in enumerate({m}):", f"    {b} = layer({b}) + i * {a}"]),
        ([layers, acts], [f"{b} = {a}", f"for f, g in zip({m}, {other}):", f"    {b} = g(f({b}))"]),
        ([layers], [f"{b} = {a}", f"for layer in reversed({m}):", f"    {b} = {b} + layer({b})"]),
        ([layers], [f"{b} = {m}[0]({a}) + {m}[-1]({a})"]),
        ([layers], [f"{b} = sum(layer({a}) for layer in {m})"]),
        ([named], [f"{b} = {a}", f"for name, layer in {m}.items():", f"    {b} = layer({b})"]),
        ([named], [f"{b} = {m}['two']({m}['one']({a}))"]),
        ([sequence], [f"{b} = {m}[0]({a})", f"{b} = {m}[2]({b}.relu_())"]),
        ([sequence], [f"{b} = {a}", f"for layer in {m}[:2]:", f"    {b} = layer({b})"]),
        ([f"{m} = [nn.Linear({n}, {n})]"], [f"{b} = {m}[0]({a})"]),
        ([f"{m} = nn.Linear({n}, {n})"], [f"{b} = getattr(self, '{m[5:]}')({a})"]),
        ([f"{m} = nn.Linear({n}, {n})", f"{other} = [torch.relu, {m}]"], [f"{b} = {other}[1]({other}[0]({a}))"]),
        ([f"{m} = torch.tanh"], [f"{b} = {m}({a})"]),
        ([f"{m} = lambda t: t * 2"], [f"{b} = {m}({a})"]),
        ([f"{m} = nn.Linear({n}, {n})"], [f"{b} = {m}.forward({a})"]),
        ([f"{m} = nn.Linear({n}, {n})"], [f"{b} = nn.Sequential({m}, nn.ReLU())({a})"]),
        ([f"{m} = nn.Linear({n}, {n})"], [f"{b} = self._modules['{m[5:]}']({a})"]),
        ([f"{m} = nn.Sequential(nn.Identity(), nn.ReLU())"], [f"{b} = {m}({a})", f"{b} += 1"]),
        ([f"{m} = nn.Identity()"], [f"{b} = {m}({a})", f"{b}.mul_(2)"]),
        ([f"{m} = nn.Flatten(1)"], [f"{b} = {m}({a})", f"{b}.mul_(2)", f"{b} = {b}.view({a}.shape)"]),
    ]
    members, lines = scope.choices.pick(forms)
    return scope.say(*lines, target=new, stands_for=x, members=tuple(members))


@given_float(_plain)
def computed_weight(scope: Scope, x: Variable) -> bool:
    afters = [
        "parametrize.register_parametrization({m}, 'weight', Doubled())",
        "parametrize.register_parametrization({m}, 'bias', Doubled())",
        "prune.l1_unstructured({m}, 'weight', 0.3)",
        "parametrizations.weight_norm({m})",
        "parametrizations.spectral_norm({m})",
        "nn.utils.spectral_norm({m})",
        "nn.utils.weight_norm({m})",
    ]
    after = scope.choices.pick(afters)
    return scope.layer(f"nn.Linear({x.shape[-1]}, {x.shape[-1]})", x, x.shape, after, prelude=(DOUBLE,))


@given_float(_plain)
def optional_child(scope: Scope, x: Variable) -> bool:
    """A child with optional arguments, called with and without them."""
    scope.names.num_classes += 1
    kind, n = f"Optional{scope.names.num_classes}", x.shape[-1]
    text = "\n".join(
        [
            f"class {kind}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.fc = nn.Linear({n}, {n})",
            "    def forward(self, x, extra=None, gain=1.0, flag=False):",
            "        y = self.fc(x) * gain",
            "        if extra is not None:",
            "            y = y + extra",
            "        return -y if flag else y",
            "",
        ]
    )
    calls = listed("""
        {m}({x}) | {m}({x}, {x}) | {m}({x}, extra={x}, gain=0.5) | {m}({x}, flag=True) | {m}({x}) + {m}({x}, {x} * 2) |
        {m}({x}, None, 2.0) - {m}({x}, flag=True)
    """)
    return scope.layer(f"{kind}()", x, x.shape, call=scope.choices.pick(calls), prelude=(text,))
