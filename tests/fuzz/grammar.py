"""The grammar: how often each feature is written, and how a whole program is put together."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tests.fuzz import behaviour, guards, layers, structure, views, writes
from tests.fuzz.choices import Choices
from tests.fuzz.program import BATCH, Argument, ModuleClass, Program, Variable
from tests.fuzz.scope import Names, Scope, Shape

Feature = Callable[[Scope], bool]

# What is no statement of its own, and can be left out too.
STYLES = ("odd_names",)

# By name, with a weight: a feature of weight 4 is written four times as often as one of weight 1.
FEATURES: dict[str, tuple[int, Feature]] = {
    "linear": (8, layers.linear), "convolution": (6, layers.convolution), "norm": (2, layers.norm),
    "activation": (4, layers.activation), "function": (6, layers.function), "binary": (4, layers.binary),
    "concat": (3, layers.concat), "reduce": (2, layers.reduce), "matmul": (2, layers.matmul),
    "own_weight": (2, layers.own_weight), "attention": (1, layers.attention), "recurrent": (1, layers.recurrent),
    "embedding": (2, layers.embedding), "pool": (2, layers.pool), "call_again": (2, layers.call_again),
    "share_weight": (1, layers.share_weight), "piece": (5, views.piece), "halves": (4, views.halves),
    "unbind": (2, views.unbind), "select": (2, views.select), "reshape": (4, views.reshape),
    "transpose": (3, views.transpose), "same_shape": (3, views.same_shape), "expand": (2, views.expand),
    "complex_view": (1, views.complex_view), "diagonal": (1, views.diagonal), "method": (8, writes.method),
    "operator": (4, writes.operator), "setitem": (5, writes.setitem), "through_view": (4, writes.through_view),
    "out_argument": (2, writes.out_argument), "inplace_module": (4, writes.inplace_module),
    "state": (4, behaviour.state), "branch": (4, behaviour.branch), "layer_branch": (2, behaviour.layer_branch),
    "guarded_layer": (3, guards.guarded_layer), "sentinel": (2, guards.sentinel), "knob": (2, guards.knob),
    "loop": (3, behaviour.loop), "hook": (4, behaviour.hook), "patched_forward": (1, behaviour.patched_forward),
    "random_numbers": (2, behaviour.random_numbers), "autograd": (3, behaviour.autograd),
    "number_type": (2, behaviour.number_type), "block": (6, structure.block), "container": (4, structure.container),
    "computed_weight": (1, structure.computed_weight), "optional_child": (2, structure.optional_child),
}  # fmt: skip

PAIR = "Pair = namedtuple('Pair', 'first second')\n"
BATCHED = """\
@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: torch.Tensor
"""
RESULT = """\
@dataclasses.dataclass
class Result:
    first: torch.Tensor
    second: torch.Tensor
"""
SHAPES: tuple[Shape, ...] = ((BATCH, 8), (BATCH, 4, 8), (BATCH, 2, 4, 4), (BATCH, 4, 4))


def generate(choices: Choices, *, without: Collection[str] = ()) -> Program:
    """A random program, without the named features."""
    table = [feature for feature, (weight, _) in FEATURES.items() if feature not in without for _ in range(weight)]
    names = Names(keeps_odd="odd_names" not in without)

    def write(scope: Scope, length: int) -> None:
        # Each program is about few features: faults come from combinations of a few, and small programs are fast.
        for _ in range(length):
            scope.feature = choices.pick(table)
            FEATURES[scope.feature][1](scope)

    def make_class(outer: Scope, shape: Shape) -> tuple[ModuleClass, Shape]:
        scope = Scope(choices, names, outer.depth + 1, [Variable("x", shape)], make_class=make_class)
        write(scope, choices.between(1, 4))
        result = scope.float(lambda v: v.dtype == "float" and v.shape[0] == BATCH) or scope.variables[0]
        names.num_classes += 1
        return ModuleClass(f"Block{names.num_classes}", "self, x", tuple(scope.statements), result.name), result.shape

    scope = Scope(choices, names, make_class=make_class)
    parameters, arguments = _signature(scope)
    write(scope, choices.between(1, 9))
    result, prelude = _result(scope)
    root = ModuleClass("Net", parameters, tuple(scope.statements), result)
    return Program(root, arguments, prelude)


def _random(shape: Shape) -> str:
    sizes = ", ".join("b" if n == BATCH else str(n) for n in shape)
    return f"torch.randn({sizes}, generator=g)"


def _signature(scope: Scope) -> tuple[str, tuple[Argument, ...]]:
    """The parameters of the model's own forward, and how a call gives them."""
    choices, shape = scope.choices, scope.choices.pick(SHAPES)
    x, other = Variable("x", shape), Variable("y", shape)
    scope.feature = "signature"
    scope.variables = [x]
    one, value = Argument("x", _random(shape)), _random(shape)
    match choices.pick(
        ["x", "x", "x", "x", "xy", "ids", "optional", "given", "gain", "dict", "tuple", "dataclass", "named"]
    ):
        case "xy":
            scope.variables = [x, other]
            return "self, x, y", (one, Argument("y", value, by_name=choices.chance(50)))
        case "ids":
            scope.variables = [x, Variable("ids", (BATCH, 4), "long")]
            return "self, x, ids", (one, Argument("ids", "torch.randint(0, 10, (b, 4), generator=g)"))
        case "optional":
            new = scope.new(shape)
            scope.say(f"{new.name} = x * 1 if y is None else x + y", target=new, stands_for=x)
            return "self, x, y=None", (one,)
        case "given":
            new = scope.new(shape)
            scope.say(f"{new.name} = x if y is None else x + y", target=new, stands_for=x)
            return "self, x, y=None", (one, Argument("y", value, by_name=True))
        case "gain":
            new = scope.new(shape)
            scope.say(f"{new.name} = x * gain if flag else x", target=new, stands_for=x)
            flag = choices.pick([(), (Argument("gain", "0.25 * b", by_name=True),)])
            return "self, x, *, gain=0.5, flag=True", (one, *flag)
        case "dict":
            new, extra = scope.new(shape), scope.new(shape)
            line = f"{new.name}, {extra.name} = batch['x'], batch.get('extra', 0)"
            scope.say(line, target=new, more=(extra,))
            scope.variables = [new, extra]
            return "self, batch", (Argument("batch", f"{{'x': {value}, 'extra': {value}}}"),)
        case "tuple":
            new, extra = scope.new(shape), scope.new(shape)
            scope.say(f"{new.name}, {extra.name} = pair", target=new, more=(extra,))
            scope.variables = [new, extra]
            return "self, pair", (Argument("pair", f"({value}, {value})"),)
        case "dataclass":
            new, extra = scope.new(shape), scope.new(shape)
            scope.say(f"{new.name}, {extra.name} = batch.x, batch.extra", target=new, more=(extra,))
            scope.variables = [new, extra]
            return "self, batch", (Argument("batch", f"Batch({value}, {value})", prelude=(BATCHED,)),)
        case "named":
            new, extra = scope.new(shape), scope.new(shape)
            scope.say(f"{new.name}, {extra.name} = pair.first, pair.second", target=new, more=(extra,))
            scope.variables = [new, extra]
            return "self, pair", (Argument("pair", f"Pair({value}, {value})", prelude=(PAIR,)),)
    return "self, x", (one,)


def _result(scope: Scope) -> tuple[str, tuple[str, ...]]:
    last = scope.variables[-1].name
    some = scope.choices.pick(scope.variables[-4:]).name
    match scope.choices.pick(["one", "one", "one", "tuple", "dict", "list", "named", "dataclass", "nested"]):
        case "tuple":
            return f"{last}, {some}", ()
        case "dict":
            return f"{{'out': {last}, 'aux': {some}}}", ()
        case "list":
            return f"[{last}, {some}]", ()
        case "named":
            return f"Pair({last}, {some})", (PAIR,)
        case "dataclass":
            return f"Result({last}, {some})", (RESULT,)
        case "nested":
            return f"{{'all': ({last}, [{some}, None, 3])}}", ()
    return last, ()
