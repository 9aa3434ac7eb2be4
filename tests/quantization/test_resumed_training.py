"""Training that is stopped and taken up again in a fresh process ends with the same bits; averages of models hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsebit.quantization import FreezeSchedule, QuantModel, parse_qconfig
from tests.quantization.tiny import prepared, qconfig
from tests.quantization.tiny_training import WAYS, Net, assert_same, data, ready, train

PART = {"lsq": "scales", "lsq+": "scales", "pact": "scales", "dorefa": "observers", "following": "observers"}


class Session:
    """All that lives in a training script."""

    def __init__(self, qmodel: QuantModel, part: str) -> None:
        self.qmodel = qmodel
        self.optimizer = torch.optim.AdamW(qmodel.parameter_groups(0.02, scale_lr=0.01, weight_decay=0.1))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 4)
        self.freezing = FreezeSchedule(qmodel, **{"batchnorm": 1, part: 3})

    def run(self, num_steps: int) -> None:
        self.qmodel.train()
        for _ in range(num_steps):
            x, labels = data()  # drawn from torch's generator
            self.optimizer.zero_grad()
            F.cross_entropy(self.qmodel(x), labels).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.freezing.step()

    def state(self) -> dict[str, Any]:
        parts = (self.qmodel, self.optimizer, self.scheduler, self.freezing)
        return {"parts": [part.state_dict() for part in parts], "rng": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        for part, value in zip((self.optimizer, self.scheduler, self.freezing), state["parts"][1:], strict=True):
            part.load_state_dict(value)
        torch.set_rng_state(state["rng"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("by", ["state_dict", "folder"])
@pytest.mark.parametrize("way", PART)
def test_two_and_two_steps_are_four(way: str, by: str, tmp_path: Path) -> None:
    whole = Session(ready(way), PART[way])
    whole.run(4)

    first = Session(ready(way), PART[way])
    first.run(2)
    torch.save(first.state(), tmp_path / "session.pt")
    folder = first.qmodel.save(tmp_path / "model")

    torch.manual_seed(99)
    state = torch.load(tmp_path / "session.pt", weights_only=True)
    if by == "folder":
        qmodel = QuantModel.load(folder, Net())
    else:
        qmodel = QuantModel(Net(), qconfig(WAYS[way][0], bits=4))
        qmodel.load_state_dict(state["parts"][0])
    second = Session(qmodel, PART[way])
    second.load(state)
    second.run(2)
    assert_same(second.qmodel, whole.qmodel)
    x, _ = data()
    assert torch.equal(second.qmodel.eval()(x), whole.qmodel.eval()(x))


def test_a_state_dict_brings_the_switches() -> None:
    trained = train(ready("following"), 1)
    trained.set_quant(w_quant=True, a_quant=False)
    fresh = QuantModel(Net(), qconfig(bits=4))
    fresh.load_state_dict(trained.state_dict())
    assert fresh.is_quantized("weight") and not fresh.is_quantized("activation")
    assert [q.follows for q in fresh.quantizers()] == [q.follows for q in trained.quantizers()]


def test_a_state_dict_of_an_older_version_leaves_the_switches_alone() -> None:
    qmodel = ready()
    state = {name: value for name, value in qmodel.state_dict().items() if not name.endswith("_extra_state")}
    fresh = QuantModel(Net(), qconfig(WAYS["lsq"][0], bits=4))
    fresh.load_state_dict(
        {name: value.bool() if name.endswith("calibrated") else value for name, value in state.items()}
    )
    assert not fresh.is_quantized("weight")
    fresh.set_quant(w_quant=True, a_quant=True)
    x, _ = data()
    assert torch.equal(fresh.eval()(x), qmodel.eval()(x))


class TestAverages:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("average", ["ema", "mean"])
    @pytest.mark.parametrize("way", WAYS)
    def test_numbers_are_averaged_and_switches_stay(self, way: str, average: str, tmp_path: Path) -> None:
        qmodel = ready(way)
        averaging = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if average == "ema" else {}
        averaged = AveragedModel(qmodel, use_buffers=True, **averaging)
        history = []
        for _ in range(3):
            train(qmodel, 2)
            averaged.update_parameters(qmodel)
            history.append({name: value.clone() for name, value in qmodel.state_dict().items()})
        model = averaged.module
        weights = (0.25, 0.25, 0.5) if average == "ema" else (1 / 3, 1 / 3, 1 / 3)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected = sum(weight * state[name] for weight, state in zip(weights, history, strict=True))
                torch.testing.assert_close(value, expected, msg=name)
        assert all(quantizer.is_calibrated for quantizer in model.quantizers() if not quantizer.fake_fused)
        assert [q.is_enable for q in model.quantizers()] == [q.is_enable for q in qmodel.quantizers()]
        x, _ = data()
        averaged.eval()
        loaded = QuantModel.load(model.save(tmp_path), Net())
        assert torch.equal(loaded(x), averaged(x))

    def test_an_average_exports(self, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        qmodel = ready("lsq", {"SCHEDULE.FUSE_BN": True}, bits=8, backend="onnxruntime")
        averaged = AveragedModel(qmodel, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for _ in range(2):
            train(qmodel, 1)
            averaged.update_parameters(qmodel)
        x, _ = data(8)
        parity = averaged.module.eval().export_onnx(x, tmp_path / "average.onnx", check=[x])
        assert parity is not None


CONFIG = {
    "DEVICE": "cpu",
    "W": {"QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("W.QUANTIZER.BIT", 2, r"0\.weight: saved as \(uniform, int4, .*config makes it \(uniform, int2"),
        ("A.QSCHEME", "per-tensor-symmetric", r"0\.input: saved as \(uniform, uint4.*makes it \(uniform, int4"),
        ("W.QSCHEME", "per-tensor-symmetric", r"0\.weight: saved as .*PerChannel.*makes it .*PerTensor"),
        ("W.QUANTIZER.TYPE", "dorefa", r"0\.weight: saved as \(uniform, .*makes it \(dorefa"),
    ],
)
def test_a_state_of_another_config_is_refused(key: str, value: object, said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    saved = prepared(model, [torch.randn(16, 4)], parse_qconfig(CONFIG))
    saved.init_QAT()
    config = copy.deepcopy(CONFIG)
    *path, last = key.split(".")
    section: Any = config
    for part in path:
        section = section[part]
    section[last] = value
    with pytest.raises(RuntimeError, match=said):
        QuantModel(model, parse_qconfig(config)).load_state_dict(saved.state_dict())


def test_calibrated_numbers_may_go_on_learning() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    uniform = copy.deepcopy(CONFIG)
    for part in ("W", "A"):
        uniform[part]["QUANTIZER"]["TYPE"] = "uniform"  # type: ignore[index]
    saved = prepared(model, [torch.randn(16, 4)], parse_qconfig(uniform))
    saved.init_QAT()
    learning = QuantModel(model, parse_qconfig(CONFIG))
    learning.load_state_dict(saved.state_dict())
    x = torch.randn(16, 4)
    assert torch.equal(learning.eval()(x), saved.eval()(x))
