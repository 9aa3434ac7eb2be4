"""Fills the sections of a page between `<!-- begin: NAME -->` and `<!-- end: NAME -->` with what a script gives."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SECTION = re.compile(r"(<!-- begin: (?P<name>[\w ]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


def filled(page: str, sections: dict[str, str]) -> str:
    """`page` with every marked section replaced; markers and sections must be the same set."""
    marked = [match["name"] for match in SECTION.finditer(page)]
    if sorted(marked) != sorted(sections):
        raise SystemExit(f"the page marks {sorted(marked)}, but there is text for {sorted(sections)}")
    return SECTION.sub(lambda match: f"{match[1]}\n{sections[match['name']].strip()}\n\n{match[3]}", page)


def update(file: Path, sections: dict[str, str], *, check: bool) -> int:
    """Write `file` anew, or with `check` only say whether that would change it; gives the exit code."""
    before = file.read_text(encoding="utf-8")
    after = filled(before, sections)
    if check and before != after:
        sys.stderr.write(f"{file} is out of step: run python scripts/{Path(sys.argv[0]).name}\n")
        return 1
    if before != after:
        file.write_text(after, encoding="utf-8")
    return 0


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: int = 0) -> str:
    """A Markdown table; its last `numeric` columns are aligned right."""
    rule = ["---"] * (len(head) - numeric) + ["---:"] * numeric
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])
