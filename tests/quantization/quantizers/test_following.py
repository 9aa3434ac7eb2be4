"""Grids that follow the data while training: where they go, when they stand, and that gradients do not suffer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparsebit.config.targets import Target
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import PerChannel, PerTensor, TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.registration import build_quantizer
from tests.quantization.tiny_training import data, numbers, ready, train

AFFINE, SYMMETRIC = TensorSpec(8, False, PerTensor()), TensorSpec(8, True, PerTensor())
CHANNELS = TensorSpec(8, True, PerChannel(0))


def following(
    spec: TensorSpec, first: Tensor, target: Target = "activation", *, ratio: float = 0.9, **settings: str
) -> Quantizer:
    num_scales = 1 if spec.granularity.kind == "tensor" else len(first)
    quantizer = build_quantizer("uniform", spec, target, name="x", num_scales=num_scales, ema_ratio=ratio, **settings)
    quantizer.update_observer(first)
    quantizer.calc_qparams()
    quantizer.enable_quant()
    quantizer.follow_range()
    return quantizer.train()


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize("spec", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_an_activations_range_is_a_moving_average(spec: TensorSpec) -> None:
    quantizer = following(spec, torch.tensor([-1.0, 3.0]), ratio=0.75)
    low, high = quantizer.dequantized_range()
    batches = [(-2.0, 3.0), (-1.0, 9.0), (-4.0, 5.0)]
    for ends in batches:
        quantizer(leaf(*ends))
        wide = max(-ends[0] / spec.qmin * spec.qmax, ends[1]) if spec.symmetric else ends[1]
        low, high = 0.75 * low + 0.25 * ends[0], 0.75 * high + 0.25 * wide
    expected = high / spec.qmax if spec.symmetric else (high - low) / 255
    torch.testing.assert_close(quantizer.scale, expected)
    if not spec.symmetric:
        torch.testing.assert_close(quantizer.zero_point, -low / expected)


def test_small_steps_of_the_zero_point_add_up() -> None:
    """A zero point that was rounded at every step would stay where it is."""
    quantizer = following(AFFINE, torch.tensor([-1.0, 1.0]), ratio=0.99)
    for _ in range(1000):
        quantizer(leaf(-1.01, 0.99))
    assert round(float(quantizer.zero_point)) == round(255 * 1.01 / 2) != 128


def test_a_weights_range_is_taken_at_once() -> None:
    quantizer = following(CHANNELS, torch.tensor([[1.0, -1.0], [2.0, 0.5]]), "weight")
    weight = torch.tensor([[4.0, -3.0], [0.1, -0.2]], requires_grad=True)
    output = quantizer(weight)
    expected, _ = qparams_from_range(torch.tensor([-3.0, -0.2]), torch.tensor([4.0, 0.1]), CHANNELS)
    torch.testing.assert_close(quantizer.scale, expected)
    torch.testing.assert_close(output, weight, rtol=0, atol=float(expected.max()) / 2)


def test_the_observer_of_the_config_finds_the_range() -> None:
    first = torch.randn(1, 4096)
    ranges = [
        following(SYMMETRIC, first, "weight", observer=observer)(2 * first.requires_grad_()).detach().abs().max()
        for observer in ("minmax", "percentile")
    ]
    assert ranges[1] < 0.95 * ranges[0]


def test_zeros_teach_nothing() -> None:
    quantizer = following(CHANNELS, torch.tensor([[1.0], [2.0]]), "weight")
    before = quantizer.scale.clone()
    quantizer(torch.tensor([[0.0], [4.0]], requires_grad=True))
    assert float(quantizer.scale[0]) == float(before[0]) and float(quantizer.scale[1]) == 2 * float(before[1])


def test_when_it_stands() -> None:
    quantizer = following(AFFINE, torch.tensor([-1.0, 1.0]))
    before = quantizer.scale.clone()
    with torch.no_grad():
        quantizer(leaf(-9.0, 9.0))
    quantizer.eval()(leaf(-9.0, 9.0))
    quantizer.train().disable_quant()
    quantizer(leaf(-9.0, 9.0))
    quantizer.enable_quant()
    quantizer.is_held = True
    quantizer(leaf(-9.0, 9.0))
    assert torch.equal(quantizer.scale, before)
    quantizer.is_held = False
    quantizer(leaf(-9.0, 9.0))
    assert not torch.equal(quantizer.scale, before)


def test_a_second_forward_before_the_backward() -> None:
    """A layer that is called twice, or losses that are added up."""
    quantizer = following(AFFINE, torch.tensor([-1.0, 1.0]))
    first, second = leaf(-1.0, 0.5, 9.0), leaf(-8.0, 0.5, 9.0)
    (quantizer(first).sum() + quantizer(second).sum()).backward()
    assert first.grad is not None and first.grad.tolist() == [1.0, 1.0, 0.0]


def test_computing_again_does_not_move_it_again() -> None:
    plain, checkpointed = (following(AFFINE, torch.tensor([-1.0, 1.0])) for _ in range(2))
    x, y = leaf(-2.0, 0.3, 1.0), leaf(-2.0, 0.3, 1.0)
    plain(x).square().sum().backward()
    checkpoint(lambda t: checkpointed(t).square(), y, use_reentrant=False).sum().backward()
    assert torch.equal(plain.scale, checkpointed.scale) and torch.equal(x.grad, y.grad)


def test_nan_is_refused_by_name() -> None:
    with pytest.raises(CalibrationError, match="x: values from"):
        following(AFFINE, torch.tensor([-1.0, 1.0]))(leaf(float("nan"), 1.0))


@pytest.mark.parametrize("way", ["fixed", "following"])
def test_models_follow_where_they_are_told_to(way: str) -> None:
    qmodel = ready(way)
    before = numbers(qmodel)
    train(qmodel, 2)
    moved = {n for n, value in numbers(qmodel).items() if n.endswith(".scale") and not torch.equal(value, before[n])}
    expected = {f"{q.name}" for q in qmodel.quantizers() if not q.fake_fused}
    assert len(moved) == (len(expected) if way == "following" else 0)


def test_init_qat_again_without_it() -> None:
    qmodel = ready("following")
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(data()[0])
    qmodel.init_QAT()
    assert not any(quantizer.follows for quantizer in qmodel.quantizers())


def test_learned_grids_do_not_follow() -> None:
    qmodel = ready("lsq")
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(data()[0])
    with pytest.raises(ConfigError, match="none would follow its data"):
        qmodel.init_QAT(follow_ranges=True)


def test_infinity_in_a_compiled_step_leaves_the_grid_alone() -> None:
    """There nobody can look at the values."""
    torch._dynamo.reset()
    quantizer = following(AFFINE, torch.tensor([-1.0, 1.0]))
    before = quantizer.scale.clone()
    compiled = torch.compile(quantizer, backend="aot_eager", fullgraph=True)
    compiled(leaf(-1.0, float("inf")))
    assert torch.equal(quantizer.scale, before)
    compiled(leaf(-1.0, 3.0))
    assert not torch.equal(quantizer.scale, before)
