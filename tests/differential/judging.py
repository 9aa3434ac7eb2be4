"""One net through sparsebit and every judge: what was the same, what a rule explains, and what is a fault."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import onnx
import torch
from torch import Tensor

from sparsebit.deploy.comparing.divergence import CODES
from sparsebit.deploy.exporting.to_onnx import flat_outputs
from sparsebit.errors import DeploymentError, SparsebitError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting.stored_parameters import simulated_codes
from tests.differential.comparing import differences
from tests.differential.exact_run import ExactFile, Trace, fits
from tests.differential.judges import FUSING, available, with_outputs
from tests.differential.net import Net
from tests.differential.rules import refusal_of, unfit_for
from tests.fuzz.program import Compiled
from tests.quantization.tiny import calibrated, qconfig

SIMULATION = "simulation"


@dataclass
class Verdict:
    """`faults`: kind -> details. `explained`: rule -> how often. `judged`: the judges that ran the file."""

    outcome: str = "same"  # or "explained", "refused", "invalid", "fault"
    details: str = ""
    faults: dict[str, str] = field(default_factory=dict)
    explained: Counter[str] = field(default_factory=Counter)
    judged: list[str] = field(default_factory=list)
    num_sites: int = 0

    @property
    def is_fault(self) -> bool:
        return bool(self.faults)

    def concluded(self) -> Verdict:
        self.outcome = "fault" if self.faults else "explained" if self.explained else "same"
        return self


def judged(net: Net, judges: Collection[str]) -> Verdict:
    """Quantize, write the file, and run it with each of the judges."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        compiled = Compiled(net)
        try:
            model = compiled.make()
            batches = [compiled.inputs(call)[0] for call in (0, 1)]
            with torch.no_grad():
                outputs = [value for batch in batches for value in flat_outputs(model(*batch))]
        except Exception as error:  # the net itself does not run
            return Verdict("invalid", _told(error))
        if not all(bool(value.isfinite().all()) for value in outputs if value.is_floating_point()):
            return Verdict("invalid", "its outputs are not finite")
        file = Path(folder) / "net.onnx"
        try:
            qmodel = _quantized(net, compiled, model, batches[0], file)
        except SparsebitError as error:
            return Verdict("refused", _told(error))
        except Exception as error:
            return Verdict("fault", faults={f"crash: {type(error).__name__}": _told(error)})
        try:
            return _compared(qmodel, file, batches, judges)
        except Exception as error:
            return Verdict("fault", faults={f"crash of the comparison: {type(error).__name__}": _told(error)})


def _quantized(net: Net, compiled: Compiled, model: Any, batch: tuple[Tensor, ...], file: Path) -> QuantModel:
    config = dict(compiled.names["CONFIG"])
    qmodel = calibrated(model, [batch], qconfig(config, backend=config.pop("BACKEND")))
    axes = {"x": {0: "batch"}} if net.is_dynamic else None
    qmodel.export_onnx(batch, file, input_names=["x"], dynamic_axes=axes)
    return qmodel


def _compared(qmodel: QuantModel, file: Path, batches: list[tuple[Tensor, ...]], judges: Collection[str]) -> Verdict:
    verdict = Verdict()
    model = onnx.load(str(file))
    exact = ExactFile(model)
    feeds = {"x": batches[1][0].numpy()}
    run = _Run(verdict, model, exact, feeds)
    run.compare(SIMULATION, _simulated(qmodel, batches[1], exact))
    exposed = with_outputs(model, exact.sites)
    known = available()
    for name in judges:
        if row := unfit_for(name, exact.graph):
            verdict.explained[f"{name} is not asked: {row.why}"] += 1
            continue
        try:
            found = known[name](exposed, feeds)
            run.compare(name, found)
            if name in FUSING and exact.sites:
                run.compare_unexposed(name, functools.partial(known[name], feeds=feeds), found)
        except Exception as error:
            run.refused(name, _told(error))
    try:
        qmodel.check_onnx(file, batches)
    except DeploymentError as error:
        run.refused("gate", _told(error))
    return verdict.concluded()


def _simulated(qmodel: QuantModel, batch: tuple[Tensor, ...], exact: ExactFile) -> dict[str, Any]:
    """The codes and the outputs of our own simulation, by the names of the file."""
    codes, _ = simulated_codes(qmodel, (batch, {}))
    with torch.no_grad():
        outputs = [value.numpy() for value in flat_outputs(qmodel(*batch))]
    found = {site: codes[name] for site in exact.sites if (name := site.removesuffix(CODES)) in codes}
    known = exact.run({"x": batch[0].numpy()}, {}).positions
    # Where a layout moved padding behind the quantizer the file's site is smaller.
    found = {site: value for site, value in found.items() if fits(value.shape, known[site].shape)}
    return {**dict(zip(exact.outputs, outputs, strict=True)), **found}


class _Run:
    """A file on one batch: exact runs are shared by the judges that found the same codes."""

    def __init__(self, verdict: Verdict, model: Any, exact: ExactFile, feeds: Mapping[str, Any]) -> None:
        self.verdict, self.model, self.exact, self.feeds = verdict, model, exact, feeds
        self._traces: dict[bytes, Trace] = {}
        verdict.num_sites = len(exact.sites)

    def compare(self, shown: str, found: Mapping[str, Any], judge: str = "") -> None:
        self.verdict.judged.append(shown)
        for one in differences(judge or shown, self.exact, self._trace(found), found):
            if one.why:
                self.verdict.explained[f"{shown}: {one.why}"] += 1
            else:
                self.verdict.faults.setdefault(f"{shown} after {'+'.join(sorted(one.ops))}", str(one))

    def _trace(self, found: Mapping[str, Any]) -> Trace:
        given = {site: found[site].astype(numpy.int64) for site in self.exact.sites if site in found}
        key = b"".join(site.encode() + given[site].tobytes() for site in given)
        if key not in self._traces:
            self._traces[key] = self.exact.run(self.feeds, given)
        return self._traces[key]

    def compare_unexposed(self, judge: str, run: Callable[[Any], dict[str, Any]], found: Mapping[str, Any]) -> None:
        """The outputs of the file as it is, if they differ: after the codes that its beginnings end with."""
        plain = run(self.model)
        if all(
            numpy.array_equal(value, found[name], equal_nan=value.dtype.kind == "f") for name, value in plain.items()
        ):
            return
        codes = {site: run(with_outputs(self.model, [site], alone=True))[site] for site in self.exact.sites}
        self.compare(f"{judge}, unexposed", {**plain, **codes}, judge)

    def refused(self, judge: str, message: str) -> None:
        rule = refusal_of(judge, message)
        if rule is not None:
            self.verdict.explained[f"{judge} refuses: {rule.why}"] += 1
        else:
            self.verdict.faults.setdefault(f"{judge} refuses", message)


def _told(error: Exception) -> str:
    """With the end of the runtime's own message, which says more than its first lines."""
    cause = f" ... {str(error.__cause__)[-600:]}" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}"[:700] + cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Odd nets cause warnings: lazy layers, few samples, ranges of zero."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
