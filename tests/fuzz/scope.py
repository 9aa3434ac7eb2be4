"""One forward while it is written: the variables so far, the statements so far, and what features ask of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.choices import Choices
from tests.fuzz.program import BATCH, ModuleClass, Statement, Variable
from tests.parameters import listed

Shape = tuple[int, ...]

# Names of children that other code might want for itself.
ODD_NAMES = listed("""
    source | graph | meta | code | self | forward_ | op | model | graph_module | constants | inputs | module | root |
    name | target | args | weight | input_quantizer | weight_quantizer | quantizer | org_module | original | layer |
    _graph | func | node | output | x | owner_module
""")


@dataclass
class Names:
    """Names that are free, over the whole program."""

    num_variables: int = 0
    num_members: int = 0
    num_classes: int = 0
    keeps_odd: bool = True  # whether members may have one of the ODD_NAMES


@dataclass
class Scope:
    choices: Choices
    names: Names
    depth: int = 0
    variables: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    layers: list[tuple[str, Shape, Shape]] = field(default_factory=list)  # that may be called again: in, out
    odd_names: list[str] = field(default_factory=lambda: list(ODD_NAMES))
    feature: str = ""  # that is writing now
    # Gives a class for a child module that takes and gives these shapes.
    make_class: Callable[[Scope, Shape], tuple[ModuleClass, Shape]] | None = None

    def find(self, accept: Callable[[Variable], bool] = lambda v: True) -> Variable | None:
        """A variable that fits; mostly one of the latest."""
        fitting = [v for v in self.variables if accept(v)]
        if not fitting:
            return None
        return self.choices.pick(fitting[-2:] if self.choices.chance(70) else fitting)

    def float(self, accept: Callable[[Variable], bool] = lambda v: True) -> Variable | None:
        return self.find(lambda v: v.is_float and accept(v))

    def like(self, other: Variable) -> Variable | None:
        """Another variable of the same shape and dtype, if there is one."""
        same = [v for v in self.variables if (v.shape, v.dtype) == (other.shape, other.dtype)]
        others = [v for v in same if v.name != other.name]
        return self.choices.pick(others or same) if same else None

    def new(self, shape: Shape, **properties: object) -> Variable:
        self.names.num_variables += 1
        return Variable(f"v{self.names.num_variables}", shape, **properties)  # type: ignore[arg-type]

    def member(self) -> str:
        """The name of a new attribute of self: mostly a plain one."""
        if self.odd_names and self.names.keeps_odd and self.choices.chance(15):
            return self.odd_names.pop(self.choices.below(len(self.odd_names)))
        self.names.num_members += 1
        return f"m{self.names.num_members}"

    def say(
        self,
        *lines: str,
        target: Variable | None = None,
        stands_for: Variable | None = None,
        more: tuple[Variable, ...] = (),
        members: tuple[str, ...] = (),
        prelude: tuple[str, ...] = (),
        classes: tuple[ModuleClass, ...] = (),
    ) -> bool:
        """Write a statement that defines `target` (and `more`). A reader of `target` may read `stands_for` instead."""
        same = stands_for if stands_for is not None and target is not None else None
        self.statements.append(
            Statement(
                self.feature, lines, target.name if target else "", same.name if same else "", members, prelude, classes
            )
        )
        self.variables += [v for v in (target, *more) if v is not None and v not in self.variables]
        return True

    def assign(self, expression: str, of: Variable, shape: Shape | None = None, **properties: object) -> bool:
        """`new = expression`, where `expression` is about `of`."""
        given = {"dtype": of.dtype, **properties}
        new = self.new(of.shape if shape is None else shape, **given)
        return self.say(f"{new.name} = {expression}", target=new, stands_for=of)

    def layer(self, init: str, of: Variable, out: Shape, *after: str, call: str = "{m}({x})", **more: object) -> bool:
        """Make a member with `init`, say the lines `after` about it (`{m}`), and call it on `of`."""
        name = f"self.{self.member()}"
        new = self.new(out, dtype=of.dtype)
        members = (f"{name} = {init}", *(line.format(m=name) for line in after))
        if call == "{m}({x})":
            self.layers.append((name, of.shape, out))
        return self.say(
            f"{new.name} = {call.format(m=name, x=of.name)}",
            target=new,
            stands_for=of,
            members=members,
            **more,  # type: ignore[arg-type]
        )


def given_float(accept: Callable[[Variable], bool] = lambda v: True) -> Callable[..., Callable[[Scope], bool]]:
    """For a feature that needs a floating-point variable; without one it writes nothing."""

    def feature_of(write: Callable[[Scope, Variable], bool]) -> Callable[[Scope], bool]:
        def feature(scope: Scope) -> bool:
            x = scope.float(accept)
            return x is not None and write(scope, x)

        return feature

    return feature_of


def batch_first(v: Variable) -> bool:
    return v.shape[0] == BATCH and BATCH not in v.shape[1:]


def has_rank(*ranks: int) -> Callable[[Variable], bool]:
    return lambda v: len(v.shape) in ranks and batch_first(v)
