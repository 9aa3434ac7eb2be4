"""`register_rung`: adds a function that proposes candidates to the ladder.

>>> @register_rung("my rung", order=45)
... def my_rung(known: Known) -> Candidate | None:
...     return None if known.kept else Candidate("mine", "nothing keeps the loss", Recipe(...))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsebit.compress.climbing.goal import Models
from sparsebit.compress.climbing.known import Candidate, Known
from sparsebit.registry import Registry

Propose = Callable[[Known], Candidate | None]


@dataclass(frozen=True)
class Rung:
    """`propose` with its place in the ladder: a smaller `order` is asked first."""

    name: str
    order: int
    propose: Propose


LADDERS: dict[Models, Registry[Rung]] = {"networks": Registry("rung"), "language models": Registry("rung")}


def register_rung(
    name: str, *, order: int, models: Models = "networks", replace: bool = False
) -> Callable[[Propose], Propose]:
    """A decorator that adds a rung; those of Sparsebit have the orders 10, 20, ..., 100."""

    def add(propose: Propose) -> Propose:
        LADDERS[models].register(name, replace=replace)(Rung(name, order, propose))
        return propose

    return add
