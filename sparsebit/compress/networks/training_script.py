"""`train.py`: the last rung, a script that trains the nearest candidate with the float model as its teacher."""

from __future__ import annotations

from sparsebit.deploy.runtimes import PROFILES
from sparsebit.records.ladder import Ladder

_SCRIPT = '''\
"""Trains {name} at its bits, with the float model as the teacher: no labels are needed.

Fill in the two functions, then: python train.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from sparsebit.execution.batches import calls
from sparsebit.graph.values.nested import tensors_of
from sparsebit.quantization import QuantModel, parse_qconfig


def float_model():
    raise NotImplementedError("return the float model, in eval mode")


def batches():
    raise NotImplementedError("return a list or a DataLoader of training inputs, in the form of calibration data")


def floats(outputs):
    return [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]


EPOCHS, RATE = 10, 1e-5
HERE = Path(__file__).parent

device = "cuda" if torch.cuda.is_available() else "cpu"
teacher = float_model().to(device)
calibration = [batch for batch, _ in zip(batches(), range(8))]
{net}
config = parse_qconfig(str(HERE / "best.yaml")).replace("DEVICE", device, "ALGORITHMS", [])
qmodel = QuantModel(net, config, example_inputs=calibration[0])
qmodel.prepare_calibration()
with torch.no_grad():
    for args, kwargs in calls(calibration, net, device):
        qmodel(*args, **kwargs)
qmodel.init_QAT()
optimizer = torch.optim.AdamW(qmodel.parameter_groups(lr=RATE))
for epoch in range(EPOCHS):
    qmodel.train()
    for args, kwargs in calls(batches(), net, device):
        with torch.no_grad():
            wanted = floats(teacher(*args, **kwargs))
        found = floats(qmodel(*args, **kwargs))
        loss = {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {{epoch + 1}} of {{EPOCHS}}: loss {{loss.item():.4f}}")
qmodel.eval()
qmodel.save(HERE / "trained")
qmodel.export(HERE / "trained{ending}", calibration[0], check=calibration)
'''
_DENSE = "net = float_model().to(device)"
_PRUNED = """\
from sparsebit.sparse import load

net = load(HERE / "small", float_model()).to(device)"""
_OF_CLASSES = 'F.kl_div(found[0].log_softmax(-1), wanted[0].softmax(-1), reduction="batchmean")'
_OF_VALUES = "sum(F.mse_loss(ours, theirs) for ours, theirs in zip(found, wanted))"


def training_script(ladder: Ladder) -> str:
    """The script for the best candidate; its config lies next to it."""
    step = ladder.step(ladder.best)
    net = _PRUNED if step.recipe["sparsity"] else _DENSE
    loss = _OF_CLASSES if "top-1" in ladder.goal.metric else _OF_VALUES
    return _SCRIPT.format(name=step.name, net=net, loss=loss, ending=PROFILES[ladder.goal.target].ending)
