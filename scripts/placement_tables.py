"""The table of docs/benchmarks/placement.md: what keeps a measured placement from being faster."""

from __future__ import annotations

import math
from typing import Any

from marked_sections import table

Record = dict[str, Any]


def placement_limits(records: list[Record]) -> str:
    """A row per model: the parts of the measured file's time, and both bounds of `benchmarks/placement_limits.py`."""
    head = (
        *("model", "size", "measured", "dense", "depthwise", "other ops", "conversions"),
        *("no conversions, faster side of each op", "dense layers at the best rate"),
    )
    rate = best_rate(records)
    rows = [_row(record, rate) for record in sorted(records, key=lambda one: float(one["measured"]["ratio"]))]
    bounds = [[float(row[place]) for row in rows] for place in (2, 7, 8)]
    means = [f"{math.exp(sum(map(math.log, column)) / len(column)):.2f}" for column in bounds]
    rows.append(("geometric mean", "", means[0], "", "", "", "", *means[1:]))
    return f"{table(head, rows, numeric=7)}\n\nThe best rate is {rate:.0f} GMAC/s."


def best_rate(records: list[Record]) -> float:
    """GMAC/s of the file whose dense layers run fastest in integers, all of them together."""
    rates = [record["limits"]["rates"]["default"]["int"] for record in records]
    return max(rate for rate in rates if rate)


def _row(record: Record, rate: float) -> tuple[str, ...]:
    limits = record["limits"]
    shares = limits["shares"]["measured"]
    parts = [shares[f"{kind} int"] + shares[f"{kind} float"] for kind in ("dense", "depthwise", "other")]
    dense = 1e3 * limits["dense_gmacs"] / rate / limits["float_ms"]
    bound = parts[1] + parts[2] + shares["conversions"] + min(dense, parts[0])
    numbers = (record["measured"]["ratio"], *parts, shares["conversions"], limits["free_conversions"], bound)
    return record["model"], str(record["size"]), *(f"{number:.2f}" for number in numbers)
