"""Experts: each is calibrated on its own tokens or told with its fallback, and the files load with transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm import Calibration, QuantLinear, Recipe, convert, load, quantize
from sparsebit.llm.models.architectures import architecture_of, passes_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import SeparateExperts, experts_in
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing.block_rounding import fallback_of
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.rounding import round_weight
from tests.llm.quantizing.test_quantize_folder import contents
from tests.llm.tiny_models import saved, stopped_after, tiny_model, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
GPTQ = Recipe(bits=4, group_size=32, symmetric=True, sweeps=1)
FAST = Recipe(method="rtn", scale_search="none", group_size=32, symmetric=True)
TYPES = ["mixtral", "qwen3_moe"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}


def small(model_type: str) -> Any:
    return tiny_model(model_type, **SIZES)


def source_of(model: Any, folder: Path) -> Path:
    write_text(folder / "text.txt")
    return with_tokenizer(saved(model, folder / "model"))


def calibration(source: Path, num_samples: int = 6) -> Calibration:
    return Calibration(source.parent / "text.txt", num_samples=num_samples, length=24)


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_read_their_own_tokens(model_type: str, tmp_path: Path) -> None:
    skeleton = Skeleton(ModelFolder(saved(small(model_type), tmp_path)))
    tokens = torch.randint(3, 96, (5, 20), generator=torch.Generator().manual_seed(1))
    walk = BlockWalk(skeleton, architecture_of(skeleton.model), tokens, with_float=True, batch_size=2)
    walk.start()
    block = skeleton.fill("model.layers.0")
    stages = walk.stages(block)
    first, second = passes_of(block, stages)[-2:]
    assert len(first) == len(second) == 4 and [len(stage) for stage in (first[0], second[0])] == [2, 1]
    reads: dict[str, list[torch.Tensor]] = {stage[0]: [] for stage in (*first, *second)}
    for name, held in reads.items():
        block.get_submodule(name).register_forward_pre_hook(lambda _, args, held=held: held.append(args[0]))
    gathered = {name: one for part in (first, second) for name, one in walk.moments_together(block, part).items()}
    assert sum(gathered[stage[0]].num_rows for stage in first) == 2 * tokens.numel()  # two experts for each token
    for name, moments in gathered.items():
        x = torch.cat(reads[name][: len(reads[name]) // 2]).double()  # the second pass runs the block again
        torch.testing.assert_close(moments.hessian()[0], x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_end_to_end(model_type: str, tmp_path: Path) -> None:
    source = source_of(small(model_type), tmp_path)
    made = quantize(source, tmp_path / "packed", GPTQ, calibration(source, 16), batch_size=16)
    assert made.check is not None and made.check.difference <= 1e-3
    packed = load(made.folder)
    experts = [part for module in packed.modules() if isinstance(module, SeparateExperts) for part in module.modules()]
    num_blocks = 1 if model_type == "qwen3_moe" else 2
    assert sum(isinstance(part, QuantLinear) for part in experts) == len(made.experts) == num_blocks * 4 * 3
    assert not any(type(part) is torch.nn.Linear for part in experts)
    floats = load(source)
    for name, one in made.experts.items():  # too few tokens: rounded without text, else not
        weight = floats.get_submodule(name).weight
        plain = round_weight(weight, None, GPTQ.without_text(), name, stored=torch.float16).packed
        assert torch.equal(plain.qweight, packed.get_submodule(name).qweight) == (one.fallback is not None)
    assert any(one.fallback is None for one in made.experts.values())


def test_an_expert_without_tokens_is_told(tmp_path: Path) -> None:
    model = small("mixtral")
    with torch.no_grad():  # the last expert is never chosen: the others have larger logits for one sign or the other
        router = model.model.layers[0].mlp.gate.weight
        router[0], router[1], router[2], router[3] = router[0], -router[0], 0.5 * router[2], 0.0
    source = source_of(model, tmp_path)
    made = quantize(source, tmp_path / "packed", GPTQ, calibration(source), batch_size=4)
    path = "model.layers.0.mlp.experts"
    counts = {name: one.num_tokens for name, one in made.experts.items() if name.startswith(path)}
    assert sum(counts[f"{path}.{number}.w1"] for number in range(4)) == 2 * 6 * 24
    assert all(counts[f"{path}.{n}.w1"] == counts[f"{path}.{n}.w3"] == counts[f"{path}.{n}.w2"] for n in range(4))
    for name, one in made.experts.items():
        columns = 64 if name.endswith("w2") else 32
        assert one.fallback == fallback_of(one.num_tokens, columns, GPTQ)
    told = made.experts[f"{path}.0.w2"].fallback
    assert told is not None and told.startswith("rtn, scales searched without a Hessian") and "need 192" in told


def test_the_fallback_depends_on_the_method() -> None:
    assert fallback_of(191, 64, GPTQ) is not None and fallback_of(192, 64, GPTQ) is None
    rtn = replace(FAST, scale_search="nearest")
    assert fallback_of(15, 64, rtn) is not None and fallback_of(16, 64, rtn) is None


def test_an_interrupted_run_keeps_the_counts(tmp_path: Path) -> None:
    source = source_of(small("qwen3_moe"), tmp_path)
    whole = quantize(source, tmp_path / "whole", GPTQ, calibration(source), check=False)
    with stopped_after():
        quantize(source, tmp_path / "packed", GPTQ, calibration(source), check=False)
    again = quantize(source, tmp_path / "packed", GPTQ, calibration(source), check=False, memory_budget=1)
    assert again.num_resumed == 1 and again.experts == whole.experts
    assert contents(again.folder) == contents(whole.folder)


def test_mixed_bits_give_all_experts_the_same(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    source = source_of(small("qwen3_moe"), tmp_path)
    recipe = Recipe(group_size=32, symmetric=True, sweeps=0, candidate_bits=(2, 4), average_bits=3.9)
    made = quantize(source, tmp_path / "packed", recipe, calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3
    of_experts = {layer.bits for name, layer in made.formats.items() if ".experts." in name}
    assert len(of_experts) == 1
    groups = json.loads((made.folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert sum(any("experts" in target for target in group["targets"]) for group in groups) == 1


@pytest.mark.parametrize("model_type", TYPES)
def test_bfloat16_files_are_compared_in_float32(model_type: str, tmp_path: Path) -> None:
    source = saved(small(model_type), tmp_path / "model", dtype=torch.bfloat16)
    made = quantize(source, tmp_path / "packed", replace(FAST, bits=8))
    assert made.check is not None and made.check.difference <= 1e-5


def test_routers_stay_float(tmp_path: Path) -> None:
    made = quantize(source_of(small("mixtral"), tmp_path), tmp_path / "packed", FAST, check=False)
    ignored = json.loads((made.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.block_sparse_moe.gate" in ignored
    assert "model.layers.0.block_sparse_moe.gate.weight" in ModelFolder(made.folder)


class TestRefusals:
    def test_zero_points(self, tmp_path: Path) -> None:
        source = source_of(small("mixtral"), tmp_path)
        with pytest.raises(ConfigError, match="--symmetric"):
            quantize(source, tmp_path / "packed", replace(FAST, symmetric=False))

    def test_gptq_files(self, tmp_path: Path) -> None:
        made = quantize(source_of(small("mixtral"), tmp_path), tmp_path / "packed", FAST, check=False)
        with pytest.raises(DeploymentError, match="has experts"):
            convert(made.folder, tmp_path / "gptq", "gptq")

    def test_experts_of_another_layout_stay_stacked(self) -> None:
        model = small("qwen3_moe")
        for block in model.model.layers:
            if hasattr(block.mlp, "experts"):
                block.mlp.experts.has_bias = True
        from sparsebit.llm.models.separate_experts import separate_experts

        assert separate_experts(model, ["rule"]) == ["rule"]
        assert not experts_in(model)
