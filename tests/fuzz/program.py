"""A random program as a value: classes, statements, inputs; its source text; the model that the text makes."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn

BATCH = -1  # stands for the batch size in a shape
HEADER = """\
import copy, dataclasses, functools, math, random, types
from collections import namedtuple
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

LOG = []  # what hooks saw
"""


@dataclass(frozen=True)
class Variable:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float"
    is_overlapping: bool = False  # expanded: several elements share memory, so nothing may be written into it
    is_contiguous: bool = True

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float", "double")


@dataclass(frozen=True)
class Statement:
    """Lines of a forward, with what they need: lines of `__init__`, module-level text, other classes.

    `target` is the variable that the statement is about, and `stands_for` the one that could be read in its place if
    the statement were left out.
    """

    feature: str
    lines: tuple[str, ...]
    target: str = ""
    stands_for: str = ""
    members: tuple[str, ...] = ()
    prelude: tuple[str, ...] = ()
    classes: tuple[ModuleClass, ...] = ()

    def renamed(self, old: str, new: str) -> Statement:
        pattern = re.compile(rf"\b{old}\b")
        lines = tuple(pattern.sub(new, line) for line in self.lines)
        return replace(self, lines=lines, stands_for=new if self.stands_for == old else self.stands_for)


@dataclass(frozen=True)
class ModuleClass:
    name: str
    parameters: str
    statements: tuple[Statement, ...]
    result: str
    attributes: tuple[str, ...] = ()  # lines of the class body

    def source(self) -> str:
        members = list(dict.fromkeys(line for statement in self.statements for line in statement.members))
        lines = [f"class {self.name}(nn.Module):"]
        lines += [f"    {line}" for line in self.attributes]
        if members:
            lines += ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in members)]
        lines += [f"    def forward({self.parameters}):"]
        lines += [f"        {line}" for statement in self.statements for line in statement.lines]
        return "\n".join([*lines, f"        return {self.result}"])

    def inner(self) -> Iterator[ModuleClass]:
        for statement in self.statements:
            for other in statement.classes:
                yield from other.inner()
                yield other

    def without(self, index: int) -> ModuleClass:
        """Without one statement; what it defined is read from what it was made of."""
        gone, kept = self.statements[index], list(self.statements)
        del kept[index]
        if not gone.target or not gone.stands_for:
            return replace(self, statements=tuple(kept))
        later = [s.renamed(gone.target, gone.stands_for) for s in kept[index:]]
        result = re.sub(rf"\b{gone.target}\b", gone.stands_for, self.result)
        return replace(self, statements=(*kept[:index], *later), result=result)


@dataclass(frozen=True)
class Argument:
    """One argument of `forward`: how a call gives it, as text that may use the batch size `b` and the generator `g`."""

    name: str
    value: str
    by_name: bool = False
    prelude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    root: ModuleClass
    arguments: tuple[Argument, ...]
    prelude: tuple[str, ...] = ()

    @property
    def features(self) -> set[str]:
        classes = [*self.root.inner(), self.root]
        return {statement.feature for module_class in classes for statement in module_class.statements}

    def source(self) -> str:
        classes = list({one.name: one for one in (*self.root.inner(), self.root)}.values())
        pieces = [text for one in classes for statement in one.statements for text in statement.prelude]
        pieces += [text for argument in self.arguments for text in argument.prelude]
        positional = "".join(f"{a.value}, " for a in self.arguments if not a.by_name)
        named = ", ".join(f"{a.name!r}: {a.value}" for a in self.arguments if a.by_name)
        inputs = [
            "def make():",
            "    torch.default_generator.manual_seed(0)",
            f"    model = {self.root.name}().eval()",
            "    for name, buffer in model.named_buffers():",
            "        if name.endswith('running_mean'):",
            "            buffer.normal_()",
            "    for parameter in model.parameters():  # no two alike",
            "        parameter.data.add_(0.02 * torch.randn_like(parameter))",
            "    return model",
            "",
            "def inputs(call):  # (args, kwargs) of the call with this number; two kinds of batches take turns",
            "    g, b = torch.Generator().manual_seed(call % 2), 2 + call % 2",
            f"    return ({positional}), {{{named}}}",
        ]
        text = [HEADER, *dict.fromkeys((*self.prelude, *pieces)), *(one.source() for one in classes)]
        return "\n".join([*text, "\n".join(inputs), ""])

    def shape_of_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call as `example_inputs` take it: every argument by name."""
        positional = [argument.name for argument in self.arguments if not argument.by_name]
        return {**dict(zip(positional, args, strict=True)), **kwargs}


class Compiled:
    """The namespace of a program's text. Its lines are known to `linecache`, as tracing reads them for its reports."""

    _count = 0

    def __init__(self, program: Program) -> None:
        Compiled._count += 1
        self.program, self.text = program, program.source()
        self.file = f"<fuzz {Compiled._count % 50}>"
        linecache.cache[self.file] = (len(self.text), None, self.text.splitlines(keepends=True), self.file)
        self.names: dict[str, Any] = {"__name__": "fuzzed"}
        exec(compile(self.text, self.file, "exec"), self.names)
        self._space = SimpleNamespace(**self.names)

    def make(self) -> nn.Module:
        model: nn.Module = self._space.make()
        return model

    def inputs(self, call: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._space.inputs(call)
        return args, kwargs

    @property
    def log(self) -> list[Any]:
        """What the program's hooks recorded."""
        log: list[Any] = self._space.LOG
        return log
