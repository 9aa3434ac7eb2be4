"""Finds where a file differs from its simulation: compares the integer codes of every site in both.

The output of each QuantizeLinear is made an output of the graph. That changes no fusion of a layer: the fused kernel
writes the same tensor. (It only prevents ONNX Runtime from merging two roundings in a row, which our files never have.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy, onnx
from sparsebit.deploy.sessions.runtime_sessions import EXACT, open_session

CODES = "/codes"
MANY = 0.01


@dataclass(frozen=True)
class SiteDifference:
    """`largest`: in steps of the grid; `share`: of the elements that differ."""

    site: str
    largest: int
    share: float

    def __str__(self) -> str:
        steps = "step" if self.largest == 1 else "steps"
        share = f"{self.share:.2%}" if self.share >= 5e-5 else "less than 0.01%"
        return f"{self.site}: {share} of its codes differ, by up to {self.largest} {steps}"


def site_differences(
    file: Path,
    runtime: str,
    feeds: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    optimize: bool = True,
    options: Mapping[str, str] | None = None,
) -> list[SiteDifference]:
    """Every activation site of the file that the simulation knows too, in the order of the graph.

    `expected`: site -> integer codes (numpy). `options`: the session's, by default `EXACT`.
    """
    differences = []
    found = site_codes(file, runtime, feeds, optimize=optimize, sites=set(expected), options=options)
    for site, codes in found.items():
        simulated = expected[site]
        if codes.ndim == simulated.ndim == 4:
            codes = codes[:, : simulated.shape[1]]  # a layout may have added channels after the others
        if codes.shape == simulated.shape:
            differences.append(difference_of(site, codes, simulated))
    return differences


def difference_of(site: str, codes: Any, simulated: Any) -> SiteDifference:
    """The difference of two arrays of integers of one shape."""
    gap = numpy.abs(codes.astype(numpy.int64) - simulated.astype(numpy.int64))
    return SiteDifference(site, int(gap.max(initial=0)), float((gap > 0).mean()) if gap.size else 0.0)


def site_codes(
    file: Path,
    runtime: str,
    feeds: Mapping[str, Any],
    *,
    optimize: bool = True,
    sites: Set[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Site -> integer codes (numpy), in the order of the graph; only of the `sites`, if they are given.

    In a file of another tool a site is named after the output of its QuantizeLinear.
    """
    model = onnx.load(str(file))
    outputs = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    values = {name.removesuffix(CODES): name for name in outputs}
    values = {site: name for site, name in values.items() if sites is None or site in sites}
    known = {output.name for output in model.graph.output}
    types = {value.name: value for value in model.graph.value_info}
    for name in values.values():
        if name not in known:
            model.graph.output.append(types.get(name) or onnx.helper.make_empty_tensor_value_info(name))
    session = open_session(model.SerializeToString(), runtime, optimize=optimize, options=options or EXACT[runtime])
    found = dict(zip(session.outputs, session.run(feeds), strict=True))
    return {site: found[name] for site, name in values.items() if name in found}


def kernel_fault(differences: Sequence[SiteDifference]) -> SiteDifference | None:
    """The first site that differs, if it is more than a step off: its inputs are equal, so drift cannot explain it."""
    first = next((difference for difference in differences if difference.largest), None)
    return first if first is not None and first.largest > 1 else None


def first_divergence(differences: Sequence[SiteDifference], *, any_step: bool = True) -> SiteDifference | None:
    """The first site that is off by more than a step, else the first that differs at all.

    `any_step=False`: the first that differs in many codes. Float sums in another order move single codes by a step,
    which explains no large difference.
    """
    limit = 0.0 if any_step else MANY
    return next((d for d in differences if d.largest > 1), next((d for d in differences if d.share > limit), None))
