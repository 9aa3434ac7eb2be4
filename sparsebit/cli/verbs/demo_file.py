"""The demo's last step: its network at 8 bits as an ONNX file, and the results of running the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparsebit
from sparsebit.cli.digits import Digits
from sparsebit.cli.verbs.audit import size_words, time_words
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.comparing.parity import Parity
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.records.audit import Audit

NAME = "sparsebit-demo.onnx"
BACKEND = "onnxruntime"
_TIMED_S = 2.0


@dataclass(frozen=True)
class DemoFile:
    """The file in ONNX Runtime. `agreement`: with the float model's answers."""

    parity: Parity
    audit: Audit
    accuracy: float
    agreement: float

    def to_dict(self, kept: Path | None) -> dict[str, Any]:
        found = self.audit
        return {
            "file": None if kept is None else str(kept),
            "bytes": found.num_bytes,
            "float_bytes": found.float_bytes,
            "accuracy": self.accuracy,
            "agreement": self.agreement,
            "parity": self.parity.to_dict(),
            "latency": {name: latency.to_dict() for name, latency in found.latency.items()},
            "ratio": found.ratio,
            "verdict": found.verdict,
        }

    def facts(self, kept: Path | None, num_test: int) -> dict[str, str]:
        where = f"not kept: --output {NAME} keeps it" if kept is None else str(kept)
        return {
            "file": where,
            "parity": str(self.parity),
            "accuracy": f"{self.accuracy:.1%} on the {num_test} images, {self.agreement:.1%} the same answer as float",
            "size": size_words(self.audit),
            "speed": f"one image: {time_words(self.audit)}",
            "runs": self.audit.verdict,
        }


def export_file(model: nn.Module, digits: Digits, batches: list[torch.Tensor], target: Path) -> DemoFile:
    """Quantize for ONNX Runtime, write `target` and run it: against the simulation, the labels and the clock."""
    qmodel = sparsebit.quantize(model, batches, BACKEND)
    parity = qmodel.export_onnx(batches[0], target, dynamic_axes={"images": {0: "batch"}}, check=batches)
    assert parity is not None
    images, labels = digits.test_images, digits.test_labels
    (logits,) = open_session(target, BACKEND, num_threads=1).run({"images": images.numpy()})
    answers = torch.from_numpy(logits).argmax(1)
    with torch.no_grad():
        agreement = float((answers == model(images).argmax(1)).double().mean())
    found = audit(target, feeds={"images": images[:1].numpy()}, budget_s=_TIMED_S)
    return DemoFile(parity, found, float((answers == labels).double().mean()), agreement)
