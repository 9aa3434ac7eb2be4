"""Channels and bits in one choice: budgets are kept, both configs alone rebuild it, and the file passes the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.compress import choose_channels_and_bits
from sparsebit.errors import BudgetError, ConfigError
from sparsebit.sparse import SparseModel
from tests.parameters import first_fast

pytest.importorskip("scipy")
STRUCTURED = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm"}}
VIRTUAL = {
    "BACKEND": "virtual",
    "DEVICE": "cpu",
    "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"BIT": 8}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"BIT": 8}},
}


class Net(nn.Module):
    """A residual stream, a chain inside, a norm, and a last layer whose outputs must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.b(F.relu(self.a(x))))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]


def rebuilt(net: nn.Module, batches: list[Tensor], found: object) -> tuple[nn.Module, sparsebit.QuantModel]:
    smodel = SparseModel(net, found.sconfig.to_dict(), batches[0]).eval()  # type: ignore[attr-defined]
    smodel.calc_params()
    small = smodel.shrink()
    return small, sparsebit.quantize(small, batches, found.qconfig.to_dict())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "budgets", first_fast([{"bytes": 0.15, "bops": 0.02}, {"bytes": 0.12}, {"bops": 0.03}]), ids=str
)
def test_budgets_are_kept_by_what_the_configs_rebuild(
    net: Net, batches: list[Tensor], budgets: dict[str, float]
) -> None:
    found = choose_channels_and_bits(
        net, batches, budgets, sconfig=STRUCTURED, qconfig=VIRTUAL, weight_bits=(2, 4, 8), candidates=(0.25, 0.5)
    )
    assert all(found.spent[name] <= limit for name, limit in budgets.items())
    small, qmodel = rebuilt(net, batches, found)
    assert type(small) is Net
    specs = {site: entry.spec.bits for site, entry in qmodel.plan.items() if site.endswith(".weight")}
    assert specs == dict(found.bits)
    widths = {"a": small.get_parameter("a.weight").shape[0], "stem": small.get_parameter("stem.weight").shape[0]}
    assert widths["a"] == 24 - round(24 * found.ratios["a.weight"])
    assert found.bits["stem.weight"] == found.bits["b.weight"]  # they write the same channels
    if "bytes" in budgets:
        packed = sum(parameter.bytes for parameter in qmodel.coverage.parameters)
        assert packed <= budgets["bytes"] * sum(p.numel() * 4 for p in net.parameters()) * 1.05
    assert "of the dense float model's" in str(found)


def test_a_loose_budget_takes_nothing_away(net: Net, batches: list[Tensor]) -> None:
    found = choose_channels_and_bits(
        net, batches, {"bytes": 0.9}, sconfig=STRUCTURED, qconfig=VIRTUAL, weight_bits=(4, 8), candidates=(0.5,)
    )
    assert set(found.ratios.values()) == {0.0} and set(found.bits.values()) == {8}


@pytest.mark.slow
def test_spared_layers_keep_their_channels_and_what_cannot_be_is_refused(net: Net, batches: list[Tensor]) -> None:
    spared = {**STRUCTURED, "SPARSER": {"TYPE": "structured", "SPARE": ["stem"]}}
    found = choose_channels_and_bits(
        net, batches, {"bytes": 0.1}, sconfig=spared, qconfig=VIRTUAL, weight_bits=(2, 8), candidates=(0.5,)
    )
    small, _ = rebuilt(net, batches, found)
    assert small.get_parameter("stem.weight").shape[0] == 16
    with pytest.raises(BudgetError, match="bytes"):
        choose_channels_and_bits(net, batches, {"bytes": 0.001}, sconfig=STRUCTURED, qconfig=VIRTUAL, candidates=(0.5,))
    with pytest.raises(ConfigError, match="budget 'latency': allowed: bytes, bops"):
        choose_channels_and_bits(net, batches, {"latency": 0.5})
    with pytest.raises(ConfigError, match="up to 1"):
        choose_channels_and_bits(net, batches, {"bytes": 100})


@pytest.mark.slow
def test_the_file_is_smaller_in_integers_and_passes_the_parity_gate(
    net: Net, batches: list[Tensor], tmp_path: Path
) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    found = choose_channels_and_bits(net, batches, {"bytes": 0.22}, sconfig=STRUCTURED, candidates=(0.25, 0.5))
    small, qmodel = rebuilt(net, batches, found)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())
    parity = qmodel.export_onnx(batches[0], tmp_path / "small.onnx", check=batches)  # an error where it does not pass
    assert parity is not None and (tmp_path / "small.onnx").is_file()
