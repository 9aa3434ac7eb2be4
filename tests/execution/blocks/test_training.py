from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.execution.blocks.distances import squared_error
from sparsebit.execution.blocks.engine import BlockData, run_blocks
from sparsebit.execution.blocks.find_blocks import Block, whole_graph
from sparsebit.execution.blocks.training import (
    BlockTraining,
    ParameterGroup,
    decayed,
    mean_distance,
    train_block,
    update,
)
from sparsebit.graph.capture import capture


def pruned(visit: Callable[[BlockData, nn.Linear], None], dtype: torch.dtype = torch.float32) -> None:
    """`visit` a layer half of whose weights were set to zero; its targets are those of the whole one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    graph_module = capture(model.eval().to(dtype)).regions[""].graph_module
    batches = [{"input": torch.randn(16, 8).to(dtype)} for _ in range(4)]
    layer: Any = graph_module.get_submodule("2")

    @contextlib.contextmanager
    def as_float(block: Block) -> Any:
        yield

    def cut(data: BlockData) -> None:
        with torch.no_grad():
            layer.weight[:, ::2] = 0
        visit(data, layer)

    run_blocks(graph_module, whole_graph(graph_module), 4, batches.__getitem__, cut, as_float=as_float)


def test_the_output_comes_back_after_pruning() -> None:
    """Nothing here is about quantization: the weights that are left learn what the others did."""

    def visit(data: BlockData, layer: nn.Linear) -> None:
        before = mean_distance(data, squared_error)
        mask = (layer.weight != 0).float()
        first: Any = next(iter(data.block.modules.values()))
        kept = first.weight.clone()
        layer.weight.register_hook(lambda gradient: gradient * mask)
        last = train_block(
            data,
            [ParameterGroup((layer.weight, layer.bias), 0.02, "cosine")],
            BlockTraining(200),
            distance=squared_error,
        )
        after = mean_distance(data, squared_error)
        assert after < 0.5 * before and last == pytest.approx(after, rel=0.5)
        assert torch.equal(first.weight, kept) and first.weight.grad is None and layer.weight.grad is None

    pruned(visit)


def trained(
    training: BlockTraining,
    signed: bool = False,
    *,
    rate: float = 0.01,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    found: list[Tensor] = []

    def visit(data: BlockData, layer: nn.Linear) -> None:
        group = ParameterGroup((layer.bias,), rate, "linear", signed, lowest=-0.5, highest=0.5)
        train_block(data, [group], training, distance=squared_error, **options)
        found.append(layer.bias.detach().clone())

    pruned(visit, dtype)
    return found[0]


@pytest.mark.parametrize(
    "training", [BlockTraining(30, 8), BlockTraining(30, 8, float_share=0.5)], ids=["plain", "mixed inputs"]
)
def test_equal_seeds_give_equal_bits(training: BlockTraining) -> None:
    one = trained(training)
    torch.rand(7)  # the global random state has no part in it
    assert torch.equal(one, trained(training))
    other = BlockTraining(training.steps, training.batch_size, seed=1, float_share=training.float_share)
    assert not torch.equal(one, trained(other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parameters_in_half_precision_learn_as_in_float32(dtype: torch.dtype) -> None:
    """A step of 1e-4 is less than the distance between two numbers of bfloat16 near 0.1."""
    before, after = trained(BlockTraining(1), rate=0.0), trained(BlockTraining(100), rate=2e-4)
    found = trained(BlockTraining(100), rate=2e-4, dtype=dtype)
    assert found.dtype == dtype
    assert (found.float() - after).abs().max() < 0.25 * (after - before).abs().max()


def test_a_signed_step_is_the_rate_and_bounds_hold() -> None:
    start = trained(BlockTraining(1, 64), signed=True) - 0.0
    moved = trained(BlockTraining(2, 64), signed=True)
    assert (moved - start).abs().max() <= 0.01 * 1.0001 and (moved.abs() <= 0.5).all()


def test_the_penalty_and_its_progress() -> None:
    seen: list[float] = []

    def penalty(progress: float) -> Tensor | None:
        seen.append(progress)
        return None

    trained(BlockTraining(4, 8), penalty=penalty)
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_early_stop() -> None:
    counted: list[float] = []

    def penalty(progress: float) -> Tensor | None:
        counted.append(progress)
        return None

    def visit(data: BlockData, layer: nn.Linear) -> None:
        group = ParameterGroup((layer.bias,), 0.0)  # nothing gets better
        train_block(data, [group], BlockTraining(100, 64, patience=2), distance=squared_error, penalty=penalty)

    pruned(visit)
    assert len(counted) < 60


def test_a_loss_that_is_no_number_is_an_error() -> None:
    def visit(data: BlockData, layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.bias.fill_(torch.nan)
        train_block(data, [ParameterGroup((layer.bias,), 0.1)], BlockTraining(5), distance=squared_error)

    with pytest.raises(CalibrationError, match="loss is nan before anything is learned"):
        pruned(visit)


def test_rates_fall() -> None:
    assert [decayed("linear", p) for p in (0.0, 0.5, 1.0)] == [1.0, 0.5, 0.0]
    assert [decayed("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert decayed("constant", 0.7) == 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"steps": 0}, "1 or more"), ({"batch_size": 0}, "1 or more"), ({"float_share": 1.5}, "0 to 1"),
    ({"patience": -1}, "0 or more"),
])  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockTraining(**options)


def test_weights_of_the_elements() -> None:
    output, target = (torch.tensor([[1.0, 2.0]]),), (torch.tensor([[1.0, 1.0]]),)
    assert squared_error(output, target) == 0.5
    assert squared_error(output, target, (torch.tensor([[1.0, 0.0]]),)) == 0
    with pytest.raises(CalibrationError, match="no float output"):
        squared_error((torch.tensor([1]),), (torch.tensor([1]),))


def test_steps_whose_state_is_kept_elsewhere_are_those_of_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, generator=generator), torch.randn(2, 3, generator=generator)]
    gradients = [[torch.randn(one.shape, generator=generator) for one in start] for _ in range(3)]
    expected = [one.clone().requires_grad_() for one in start]
    adam = torch.optim.Adam([{"params": expected[:1], "lr": 0.1}, {"params": expected[1:], "lr": 0.2}])
    for step in gradients:
        for one, gradient in zip(expected, step, strict=True):
            one.grad = gradient.clone()
        adam.step()
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in start]
    for number, step in enumerate(gradients):
        own = [one.requires_grad_() for one in start]
        groups = [ParameterGroup((own[0],), 0.1), ParameterGroup((own[1],), 0.2)]
        update(groups, step, moments, number)
        start = [one.detach().clone() for one in own]  # other tensors, the same values
        moments = [(mean.clone(), square.clone()) for mean, square in moments]
    for one, other in zip(start, expected, strict=True):
        torch.testing.assert_close(one, other.detach())
