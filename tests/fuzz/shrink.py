"""The smallest program that still shows a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.program import ModuleClass, Program, Statement


def shrink(program: Program, still_fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """Leaves out statements, in all classes, as long as the fault stays."""
    return smallest(program, _smaller, still_fails, tries)


def smallest(one: Any, smaller: Callable[[Any], Iterator[Any]], still_fails: Callable[[Any], bool], tries: int) -> Any:
    """Takes the first of the smaller ones that still fails, again and again, in so many tries."""
    changed = True
    while changed and tries > 0:
        changed = False
        for other in smaller(one):
            tries -= 1
            if tries <= 0:
                break
            if still_fails(other):
                one, changed = other, True
                break
    return one


def _smaller(program: Program) -> Iterator[Program]:
    for root in smaller_classes(program.root):
        yield replace(program, root=root)


def smaller_classes(module_class: ModuleClass) -> Iterator[ModuleClass]:
    statements = module_class.statements
    if "," in module_class.result or "{" in module_class.result:  # one output instead of several
        for name in dict.fromkeys(s.target for s in reversed(statements) if s.target):
            yield replace(module_class, result=name)
    for index in reversed(range(len(statements))):
        yield module_class.without(index)
        for line in range(len(statements[index].lines)):
            shorter = _without_line(statements[index], line)
            yield replace(module_class, statements=(*statements[:index], shorter, *statements[index + 1 :]))
        for line in range(len(statements[index].members)):
            members = statements[index].members
            shorter = replace(statements[index], members=(*members[:line], *members[line + 1 :]))
            yield replace(module_class, statements=(*statements[:index], shorter, *statements[index + 1 :]))
        for number, inner in enumerate(statements[index].classes):
            classes = statements[index].classes
            for smaller in smaller_classes(inner):
                shorter = replace(statements[index], classes=(*classes[:number], smaller, *classes[number + 1 :]))
                yield replace(module_class, statements=(*statements[:index], shorter, *statements[index + 1 :]))


def _without_line(statement: Statement, line: int) -> Statement:
    return replace(statement, lines=(*statement.lines[:line], *statement.lines[line + 1 :]))
