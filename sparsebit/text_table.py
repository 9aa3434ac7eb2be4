"""`text_table`: rows of text as a table whose columns are aligned."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """The first column is aligned to the left; so are the others, or to the right if they hold `numbers`.

    >>> print(text_table([("site", "bits"), ("conv.weight", "4")], numbers=True))
    site         bits
    conv.weight     4
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = str.rjust if numbers else str.ljust
    lines = [[row[0].ljust(widths[0]), *map(others, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
