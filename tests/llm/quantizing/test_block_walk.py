"""The block walk: its streams are what the whole model computes, for every architecture, with and without a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.models.architectures import ARCHITECTURES, Architecture, architecture_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing.block_walk import BlockWalk
from tests.llm.tiny_models import loaded, saved, tiny_model

TOKENS = torch.randint(3, 96, (5, 20), generator=torch.Generator().manual_seed(1))


def inputs_of(model: Any, path: str) -> Tensor:
    """What a layer of the whole model reads, of all tokens."""
    taken: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: taken.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in TOKENS.split(2):
            model(batch, use_cache=False)
    hook.remove()
    return torch.cat(taken)


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"mixtral", "qwen3_moe"}))
@pytest.mark.parametrize("has_row", [True, False], ids=["row", "walked"])
def test_every_layer_reads_what_it_reads_in_the_model(model_type: str, has_row: bool, tmp_path: Path) -> None:
    folder = saved(tiny_model(model_type), tmp_path)
    model, skeleton = loaded(folder), Skeleton(ModelFolder(folder))
    row = architecture_of(skeleton.model)
    walk = BlockWalk(skeleton, row if has_row else Architecture(row.blocks), TOKENS, with_float=True, batch_size=2)
    walk.start()
    for number in range(walk.num_blocks):
        path = f"{row.blocks}.{number}"
        block = skeleton.fill(path)
        stages = walk.stages(block)
        assert {frozenset(stage) for stage in stages} == {frozenset(stage) for stage in row.stages or ()}
        walk.run_float(block, stages)
        if number == walk.num_blocks - 1:
            for stage in stages:
                moments = walk.moments(block, block, stage)
                x = inputs_of(model, f"{path}.{stage[0]}").double()
                expected = (x.T @ x / len(x))[None]
                torch.testing.assert_close(moments.hessian(), expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(moments.cross(), moments.hessian(), rtol=1e-4, atol=1e-4)
        walk.advance(block, stages)
        skeleton.empty(path)
    assert len(walk.store) == len(TOKENS.split(2))  # the float outputs of the last block
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("bloom", {"n_layer": 5}), ("qwen3_5_text", LINEAR_ATTENTION)],
    ids=["blocks that give tuples", "convolutions"],
)
def test_architectures_without_a_row(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With more blocks of tuples than dimensions, the model took its hidden states apart."""
    folder = saved(tiny_model(model_type, **changes), tmp_path)
    model, skeleton = loaded(folder), Skeleton(ModelFolder(folder))
    row = architecture_of(skeleton.model)
    assert row.stages is None
    walk = BlockWalk(skeleton, row, TOKENS, with_float=False, batch_size=2)
    walk.start()
    for number in range(walk.num_blocks):
        block = skeleton.fill(f"{row.blocks}.{number}")
        stages = walk.stages(block)
        for stage in stages:
            x = inputs_of(model, f"{row.blocks}.{number}.{stage[0]}").double()
            found = walk.moments(block, block, stage).hessian()
            torch.testing.assert_close(found, (x.T @ x / len(x))[None], rtol=1e-4, atol=1e-4)
        walk.advance(block, stages)


def test_without_memory_for_inputs_each_batch_has_one_float_state_at_a_time(tmp_path: Path) -> None:
    """Outputs that nothing reads yet are computed when the block is done; the moments are the same."""
    folder = saved(tiny_model(), tmp_path)
    found = []
    for budget in (1 << 30, 1):
        skeleton = Skeleton(ModelFolder(folder))
        row = architecture_of(skeleton.model)
        walk = BlockWalk(skeleton, row, TOKENS, with_float=True, batch_size=2, memory_budget=budget)
        walk.start()
        for number in range(walk.num_blocks):
            block = skeleton.fill(f"{row.blocks}.{number}")
            stages = walk.stages(block)
            walk.run_float(block, stages, need_outputs=False)
            if budget == 1:
                assert len(walk.store) == 2 * len(walk.batches)
            moments = [walk.moments(block, block, stage) for stage in stages]
            walk.advance(block, stages, block)
        found.append([one.cross() for one in moments])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert len(walk.store) == 0


def _scaled(forward: Any) -> Any:
    """Blocks whose outputs are changed in place by the model around them."""

    def run(self: Any, **kwargs: Any) -> Any:
        for block in self.layers[:2]:
            block.register_forward_hook(lambda _, __, output: output.mul_(0.5))
        return forward(self, **kwargs)

    return run


def _twice(forward: Any) -> Any:
    return lambda self, **kwargs: (forward(self, **kwargs), forward(self, **kwargs))[1]


def _fewer(forward: Any) -> Any:
    def run(self: Any, **kwargs: Any) -> Any:
        self.config.num_hidden_layers = 2
        return forward(self, **kwargs)

    return run


def _of_tuples(forward: Any) -> Any:
    def run(self: Any, **kwargs: Any) -> Any:
        for block in self.layers:
            block.register_forward_hook(lambda _, __, output: output[0][1])
        return forward(self, **kwargs)

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scaled, "computes something between its blocks"),
        (_twice, "does not run its blocks one after another, each once"),
        (_fewer, "runs 2 of its 3 blocks"),
        (_of_tuples, "LlamaForCausalLM"),
    ],
    ids=["scaled between", "run twice", "not all run", "other outputs"],
)
def test_models_that_are_no_chain_of_blocks_are_refused(
    change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their layers would be calibrated on what they never read."""
    skeleton = Skeleton(ModelFolder(saved(tiny_model(), tmp_path)))
    kind = type(skeleton.model.base_model)
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    walk = BlockWalk(skeleton, architecture_of(skeleton.model), TOKENS, with_float=False)
    with pytest.raises(ConfigError, match=f"{message}.*cannot be quantized block by block"):
        walk.start()
