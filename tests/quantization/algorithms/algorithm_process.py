"""Every algorithm on a small model, as a process of its own: prints one digest of the model's bits for each.

A script, since what differs between two processes (the order of sets of strings, addresses) is the same within one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization import QuantModel, search_bits, sensitivity

STEPS: dict[str, list[Any]] = {
    "nothing": [],
    "gptq": ["gptq"],
    "equalize": ["equalize"],
    "smooth": [{"smooth": {"INSERT": True}}],
    "bias_correction": ["bias_correction"],
    "batchnorm_tuning": ["batchnorm_tuning"],
    **{name: [{"reconstruct": {"METHOD": name, "STEPS": 5}}] for name in ("adaround", "brecq", "qdrop", "autoround")},
    "all": ["smooth", "equalize", "gptq", {"reconstruct": {"STEPS": 5}}],
}


class Net(nn.Module):
    """A convolution with its norm, a depthwise one, and a norm in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.depthwise, self.mixed = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)
        self.layer_norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():  # uneven channels, which equalization evens out to the good of held-out samples too
            factors = torch.logspace(-1, 1, 8)
            self.depthwise.weight.mul_(factors.reshape(8, 1, 1, 1))
            self.mixed.weight.div_(factors.reshape(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x[..., 1:-1, 1:-1] + self.mixed(torch.relu(self.depthwise(x)))
        return self.head(nn.functional.gelu(self.up(self.layer_norm(x.mean((2, 3))))))


def main() -> None:
    torch.manual_seed(0)
    model, data = Net().eval(), list(torch.rand(4, 8, 3, 10, 10))
    found = {}
    for name, steps in STEPS.items():
        torch.rand(len(found))  # what others draw must not matter
        qmodel = calibrated(model, data, steps)
        found[name] = digest(qmodel.state_dict())
    plain = calibrated(model, data, [])
    scores = sensitivity(plain, data, weight_bits=(2, 4, 8))
    chosen = search_bits(plain, data, {"weight_bits": 4}, sensitivity=scores)
    found["sensitivity"], found["search"] = repr(scores.scores), repr(chosen.bits)
    sys.stdout.write(json.dumps(found) + "\n")


def calibrated(model: nn.Module, data: list[Tensor], steps: list[Any]) -> QuantModel:
    import sparsebit

    weights, activations = {"QUANTIZER": {"BIT": 4}}, {"QUANTIZER": {"BIT": 8}}
    return sparsebit.quantize(model, data, {"DEVICE": "cpu", "W": weights, "A": activations, "ALGORITHMS": steps})


def digest(tensors: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, Tensor):
            found.update(name.encode() + tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
