"""What the examples of training loops share: a config for 2 bits, and scores on scikit-learn's digits."""

from __future__ import annotations

import json

import torch
from torch import nn

from sparsebit.cli.digits import Digits

# Built on the CPU: the loop moves the model to where it trains.
CONFIG = """
DEVICE: cpu
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: lsq, BIT: 2}, OBSERVER: {TYPE: MSE}}
A: {QSCHEME: per-tensor-affine, QUANTIZER: {TYPE: lsq, BIT: 2}, OBSERVER: {TYPE: MSE}}
"""


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Percent of the 597 test images that the model names rightly; it is in eval mode then."""
    device = next(model.parameters()).device
    hits = model.eval()(digits.test_images.to(device)).argmax(1).cpu() == digits.test_labels
    return 100 * float(hits.float().mean())


def told(scores: dict[str, float], saved: str, num_processes: int, *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"scores": scores, "saved": saved, "num_processes": num_processes})
    shown = ", ".join(f"{name} {score:.1f} %" for name, score in scores.items())
    return f"{shown} on 597 digits; trained in {num_processes} process(es), saved in {saved}"
