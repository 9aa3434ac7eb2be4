"""Branches of Python functions: which ones a run takes, and runs that are forced to take another one.

A function is compiled again from its source with every condition wrapped in a call (`if test:` becomes
`if __sparsebit_fork__(function, number, test):`), and its `__code__` is replaced while a context is open. Conditions on
shapes, modes, types, arguments and values all become the same thing: a number, and a truth value that can be forced.
A choice among values (`[a, b][i]`, `min(a, b)`) is one condition for each of them: whether it is the one chosen.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

FORK = "__sparsebit_fork__"
ENTRY = -1  # the number of the observation at a function's start, when its arguments have values
Observe = Callable[[int, int, FrameType], None]
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_NUMBERS = itertools.count()
_MISSING = object()


@dataclass(frozen=True)
class Arm:
    """One way that a fork can go: the function, the fork in it, and the truth value."""

    function: int
    fork: int
    value: bool


@dataclass(frozen=True)
class Fork:
    """A condition in a function. `arms`: the code that runs where it is false, and where it is true.

    `is_loop`: forced to hold, it holds once. `is_block`: not a condition but a block (`case`, `except`, the body of a
    `for`) that is observed and cannot be forced. `num_options`: the number of values in a choice, where the condition
    is that this value is chosen.
    """

    text: str
    line: int
    arms: tuple[tuple[ast.AST, ...], tuple[ast.AST, ...]]
    is_loop: bool = False
    is_block: bool = False
    num_options: int = 0


@dataclass(frozen=True)
class ForkedFunction:
    """A function, and its code with a call at every fork. `tree`: its definition."""

    number: int
    function: FunctionType
    original: CodeType
    code: CodeType
    forks: tuple[Fork, ...]
    tree: ast.AST

    def arms(self) -> Iterator[Arm]:
        for number, fork in enumerate(self.forks):
            yield from (Arm(self.number, number, value) for value in ((True,) if fork.is_block else (True, False)))


def forked(function: FunctionType) -> ForkedFunction | None:
    """The function with its forks; None where its source cannot be read or does not compile to the same variables."""
    original, definition = function.__code__, definition_of(function)
    if definition is None:
        return None
    ast.increment_lineno(definition, original.co_firstlineno - 1)
    number, rewriter = next(_NUMBERS), _Rewriter()
    rewriter.rewrite(definition, number)
    code = _compiled(definition, original)
    if code is None or code.co_freevars != original.co_freevars:
        return None
    return ForkedFunction(number, function, original, code, tuple(rewriter.forks), definition)


def definition_of(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The source of a function without its decorators; None where it cannot be read."""
    code = function.__code__
    # Without what it wraps. `inspect` would look through all modules for the source of the code alone.
    plain = FunctionType(code, function.__globals__, closure=function.__closure__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or definition.name != code.co_name:
        return None
    definition.decorator_list.clear()
    return definition


def _compiled(definition: ast.FunctionDef | ast.AsyncFunctionDef, original: CodeType) -> CodeType | None:
    """The code of a definition, compiled inside its class (private names, `super()`) and a scope of its free names."""
    # `super()` and private names (`self.__x`) compile correctly only inside a class of the same name, and free
    # variables only inside a function that has them.
    owner = original.co_qualname.split(".")[-2:-1]
    inner: ast.stmt = definition
    path = [definition.name]
    if owner and owner[0].isidentifier():
        inner = ast.ClassDef(owner[0], [], [], [definition], [])
        path.insert(0, owner[0])
    free = [name for name in original.co_freevars if name != "__class__" or len(path) == 1]
    outer = ast.parse(f"def outer({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [inner]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = original.co_flags & __future__.annotations.compiler_flag
    try:
        code: CodeType = compile(module, original.co_filename, "exec", flags, dont_inherit=True)
        for name in ("outer", *path):
            code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
    except (SyntaxError, ValueError, StopIteration):
        return None
    return code.replace(co_qualname=original.co_qualname)


class _Rewriter(ast.NodeTransformer):
    """Wraps conditions and lists them. A block that no condition guards begins with a call of its own."""

    def rewrite(self, definition: ast.FunctionDef | ast.AsyncFunctionDef, number: int) -> None:
        self.number = number
        self.forks: list[Fork] = []
        # The statements that follow each one in its block: they are the other arm of an `if` that returns.
        self.behind: dict[int, tuple[ast.AST, ...]] = {}
        for node in ast.walk(definition):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    self.behind |= {id(one): tuple(block[place + 1 :]) for place, one in enumerate(block)}
        self.displays = _displays(definition)
        self.generic_visit(definition)
        if self.forks:
            entry: list[ast.expr] = [ast.Constant(number), ast.Constant(ENTRY), ast.Constant(True)]
            first = ast.Expr(ast.Call(ast.Name(FORK, ast.Load()), entry, []))
            definition.body.insert(0, ast.copy_location(first, definition.body[0]))

    def _call(self, fork: Fork, test: ast.expr) -> ast.Call:
        numbers = [ast.Constant(self.number), ast.Constant(len(self.forks))]
        self.forks.append(fork)
        return ast.copy_location(ast.Call(ast.Name(FORK, ast.Load()), [*numbers, test], []), test)

    def _condition(self, node: Any, false: tuple[ast.AST, ...], true: tuple[ast.AST, ...], is_loop: bool) -> Any:
        call = self._call(Fork(ast.unparse(node.test), node.lineno, (false, true), is_loop), node.test)
        self.generic_visit(node)
        call.args[2] = node.test
        node.test = call
        return node

    def visit_If(self, node: ast.If) -> Any:
        leaves = isinstance(node.body[-1], _EXITS)
        false = tuple(node.orelse) or (self.behind.get(id(node), ()) if leaves else ())
        return self._condition(node, false, tuple(node.body), is_loop=False)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._condition(node, (node.orelse,), (node.body,), is_loop=False)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """`a or b`: as a value, `b` is code that runs where `a` is false."""
        is_and = isinstance(node.op, ast.And)
        for place, operand in enumerate(node.values[:-1]):
            rest = tuple(node.values[place + 1 :])
            arms = ((), rest) if is_and else (rest, ())
            node.values[place] = self._call(Fork(ast.unparse(operand), operand.lineno, arms), operand)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """`[a, b][i]`, `{"x": a}[name]`, and `both[i]` after `both = [a, b]`."""
        name = node.value.id if isinstance(node.value, ast.Name) else None
        options = _options(node.value if name is None else self.displays.get(name))
        is_choice = isinstance(node.ctx, ast.Load) and not isinstance(node.slice, (ast.Constant, ast.Slice, ast.Tuple))
        if not options or not is_choice:
            return self.generic_visit(node)
        return self._choice(node, options, node.value, ast.keyword("index", node.slice))

    def visit_Call(self, node: ast.Call) -> Any:
        """`min(a, b)` and `max(a, b)`."""
        is_choice = isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and not node.keywords
        given = ast.Tuple(node.args, ast.Load())
        options = _options(given) if is_choice else ()
        if not options:
            return self.generic_visit(node)
        return self._choice(node, options, given, ast.keyword("by", node.func))

    def _choice(self, node: Any, options: tuple[ast.expr, ...], values: ast.expr, how: ast.keyword) -> ast.Call:
        numbers: list[ast.expr] = [ast.Constant(self.number), ast.Constant(len(self.forks))]
        for one in options:
            text = f"{ast.unparse(node)} is {ast.unparse(one)}"
            self.forks.append(Fork(text, node.lineno, ((), (one,)), num_options=len(options)))
        call = ast.Call(ast.Name(FORK, ast.Load()), [*numbers, values], [how])
        self.generic_visit(values)
        self.generic_visit(how)
        return ast.copy_location(call, node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        """A function that may be defined and never called."""
        text = f"lambda: {ast.unparse(node.body)}"
        note = self._call(Fork(text, node.lineno, ((), (node.body,)), is_block=True), ast.Constant(True))
        self.generic_visit(node)
        chosen = ast.Subscript(ast.Tuple([note, node.body], ast.Load()), ast.Constant(1), ast.Load())
        node.body = ast.copy_location(chosen, node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._block(node, f"def {node.name}")

    def visit_While(self, node: ast.While) -> Any:
        return self._condition(node, tuple(node.orelse), tuple(node.body), is_loop=True)

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.ifs = [self._call(Fork(ast.unparse(test), test.lineno, ((), ())), test) for test in node.ifs]
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> Any:
        return self._block(node, f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        return self._block(node, f"except {ast.unparse(node.type)}" if node.type else "except")

    def visit_match_case(self, node: ast.match_case) -> Any:
        return self._block(node, f"case {ast.unparse(node.pattern)}")

    def _block(self, node: Any, text: str) -> Any:
        first = node.body[0]
        note = self._call(Fork(text, first.lineno, ((), tuple(node.body)), is_block=True), ast.Constant(True))
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(note), first))
        return node


def _options(node: ast.AST | None) -> tuple[ast.expr, ...]:
    """The values of a list, tuple or dictionary that is written out; none for fewer than two, or with `*` in it."""
    if isinstance(node, ast.Dict):
        values = node.values if None not in node.keys else []
    else:
        values = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    return () if len(values) < 2 or any(isinstance(one, ast.Starred) for one in values) else tuple(values)


def _displays(definition: ast.AST) -> dict[str, ast.expr]:
    """The lists, tuples and dictionaries that variables hold which are assigned once."""
    nodes = list(ast.walk(definition))
    stores = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if stores.count(name) == 1 and _options(node.value):
                found[name] = node.value
    return found


def _chosen(values: Any, index: Any, by: Any) -> tuple[Any, int | None]:
    """The value that is chosen, and its place among all; no place where it is not one of the values."""
    if by is min or by is max:
        place = by(range(len(values)), key=values.__getitem__)
        return values[place], place
    if index is _MISSING:  # the user's own `min`
        return by(*values), None
    value = values[index]
    if isinstance(values, dict):
        return value, list(values).index(index)
    is_place = isinstance(values, (list, tuple)) and hasattr(index, "__index__")
    return value, index.__index__() % len(values) if is_place else None


@contextlib.contextmanager
def forks_run(
    functions: Iterable[ForkedFunction],
    forced: Iterable[Arm] = (),
    observe: Observe | None = None,
) -> Iterator[set[Arm]]:
    """While it is open, the functions take the forced arms; yields the set of arms that were taken.

    `observe`: called at every fork with the numbers of the function and the fork, and the frame of the function.
    """
    wanted = {(arm.function, arm.fork): arm.value for arm in forced}
    taken: set[Arm] = set()
    listed = list(functions)
    num_options = {(one.number, place): fork.num_options for one in listed for place, fork in enumerate(one.forks)}
    loops = {(one.number, place) for one in listed for place, fork in enumerate(one.forks) if fork.is_loop}

    def choose(function: int, first: int, values: Any, frame: FrameType, index: Any, by: Any) -> Any:
        value, chosen = _chosen(values, index, by)
        if chosen is None or len(values) != num_options[function, first]:
            return value
        places = [place for place in range(len(values)) if ask(function, first + place, place == chosen, frame=frame)]
        forced = [place for place in places if place != chosen]
        return list(values.values() if isinstance(values, dict) else values)[forced[0]] if forced else value

    def ask(
        function: int, fork: int, test: Any, index: Any = _MISSING, by: Any = None, frame: FrameType | None = None
    ) -> Any:
        frame = frame or sys._getframe(1)
        if index is not _MISSING or by is not None:
            return choose(function, fork, test, frame, index, by)
        if fork == ENTRY:
            if observe is not None:
                observe(function, fork, frame)
            return test
        value = is_true = bool(test)
        if (function, fork) in wanted and not ((function, fork) in loops and Arm(function, fork, True) in taken):
            value = wanted[function, fork]
        arm = Arm(function, fork, value)
        taken.add(arm)
        if observe is not None:
            observe(function, fork, frame)
        return test if value == is_true else value  # unforced, `a or b` must return the operand itself, not its truth

    try:
        for one in listed:
            one.function.__code__ = one.code
            one.function.__globals__[FORK] = ask
        yield taken
    finally:
        for one in listed:
            one.function.__code__ = one.original
            one.function.__globals__.pop(FORK, None)
