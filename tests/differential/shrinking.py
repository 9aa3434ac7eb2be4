"""The smallest net that still shows a fault: without statements, with plain numbers and smaller sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.differential.net import Net
from tests.fuzz.program import ModuleClass
from tests.fuzz.shrink import smaller_classes, smallest


def smallest_net(net: Net, still_fails: Callable[[Net], bool], *, tries: int = 150) -> Net:
    return smallest(net, _smaller, still_fails, tries)


def _smaller(net: Net) -> Iterator[Net]:
    for root in smaller_classes(net.root):
        yield replace(net, root=root)
    for name, plain in (("data", ()), ("weights", ()), ("gain", 1.0), ("is_dynamic", False)):
        if getattr(net, name) != plain:
            yield replace(net, **{name: plain})  # type: ignore[arg-type]
    for key in [key for key, _ in net.config if key != "BACKEND" and not key.endswith("BIT")]:
        yield replace(net, config=tuple(item for item in net.config if item[0] != key))
    for place, size in enumerate(net.shape):
        for smaller in sorted({1, size // 2, size - 1} - {0, size}):
            yield replace(net, shape=(*net.shape[:place], smaller, *net.shape[place + 1 :]))
    yield from (replace(net, root=root) for root in _smaller_numbers(net.root))


def _smaller_numbers(root: ModuleClass) -> Iterator[ModuleClass]:
    """Each whole number in the definition of a layer, halved or 1."""
    for index, statement in enumerate(root.statements):
        for line, text in enumerate(statement.members):
            for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", text):
                for smaller in sorted({1, int(match[0]) // 2} - {0, int(match[0])}):
                    changed = f"{text[: match.start()]}{smaller}{text[match.end() :]}"
                    members = (*statement.members[:line], changed, *statement.members[line + 1 :])
                    statements = (
                        *root.statements[:index],
                        replace(statement, members=members),
                        *root.statements[index + 1 :],
                    )
                    yield replace(root, statements=statements)
