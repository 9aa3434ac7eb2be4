"""The solver behind `integer_program`: one objective under given limits, solved by HiGHS (in scipy).

HiGHS has absolute tolerances (1e-6), so objective and budgets are scaled to the same magnitude first, and results back.
scipy is optional (the extra `search`): it is only imported here, when a `Solver` is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparsebit.errors import BudgetError, MissingExtraError

Row = tuple[dict[int, float], float, float]  # coefficients by variable, lowest and highest sum
Numbers = Sequence[float]
# The best choice's cost is scaled to this magnitude, because the solver's tolerances are absolute (1e-6).
_MAGNITUDE = 1000.0


class Program(Protocol):
    """The program to solve: variables of options first (0 or 1), then those of pairs (0 to 1)."""

    num_binary: int
    num_variables: int
    rows: list[Row]
    spending: list[dict[int, float]]  # of each budget
    barred: set[int]  # variables that stay 0


@dataclass(frozen=True)
class Found:
    """The variables of options that are 1, and a lower bound on the cost of every choice."""

    chosen: tuple[int, ...]
    bound: float


class Solver:
    """One objective under given limits."""

    def __init__(self, program: Program, objective: Numbers, limits: Numbers, time_limit: float) -> None:
        try:
            from scipy import optimize, sparse
        except Exception:  # a broken installation may raise any error
            raise MissingExtraError("scipy", "search", "choosing under budgets") from None
        self.optimize, self.sparse = optimize, sparse
        self.program, self.objective = program, objective
        self.ends_at, self.time_limit = time.monotonic() + time_limit, time_limit
        self.rows = list(program.rows)
        for spending, limit in zip(program.spending, limits, strict=True):
            if spending and not math.isinf(limit):
                scale = _MAGNITUDE / max(limit, max(spending.values()) / _MAGNITUDE)
                coefficients = {place: value * scale for place, value in spending.items()}
                self.rows.append((coefficients, -math.inf, limit * scale))

    def relaxed(self) -> tuple[float, list[float]] | None:
        """The least cost with fractions of options, and the reduced cost of each; None without a solution."""
        equal = [row for row in self.rows if row[1] == row[2]]
        bounded = [row for row in self.rows if row[1] != row[2]]
        scale = _MAGNITUDE / (max(self.objective) or 1.0)
        given: dict[str, Any] = {"A_eq": self._matrix(equal), "b_eq": [high for *_, high in equal]}
        if bounded:
            given |= {"A_ub": self._matrix(bounded), "b_ub": [high for *_, high in bounded]}
        # Without an upper bound of 1, which the rows imply anyway: a part of the reduced cost could move to that bound.
        ends = [(0.0, 0.0 if place in self.program.barred else None) for place in range(self.program.num_variables)]
        costs = [value * scale for value in self.objective]
        found = self._run(self.optimize.linprog, costs, bounds=ends, method="highs", **given)
        if found is None:
            return None
        # The reduced cost of a variable that is 0 is the marginal of its lower bound. Of others it is 0: they are kept.
        reduced = [max(0.0, float(value)) / scale for value in found.lower.marginals]
        return float(found.fun) / scale, reduced

    def integer(self, kept: set[int], least: float, gap: float) -> Found | None:
        """The best choice among the options at `kept`; None if there is none. `least`: of the relaxed program."""
        program = self.program
        size = max(abs(least), 1e-9 * max(self.objective)) or 1.0
        num_pairs = program.num_variables - program.num_binary
        upper = [float(place in kept and place not in program.barred) for place in range(program.num_binary)]
        upper += [1.0] * num_pairs
        constraints = self.optimize.LinearConstraint(
            self._matrix(self.rows), [low for _, low, _ in self.rows], [high for *_, high in self.rows]
        )
        found = self._run(
            self.optimize.milp,
            [value * _MAGNITUDE / size for value in self.objective],
            integrality=[1] * program.num_binary + [0] * num_pairs,
            bounds=self.optimize.Bounds([0.0] * len(upper), upper),
            constraints=constraints,
            gap=gap,
        )
        if found is None:
            return None
        chosen = tuple(place for place in range(program.num_binary) if found.x[place] > 0.5)
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
        return Found(chosen, float(bound) * size / _MAGNITUDE)

    def _run(self, solve: Any, *args: Any, gap: float | None = None, **kwargs: Any) -> Any:
        """The result; None if there is no solution. An integer program that ran out of time may have one."""
        options = {"time_limit": max(0.1, self.ends_at - time.monotonic())}
        if gap is not None:  # the default is 1e-4
            options["mip_rel_gap"] = gap
        with _without_prints():
            found = solve(*args, options=options, **kwargs)
        if found.status != 2 and (found.x is None or (gap is None and found.status != 0)):
            raise BudgetError(
                f"no choice was found in {self.time_limit:g} s ({found.message}); raise time_limit, or use fewer "
                "options per item or fewer budgets"
            )
        return None if found.status == 2 else found

    def _matrix(self, rows: Sequence[Row]) -> Any:
        places = [(number, place, value) for number, (row, *_) in enumerate(rows) for place, value in row.items()]
        numbers, columns, values = zip(*places, strict=True)
        return self.sparse.csr_array((values, (numbers, columns)), shape=(len(rows), self.program.num_variables))


@contextlib.contextmanager
def _without_prints() -> Iterator[None]:
    """Suppress what the solver's C++ code prints to stdout; lines of other code are printed afterwards."""
    try:
        stdout = os.dup(1)
    except OSError:  # there is none
        yield
        return
    sys.stdout.flush()
    with tempfile.TemporaryFile() as kept:
        try:
            os.dup2(kept.fileno(), 1)
            yield
        finally:
            with contextlib.suppress(OSError, AttributeError, TypeError):
                ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            kept.seek(0)
            lines = [line for line in kept if not line.startswith(b"Highs")]
            os.write(stdout, b"".join(lines))
            os.close(stdout)
