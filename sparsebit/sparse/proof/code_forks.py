"""Branches of Python functions: which ones a run takes, and runs that are forced to take another one.

A function is compiled again from its source with every condition wrapped in a call (`if test:` becomes
`if __sparsebit_fork__(function, number, test):`), and its `__code__` is replaced while a context is open. Conditions on
shapes, modes, types, arguments and values all become the same thing: a number, and a truth value that can be forced.
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
ENTRY = -1  # the number that a function's frame is observed with at its beginning, where its arguments have values
Observe = Callable[[int, int, FrameType], None]
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_NUMBERS = itertools.count()


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
    `for`) that is observed and cannot be forced.
    """

    text: str
    line: int
    arms: tuple[tuple[ast.AST, ...], tuple[ast.AST, ...]]
    is_loop: bool = False
    is_block: bool = False


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
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or definition.name != code.co_name:
        return None
    definition.decorator_list.clear()
    return definition


def _compiled(definition: ast.FunctionDef | ast.AsyncFunctionDef, original: CodeType) -> CodeType | None:
    """The code of a definition, compiled inside its class (private names, `super()`) and a scope of its free names."""
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
    loops = {(one.number, place) for one in listed for place, fork in enumerate(one.forks) if fork.is_loop}

    def ask(function: int, fork: int, test: Any) -> Any:
        if fork == ENTRY:
            if observe is not None:
                observe(function, fork, sys._getframe(1))
            return test
        value = is_true = bool(test)
        if (function, fork) in wanted and not ((function, fork) in loops and Arm(function, fork, True) in taken):
            value = wanted[function, fork]
        arm = Arm(function, fork, value)
        taken.add(arm)
        if observe is not None:
            observe(function, fork, sys._getframe(1))
        return test if value == is_true else value  # `a or b` is the value of one of them

    try:
        for one in listed:
            one.function.__code__ = one.code
            one.function.__globals__[FORK] = ask
        yield taken
    finally:
        for one in listed:
            one.function.__code__ = one.original
            one.function.__globals__.pop(FORK, None)
