from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sparsebit.errors import RecordError
from sparsebit.records.model_folders import FILE, PERPLEXITY_FILE, PackedModel
from sparsebit.report import read_run

pytest.importorskip("transformers", minversion="5.0")

from sparsebit.llm import Calibration, Recipe, quantize
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text

RECIPE = Recipe(bits=4, group_size=32, sweeps=1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of three blocks in 4 bits."""
    folder = tmp_path_factory.mktemp("language")
    write_text(folder / "text.txt")
    source = with_tokenizer(saved(tiny_model(), folder / "model"))
    given = Calibration(folder / "text.txt", num_samples=6, length=24)
    return quantize(source, folder / "packed", RECIPE, given, check=False).folder


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(packed, tmp_path / "packed"))


def test_layers_with_bits_bytes_and_error(packed: Path) -> None:
    run = read_run(packed)
    assert run.kind == "quantized LlamaForCausalLM" and len(run.layers) == 21
    by_name = {layer.name: layer for layer in run.layers}
    layer = by_name["model.layers.1.mlp.down_proj"]
    assert (layer.bits, layer.arithmetic, layer.shape, layer.macs) == (4, "weight-only", "64 x 128", 64 * 128)
    # In float16. 64 x 128 codes of 4 bits; 64 x 4 scales, and zero points of 4 bits; the shape as two int64.
    assert layer.float_bytes == 2 * 64 * 128 and layer.bytes == 64 * 128 // 2 + 256 * 2 + 256 // 2 + 16
    assert layer.sqnr_db is not None and 5 < layer.sqnr_db < 40
    assert (layer.tensors[0].format, layer.tensors[0].num_scales) == ("int4, groups of 32, zero points", 256)


def test_edges_are_the_order_of_stages(packed: Path) -> None:
    run = read_run(packed)
    names = [layer.name.removeprefix("model.layers.") for layer in run.layers]
    read_by = {name: [names[one] for one in layer.inputs] for name, layer in zip(names, run.layers, strict=True)}
    assert read_by["0.self_attn.q_proj"] == [] and read_by["1.self_attn.v_proj"] == ["0.mlp.down_proj"]
    assert sorted(read_by["2.self_attn.o_proj"]) == [f"2.self_attn.{name}_proj" for name in "kqv"]
    assert any("the order in which layers run" in note for note in run.notes) and run.drawing is not None


def test_tables_and_cards(packed: Path) -> None:
    run = read_run(packed)
    cards = {card.label: card for card in run.cards}
    record = PackedModel.from_dict(json.loads((packed / FILE).read_text()), FILE)
    assert cards["Bits of a weight"].value == f"{record.bits_per_weight:.2f}" and cards["Packed layers"].value == "21"
    assert 0.2 < (cards["Size of the files"].share or 0) < 0.6 and "Perplexity" not in cards
    tables = {table.title: table for table in run.tables}
    assert len(tables["What rounding gained"].rows) == 21
    assert tables["Tensors in float"].rows[0][0] in ("model.embed_tokens.weight", "lm_head.weight")


def test_the_perplexity_that_was_measured(folder: Path) -> None:
    (folder / PERPLEXITY_FILE).write_text('{"float": 40.0, "packed": 41.0, "windows": 8, "length": 512}')
    card = read_run(folder).cards[0]
    assert (card.label, card.value, card.before) == ("Perplexity", "41.00", "40.00")
    assert card.note == "+2.50% on held-out text, 8 windows of 512 tokens"
    (folder / PERPLEXITY_FILE).write_text('{"float": 40.0}')
    with pytest.raises(RecordError, match=r"perplexity\.json is damaged"):
        read_run(folder)


def test_a_folder_of_another_program_shows_what_its_files_say(folder: Path) -> None:
    (folder / FILE).unlink()
    run = read_run(folder)
    assert len(run.layers) == 21 and run.layers[0].name.startswith("model.layers.0.")
    assert all(layer.bits is None and layer.sqnr_db is None and layer.float_bytes is None for layer in run.layers)
    assert "the errors of layers and the size before are not known" in run.notes[1]
    assert [card.share for card in run.cards] == [None, None]


def test_mixed_bits(folder: Path) -> None:
    layers = {"model.layers.0.mlp.up_proj": {"bits": 3, "num_weights": 10, "costs": {"2": 0.5, "3": 0.25}}}
    (folder / "bit_allocation.json").write_text(json.dumps({"limit": 3.2, "layers": layers}))
    table = next(table for table in read_run(folder).tables if table.title == "Bits of each layer")
    assert table.columns == ("layer", "bits", "cost of 2 bits", "cost of 3 bits")
    assert table.rows == (("model.layers.0.mlp.up_proj", 3, 0.5, 0.25),) and "3.2 bits" in table.note


@pytest.mark.parametrize("text", ['{"format": "other"}', '{"format": "sparsebit-packed-model", "version": 1}', "[]"])
def test_a_damaged_record_is_an_error(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    with pytest.raises(RecordError, match=FILE):
        read_run(folder)


def test_a_config_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(RecordError, match="has no safetensors files"):
        read_run(tmp_path)
