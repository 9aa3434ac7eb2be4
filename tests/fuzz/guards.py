"""Code that an example shows in part: layers behind guards, numbers that only a mask has, plain attributes."""

from __future__ import annotations

from tests.fuzz.program import Variable
from tests.fuzz.scope import Scope, batch_first, given_float

KNOB = "knob"  # the names of plain attributes that a user may change after the copy was built


def _plain(v: Variable) -> bool:
    return batch_first(v) and len(v.shape) >= 2 and v.dtype == "float"


@given_float(_plain)
def guarded_layer(scope: Scope, x: Variable) -> bool:
    """Two layers, of which a call takes one: by the batch size (2 and 3 take turns), a number, a list or the mode."""
    m, new, width = f"self.{scope.member()}", scope.new(x.shape), x.shape[-1]
    a, b, init = x.name, new.name, f"nn.Linear({width}, {width})"
    layers = f"{m} = nn.ModuleList([{init}, {init}, {init}])"
    forms = [
        [f"{b} = {m}[0]({a}) if {a}.shape[0] == 2 else {m}[1]({a})"],
        [f"{b} = {m}[{a}.shape[0] % 2]({a})"],
        [f"{b} = {m}[0]({a})", f"if {a}.shape[0] > 2:", f"    {b} = {b} + {m}[1]({a})"],
        [f"{b} = {m}[0]({a})", "if self.training:", f"    {b} = {b} - {m}[1]({a})"],
        [f"{b} = {a}", f"for layer, _ in zip({m}, {a}):", f"    {b} = layer({b})"],
        [f"{b} = {m}[-1]({a}) if len({a}) == 3 else {a} * 1"],
    ]
    return scope.say(*scope.choices.pick(forms), target=new, stands_for=x, members=(layers,))


@given_float(_plain)
def sentinel(scope: Scope, x: Variable) -> bool:
    """Masks whose numbers stand for minus infinity, and the softmax that removes them."""
    new, a, width = scope.new(x.shape), x.name, x.shape[-1]
    least, mask = f"torch.finfo({a}.dtype).min", f"(torch.arange({width}) > 1)"
    forms = [
        f"{a}.masked_fill({mask}, {least})",
        f"{a}.masked_fill({mask}, -torch.finfo({a}.dtype).max)",
        f"torch.where({mask}, torch.full([], {least}), {a})",
        f"{a} + {mask} * {least}",
        f"{a} + torch.zeros({width}).masked_fill({mask}, {least})",
        f"({a} + (1.0 - (~{mask}).float()) * {least}).clamp(min={least})",
    ]
    line = f"{new.name} = torch.softmax({scope.choices.pick(forms)}, -1)"
    return scope.say(line, target=new, stands_for=x)


@given_float(_plain)
def knob(scope: Scope, x: Variable) -> bool:
    """A plain attribute that forward reads."""
    scope.names.num_members += 1
    m, new, a = f"self.{KNOB}{scope.names.num_members}", scope.new(x.shape), x.name
    form = scope.choices.pick([f"{a} * {m}", f"{a} + {m}", f"({a} / {m}).tanh()", f"{a} * 2 if {m} > 2 else {a} - 1"])
    return scope.say(f"{new.name} = {form}", target=new, stands_for=x, members=(f"{m} = 1.5",))
