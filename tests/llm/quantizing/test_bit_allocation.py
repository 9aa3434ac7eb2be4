"""Mixed bits: costs that are those of the loss, the choice, and a folder that loads and resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sparsebit.errors import BudgetError, CheckpointError, ConfigError
from sparsebit.execution.run_folder import RunFolder
from sparsebit.llm import Calibration, Recipe, load, quantize
from sparsebit.llm.models.architectures import architecture_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing.bit_allocation import BitAllocation, BitCosts, LayerBits, allocate, bit_costs
from sparsebit.llm.quantizing.block_walk import BlockWalk
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer, write_text

MIXED = Recipe(method="rtn", group_size=32, candidate_bits=(2, 3, 4), average_bits=3.0)


def costs_of(folder: Path, tokens: torch.Tensor, recipe: Recipe = MIXED) -> BitCosts:
    skeleton = Skeleton(ModelFolder(folder))
    architecture = architecture_of(skeleton.model)
    walk = BlockWalk(skeleton, architecture, tokens, with_float=False, batch_size=3)
    return bit_costs(walk, recipe, [f"{architecture.blocks}.{number}" for number in range(walk.num_blocks)])


def test_the_cheapest_choice_within_the_mean() -> None:
    costs = {"a": {2: 9.0, 4: 1.0}, "b": {2: 2.0, 4: 1.0}, "c": {2: 5.0, 4: 0.0}}
    found = allocate(costs, {"a": 10, "b": 10, "c": 10}, [], 3.4)
    assert {name: layer.bits for name, layer in found.layers.items()} == {"a": 4, "b": 2, "c": 4}
    assert found.average_bits == pytest.approx(10 / 3) and found.cost == 3.0
    tied = allocate(costs, {"a": 10, "b": 10, "c": 10}, [("a", "b")], 3.4)
    assert {name: layer.bits for name, layer in tied.layers.items()} == {"a": 4, "b": 4, "c": 2}
    assert BitAllocation.from_json(tied.to_json(), "x") == tied
    with pytest.raises(BudgetError, match="average bits"):
        allocate(costs, {"a": 10, "b": 10, "c": 10}, [], 1.5)
    with pytest.raises(CheckpointError, match="x is damaged"):
        BitAllocation.from_json("{}", "x")


@pytest.mark.parametrize("model_type", ["llama", "phi", "opt"])
def test_gradients_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    """The costs from block after block equal those of a backward pass through all of the model."""
    folder = saved(tiny_model(model_type), tmp_path / "model", dtype=torch.float32)
    tokens = torch.randint(3, 90, (5, 16))
    recipe = replace(MIXED, scale_search="none")
    found = costs_of(folder, tokens, recipe)
    model = loaded(folder)
    squares: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}

    def note(name: str, x: torch.Tensor, output: torch.Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        moments[name] = rows.t() @ rows / len(rows)
        output.register_hook(lambda g: squares.__setitem__(name, g.reshape(-1, g.shape[-1]).square().mean(0)))

    for name in found.costs:
        model.get_submodule(name).register_forward_hook(lambda _, x, y, name=name: note(name, x[0], y))
    logits = model(tokens, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    assert {*found.costs} == set(squares) and len(found.costs) >= 18
    for name, costs in found.costs.items():
        weight = model.get_submodule(name).weight.detach()
        made = quantized(weight, 3)
        error = weight - made
        expected = 0.5 * float((((error @ moments[name]) * error).sum(-1) * squares[name]).sum())
        assert costs[3] == pytest.approx(expected, rel=2e-3)
        assert costs[2] > costs[3] > costs[4] > 0


def quantized(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to nearest in groups of 32, with zero points."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (((groups / scale).round() + zero).clamp(0, 2**bits - 1) - zero).mul(scale).flatten(1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return with_tokenizer(saved(tiny_model(), tmp_path / "model"))


def test_a_mixed_folder_loads(source: Path) -> None:
    pytest.importorskip("compressed_tensors")
    text = Calibration(source.parent / "text.txt", num_samples=6, length=24)
    made = quantize(source, source.parent / "packed", MIXED, text)
    assert made.check is not None and made.check.difference <= 1e-3
    assert not any("one matrix" in reason for reason in made.check.vllm)
    assert made.allocation is not None and made.allocation.average_bits <= 3.0
    bits = {name: layer.bits for name, layer in made.formats.items()}
    assert bits == {name: layer.bits for name, layer in made.allocation.layers.items()}
    assert len({*bits.values()}) > 1
    for number in range(3):
        block = f"model.layers.{number}"
        assert len({bits[f"{block}.self_attn.{name}_proj"] for name in "qkv"}) == 1
        assert bits[f"{block}.mlp.gate_proj"] == bits[f"{block}.mlp.up_proj"]
    written = json.loads((made.folder / "bit_allocation.json").read_text())
    assert {name: layer["bits"] for name, layer in written["layers"].items()} == bits
    packed = load(made.folder)
    assert {name: packed.get_submodule(name).bits for name in bits} == bits


def test_a_resumed_run_keeps_the_choice(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Calibration(source.parent / "text.txt", num_samples=6, length=24)

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, source.parent / "packed", MIXED, text, check=False)
    monkeypatch.setattr("sparsebit.llm.quantizing.quantization_run.bit_costs", failing)
    made = quantize(source, source.parent / "packed", MIXED, text, check=False)
    assert made.allocation is not None and made.allocation.limit == 3.0
    assert isinstance(next(iter(made.allocation.layers.values())), LayerBits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate_bits": (2, 4)}, "give an average from 2 to 4"),
        ({"average_bits": 3.0}, "two or more different candidates"),
        ({"candidate_bits": (2, 5), "average_bits": 3.0}, "candidates of 2, 3, 4, 8"),
        ({"candidate_bits": (2, 4), "average_bits": 5.0}, "give an average from 2 to 4"),
        ({"candidate_bits": (2, 4), "average_bits": 3.0, "bits": 3}, "leave bits out"),
    ],
    ids=["no-average", "no-candidates", "unknown", "too-much", "bits"],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)  # type: ignore[arg-type]
