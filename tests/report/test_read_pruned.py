from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import RecordError
from sparsebit.records.model_folders import PrunedModel, PrunedSize
from sparsebit.records.scores import ModelScore, ScoreFacts
from sparsebit.report import read_run
from sparsebit.sparse import SparseModel, save
from sparsebit.sparse.shrinking.pruned_layers import float_graph, pruned_layers

CONFIG = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.5}}
SCORES = ScoreFacts("top-1 accuracy", "%", (ModelScore("dense", 92.0), ModelScore("pruned", 90.5, -1.5, 0.8)), 500)


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A network, the same with half of its channels, and a batch."""
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    batch = torch.randn(2, 3, 8, 8)
    smodel = SparseModel(dense, CONFIG, batch).eval()
    smodel.calc_params()
    return dense, smodel.shrink(), batch


def measured(dense: nn.Module, small: nn.Module, batch: torch.Tensor) -> PrunedModel:
    return PrunedModel(
        "nets:Net",
        PrunedSize(2e6, 1380, 5520),
        PrunedSize(1e6, 692, 2768),
        pruned_layers(dense, small),
        float_graph(small, batch),
        "onnxruntime",
        (2.0, 1.5),
        0.75,
        SCORES,
        12.25,
        ("a note",),
    )


def test_what_each_layer_has_left(models: tuple[nn.Module, nn.Module, torch.Tensor], tmp_path: Path) -> None:
    save(models[1], tmp_path / "small", measured=measured(*models))
    run = read_run(tmp_path / "small")
    conv, relu, _, linear = run.layers
    assert (conv.kept, conv.shape, conv.bytes, conv.float_bytes) == (0.5, "8 x 3 x 3 x 3 → 4 x 3 x 3 x 3", 432, 864)
    assert (relu.kept, relu.inputs) == (None, (0,)) and linear.kept == 0.5
    assert run.kind == "pruned Sequential" and run.drawing is not None and run.notes == ("a note",)


def test_the_numbers_at_the_top(models: tuple[nn.Module, nn.Module, torch.Tensor], tmp_path: Path) -> None:
    save(models[1], tmp_path / "small", measured=measured(*models))
    cards = {card.label: card for card in read_run(tmp_path / "small").cards}
    accuracy = cards["Top-1 accuracy"]
    assert (accuracy.value, accuracy.before) == ("90.50 %", "92.00 %")
    assert accuracy.note == "of the pruned, -1.50 ± 0.80 points, on 500 samples"
    assert (cards["Multiplications"].value, cards["Multiplications"].share) == ("1 M", 0.5)
    assert (cards["Time of a call"].value, cards["Time of a call"].share) == ("1.5 ms", 0.75)
    assert cards["Output SQNR"].value == "12.2 dB" and cards["Size of the weights"].before == "5.52 kB"


def test_a_removed_layer_is_in_a_table(models: tuple[nn.Module, nn.Module, torch.Tensor], tmp_path: Path) -> None:
    dense = nn.Sequential(*models[0], nn.Linear(4, 4))
    save(models[1], tmp_path / "small", measured=measured(dense, models[1], models[2]))
    run = read_run(tmp_path / "small")
    assert [(table.title, table.rows) for table in run.tables] == [("Removed layers", (("4", "linear", "4 x 4"),))]
    assert "4" not in [layer.name for layer in run.layers]


def test_without_measurements_nothing_is_made_up(
    models: tuple[nn.Module, nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    save(models[1], tmp_path / "small")
    run = read_run(tmp_path / "small")
    assert [(card.label, card.before, card.share) for card in run.cards] == [("Size of the weights", "", None)]
    assert all(layer.kept is None and layer.float_bytes is None for layer in run.layers)
    assert "what it cost is not known" in run.notes[0]


def test_damage_is_an_error(models: tuple[nn.Module, nn.Module, torch.Tensor], tmp_path: Path) -> None:
    folder = save(models[1], tmp_path / "small", measured=measured(*models))
    description = json.loads((folder / "channels.json").read_text())
    (folder / "channels.json").write_text(json.dumps({**description, "measured": {"model": 1}}))
    with pytest.raises(RecordError, match=r"channels\.json is damaged.*measured\.before is missing"):
        read_run(folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(RecordError, match=r"model\.safetensors cannot be read"):
        read_run(folder)
