"""The part that quantize and profile share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from sparsebit.cli.inputs.calibrated_model import calibrated, formats, load_subject, planned, read_config
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.option_groups import DataOptions, TrainedModel
from sparsebit.errors import ConfigError
from sparsebit.graph.values.call_form import VARYING

FICKLE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x)
def batches():
    yield torch.randn(8, 4)
    yield torch.randn(8, 5)
"""


def named(name: str, weights: Path | None = None) -> TrainedModel:
    return TrainedModel(model=f"own_project:{name}", weights=weights)


@pytest.mark.usefixtures("project")
class TestCalibrated:
    @pytest.mark.parametrize("asym", [False, True], ids=["plain", "asym"])
    def test_quantized_and_counted(self, asym: bool) -> None:
        subject = load_subject(named("Net"), "own_project:batches", DataOptions(num_samples=17))
        done = calibrated(subject, read_config("virtual", "cpu"), asym=asym)
        assert done.num_samples == 20  # whole batches
        assert done.qmodel.is_quantized("weight") and done.qmodel.is_quantized("activation")
        assert subject.first_batch.sqnr_db(done.qmodel, "cpu") > 25

    def test_a_fault_of_the_model_on_a_later_batch(self, project: Path) -> None:
        (project / "fickle.py").write_text(FICKLE)
        subject = load_subject(TrainedModel(model="fickle:Net"), "fickle:batches", DataOptions(num_samples=100))
        with pytest.raises(LoadingError, match=r"calibration failed: .*(RuntimeError|sys.exit)"):
            calibrated(subject, read_config("virtual", "cpu"), asym=False)

    def test_weights_are_loaded(self, project: Path) -> None:
        (project / "net.pt").write_bytes(b"")
        with pytest.raises(LoadingError, match=r"net\.pt"):
            load_subject(named("Net", weights=project / "net.pt"), "own_project:batches", DataOptions())

    def test_plan_needs_no_data(self) -> None:
        assert planned(named("Net"), "tensorrt").coverage.num_weighted_quantized == 3

    def test_plan_with_an_example(self) -> None:
        # Called with `scale`, which the model cannot know of itself.
        assert planned(named("Optional"), "virtual", "own_project:calls").call_form == {"x": VARYING, "scale": VARYING}

    def test_example_from_a_folder(self, project: Path) -> None:
        with pytest.raises(typer.BadParameter, match="name a file or MODULE:FACTORY"):
            planned(named("Net"), "virtual", ".")


class TestReadConfig:
    def test_device_is_replaced(self) -> None:
        assert read_config("onnxruntime", "cpu").DEVICE == "cpu"

    def test_gpu_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=r"torch sees no GPU here.*--device cpu"):
            read_config("virtual", "cuda:1")

    @pytest.mark.parametrize(
        ("weight", "activation", "text"),
        [
            ("{BIT: 4}", "{BIT: 8}", "W4 A8 on virtual"),
            ("{BIT: 4}", "{DISABLE: true}", "W4 on virtual"),
            ("{DISABLE: true}", "{DISABLE: true}", "nothing on virtual"),
        ],
    )
    def test_formats(self, weight: str, activation: str, text: str) -> None:
        config = f"BACKEND: virtual\nW: {{QUANTIZER: {weight}}}\nA: {{QUANTIZER: {activation}}}\n"
        assert formats(read_config(config, "cpu")) == text
