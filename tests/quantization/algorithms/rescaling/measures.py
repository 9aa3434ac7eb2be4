"""Differences of a quantized model from its float model."""

from __future__ import annotations

import torch


def error(qmodel, model, batches):
    with torch.no_grad():
        return float(sum((qmodel(x) - model(x)).square().mean() / model(x).square().mean() for x in batches))


def float_difference(qmodel, model, batches):
    qmodel.set_quant(False, False)
    with torch.no_grad():
        found = max(float((qmodel(x) - model(x)).abs().max() / model(x).abs().max()) for x in batches)
    qmodel.set_quant(True, True)
    return found
