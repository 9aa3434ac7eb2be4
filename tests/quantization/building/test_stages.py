"""The stages of building a model, each by itself; transforms of the float graph."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import CaptureError, CheckpointError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.building.stages import attach, capture, make_plan, prepare, transform
from sparsebit.quantization.quantizers.base import Quantizer
from tests.quantization.tiny import ConvBnRelu, calibrated, qconfig, run, sites

X = torch.randn(5, 4)


def layers_of(graph_module: fx.GraphModule) -> list[nn.Linear]:
    return [module for module in graph_module.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def scaled(graph_module: fx.GraphModule) -> None:
    """Keeps what two linears with a ReLU between compute."""
    first, last = layers_of(graph_module)
    first.weight.mul_(4.0)
    first.bias.mul_(4.0)
    last.weight.div_(4.0)


@torch.no_grad()
def doubled(graph_module: fx.GraphModule) -> None:
    layers_of(graph_module)[0].weight.mul_(2.0)


def broken(graph_module: fx.GraphModule) -> None:
    raise ZeroDivisionError("no")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def test_each_by_itself() -> None:
    model, config = ConvBnRelu().eval(), qconfig()
    captured = capture(model)
    assert prepare(captured, folds_batchnorm=True) == {}
    transform(captured, [])
    plan, placement = make_plan(captured, config)
    assert list(plan) == ["conv.input", "conv.weight"]
    assert attach(captured, plan, placement) == plan
    found = {module.name for module in captured.model.modules() if isinstance(module, Quantizer)}
    assert found >= {"conv.input", "conv.weight"}
    assert list(QuantModel(model, qconfig({"SCHEDULE.FUSE_BN": True})).plan) == list(plan)


class TestTransforms:
    def test_is_applied_before_the_plan(self) -> None:
        model = Mlp().eval()
        qmodel = QuantModel(model, qconfig(), transforms=[scaled], example_inputs=X)
        assert torch.allclose(qmodel(X), model(X), atol=1e-6)
        assert torch.equal(qmodel.model.get_submodule("first").weight, model.first.weight * 4)  # type: ignore[arg-type]
        assert sites(qmodel) == set(qmodel.plan)

    @pytest.mark.parametrize("has_example", [True, False], ids=["example", "calibration"])
    def test_one_that_changes_the_model_is_told(self, has_example: bool) -> None:
        example = X if has_example else None
        with pytest.raises(CaptureError, match="after the transforms doubled the model computes something else on "):
            calibrated(Mlp().eval(), [X], transforms=[doubled], example_inputs=example)

    def test_one_that_is_meant_to_change_it(self) -> None:
        qmodel = QuantModel(Mlp().eval(), qconfig(), transforms=[doubled], verify=False)
        qmodel.prepare_calibration()
        run(qmodel, [X])
        qmodel.calc_qparams()

    def test_one_that_fails_is_named(self) -> None:
        with pytest.raises(CaptureError, match=r"the transform broken fails on the model's graph: ZeroDivisionError"):
            QuantModel(Mlp(), qconfig(), transforms=[broken])

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        qmodel = calibrated(Mlp().eval(), [X], transforms=[scaled])
        folder = qmodel.save(tmp_path / "saved")
        assert torch.equal(QuantModel.load(folder, Mlp(), transforms=[scaled])(X), qmodel(X))
        assert torch.equal(pickle.loads(pickle.dumps(qmodel))(X), qmodel(X))
        with pytest.raises(CheckpointError, match=r"built with transforms=\['scaled'\], load\(\) is given \[\]"):
            QuantModel.load(folder, Mlp())
