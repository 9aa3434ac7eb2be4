"""Compares a file also in ONNX Runtime's default session, which is the one that users open.

A file without a runtime of its own here is checked node by node. The default session rewrites the graph first, and
these rewrites may change the result: they round float biases and use integer kernels.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsebit.deploy.comparing.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.sessions.cpu import saturates
from sparsebit.deploy.sessions.runtime_sessions import UNCLIPPED, open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError

_DEFAULT = "a default session of ONNX Runtime"
_ADVICE = "the session option session.disable_quant_qdq=1 switches these optimizations off"


class DefaultSession:
    """Compares the outputs of a default session batch by batch. `name`: the file's name in messages.

    A warning is issued if the default session cannot load or run the file.
    """

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name
        self.session: Session | None = None
        self.comparison: Comparison | None = None
        try:
            # On a CPU without VNNI, 8-bit sums clip at 16 bits in any file: that is not this file's fault.
            self.session = open_session(file, options=UNCLIPPED if saturates() else None)
            self.comparison = Comparison(self.session.outputs)
        except DeploymentError as error:
            self._warn_of(error)

    def add(self, feeds: Mapping[str, Any], expected: Sequence[Any], reference: Sequence[Any]) -> None:
        """One batch: its inputs, the outputs of the simulation and of the float model."""
        if self.session is None or self.comparison is None:
            return
        try:
            self.comparison.add(expected, self.session.run(feeds), reference)
        except DeploymentError as error:
            self.session = None
            self._warn_of(error)

    def judge(self, tolerance: Tolerance, *, is_target: bool) -> str:
        """Compare with the limits; returns a remark for the verdict, empty if the outputs are bit-exact.

        `is_target`: exceeding the limits is an error; otherwise, for a runtime that is not available here, a warning.
        """
        if self.session is None or self.comparison is None:
            return ""
        parity = self.comparison.result(self.name, "a default session of onnxruntime", "the simulation")
        text = f"{self.name}: {lossy}; {_ADVICE}" if (lossy := _lossy(parity, tolerance)) else ""
        if fault := parity.fault(dataclasses.replace(tolerance, exact=None)):
            text = (
                f"{self.name} computes what was simulated node by node, but the optimizations of {_DEFAULT} change it: "
                f"{fault}; {_ADVICE}"
            )
            if is_target:
                raise DeploymentError(text)
        if text:
            warnings.warn(text, stacklevel=5)
        is_same = all(output.is_equal for output in parity.outputs)
        return "" if is_same else f"in a default session SQNR {parity.worst.sqnr_db:.1f} dB"

    def _warn_of(self, error: DeploymentError) -> None:
        text = str(error).replace(str(self.file), self.name)
        warnings.warn(f"{text}; node by node it computes what was simulated", stacklevel=6)


def _lossy(parity: Parity, tolerance: Tolerance) -> str:
    """An output that a default session changes more than quantization does; empty if there is none."""
    for output in parity.outputs:
        if output.noise_db is not None and output.sqnr_db < output.noise_db - tolerance.noise_margin_db:
            found = f"in {_DEFAULT} output {output.name} has an SQNR of {output.sqnr_db:.1f} dB against the simulation"
            return f"{found}, which has {output.noise_db:.1f} dB against the float model"
    return ""
