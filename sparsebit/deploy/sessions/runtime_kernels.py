"""The graph that a runtime executes, read back."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebit.records.audit import Arithmetic


@dataclass(frozen=True)
class Kernel:
    """The runtime's kernel for a layer: the name of its own op, and its arithmetic.

    `rounds_weight`: the weight is float in the file, and the runtime itself rounds it to integers.
    """

    op: str
    arithmetic: Arithmetic
    rounds_weight: bool = False


@dataclass(frozen=True)
class Execution:
    """A runtime's own graph: the kernel of each layer, and the remaining conversions between them."""

    kernels: dict[str, Kernel]
    leftovers: dict[str, int]
