"""Import paths, names and habits of the first Sparsebit: each works, or raises an error with today's line."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.first_sparsebit import FORMER
from sparsebit.graph.ops.op_table import QMODULE_MAP
from sparsebit.quantization import MatchingNode, QuantModel, QuantOpr, ReplacePatternBase, register_qmodule
from sparsebit.sparse import SparseModel, Sparser, register_sparser
from tests.conftest import ROOT

CONFIG = "{BACKEND: virtual, DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}"


@pytest.mark.parametrize("path", sorted(FORMER))
def test_every_name_leads_somewhere(path: str) -> None:
    module = importlib.import_module(path)
    for name, today in FORMER[path].items():
        if name in vars(module):  # the module still has it
            continue
        if " " in today or ":" not in today:
            with pytest.raises(ImportError, match=re.escape(f"today: {today} (docs/guides/migration.md)")):
                getattr(module, name)
        else:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_name


def test_no_module_of_today_is_hidden() -> None:
    made = [path for path in FORMER if getattr(importlib.import_module(path), "__spec__", None) is None]
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / "sparsebit").rglob("*.py")}
    packages = {name.removesuffix(".__init__") for name in files}
    assert made and not packages & set(made)


def test_a_fresh_python_imports_a_former_path() -> None:
    code = (
        "from sparsebit.quantization.modules import QUpsample; import sparsebit.quantization.tools.calibration; "
        "from sparsebit.sparse.sparsers.base import Sparser; from sparsebit.utils.common import check_torch_version"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1 and "torch.__version__" in run.stderr.splitlines()[-1]


def test_classes_of_ops_find_the_layers_that_they_found() -> None:
    from sparsebit.quantization.modules import QBatchNorm1d, QBatchNorm2d, QConv2d, QUpsample  # type: ignore[import-not-found]

    layers = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(144, 2)]
    qmodel = QuantModel(nn.Sequential(*layers).eval(), CONFIG)
    found = {
        kind.__name__: [name for name, layer in qmodel.model.named_modules() if isinstance(layer, kind)]
        for kind in (QConv2d, QBatchNorm2d, QBatchNorm1d, QUpsample)
    }
    assert found == {"QConv2d": ["1"], "QBatchNorm2d": ["0"], "QBatchNorm1d": [], "QUpsample": ["2"]}
    for layer in qmodel.model.modules():
        if isinstance(layer, QUpsample):
            layer.input_quantizer.set_fake_fused()
    assert qmodel.model.get_submodule("2").input_quantizer.fake_fused


class TestClassesOfUsers:
    def test_methods_that_are_no_longer_called(self) -> None:
        with pytest.raises(ConfigError, match="today: the plan attaches the quantizers"):

            @register_qmodule(sources=[torch.erf])
            class Mine(QuantOpr):
                def build_quantizer(self, config: object) -> None: ...

        with pytest.raises(ConfigError, match="nodes = "):

            class Pattern(ReplacePatternBase):
                def make_nodes(self) -> list[MatchingNode]:
                    return []

    def test_calls(self) -> None:
        qmodel = QuantModel(nn.Sequential(nn.Linear(4, 2)), CONFIG)
        layer = qmodel.model.get_submodule("0")
        with pytest.raises(ConfigError, match="number format"):
            _ = layer.input_quantizer.cfg
        with pytest.raises(ConfigError, match="SPECIFIC"):
            layer.build_quantizer(None)

    def test_a_class_in_the_table_of_ops(self) -> None:
        with pytest.raises(ConfigError, match="register_qmodule"):
            QMODULE_MAP[nn.Conv2d] = QuantOpr  # type: ignore[assignment]

    def test_sparsers(self) -> None:
        with pytest.raises(ConfigError, match="TYPE = 'mine'"):

            @register_sparser
            class Mine(Sparser):
                STRATEGY = "mine"

                def __init__(self, config: object, opr: object) -> None: ...

                def calc_mask(self, x: torch.Tensor) -> torch.Tensor:
                    return torch.ones_like(x)


class TestSparseModel:
    def test_the_first_script(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        smodel = SparseModel(model, "{DEVICE: cpu, SPARSER: {TYPE: unstructed, STRATEGY: l1norm, RATIO: 0.5}}")
        smodel.prepare_calibration()
        smodel.calc_params()
        assert smodel.device == torch.device("cpu")
        with pytest.raises(ConfigError, match="extra_info=True"):
            smodel.export_onnx(torch.randn(2, 8), tmp_path / "m.onnx", extra_info=True)

    def test_l0norm_removes_the_channels_with_the_fewest_weights(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].weight[1, 2:] = 0
            model[0].weight[3, 4:] = 0
        config = "{DEVICE: cpu, SPARSER: {TYPE: structured, STRATEGY: l0norm, RATIO: 0.5}}"
        smodel = SparseModel(model, config, torch.randn(2, 8))
        smodel.calc_params()
        assert smodel.masks["0.weight"][:, 0].tolist() == [True, False, True, False]
