"""What the examples of training loops share: their options, a config for 2 bits, scores on scikit-learn's digits."""

from __future__ import annotations

import argparse
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


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="of training at 2 bits (%(default)s)")
    parser.add_argument("--float-epochs", type=int, default=6, help="of training in float before (%(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--save", default="digits-w2a2", metavar="DIR", help="the folder to write (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a record on stdout")
    return parser.parse_args()


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
