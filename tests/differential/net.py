"""A random quantized net as a value: a model, its weights, its data and its config, and their source text."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.program import Program

HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn
"""


@dataclass(frozen=True)
class Net(Program):
    """`shape`: of the input; `data`, `weights`: lines of code that change `x` or every parameter `p`.

    `config`: keys of the config and their values, with the backend. `gain`: the second batch is so many times as large
    as the one of the calibration. `is_dynamic`: the file takes any number of samples.
    """

    shape: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    gain: float = 1.0
    is_dynamic: bool = False

    def source(self) -> str:
        weights = "".join(f"            {line}\n" for line in self.weights)
        looped = f"        for p in model.parameters():\n{weights}" if weights else ""
        lines = "".join(f"    {line}\n" for line in self.data)
        return (
            f"{HEADER}{self.root.source()}\n\n"
            f"CONFIG = {dict(self.config)!r}\n\n"
            "def make():\n"
            "    torch.default_generator.manual_seed(0)\n"
            "    model = Net().eval()\n"
            "    with torch.no_grad():\n"
            "        model(*inputs(0)[0])  # lazy layers take their sizes from it\n"
            f"{looped}"
            "        for name, buffer in model.named_buffers():\n"
            "            if name.endswith('running_mean'):\n"
            "                buffer.normal_(0, 0.2)\n"
            "    return model\n\n"
            "def inputs(call):  # call 0: calibration; call 1: what is compared\n"
            "    g = torch.Generator().manual_seed(call)\n"
            f"    x = torch.randn({', '.join(map(str, self.shape))}, generator=g)\n"
            f"{lines}"
            f"    return (x * {self.gain!r} if call else x,), {{}}\n"
        )
