from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.numerics.qparams import broadcast_to, qparams_from_range
from sparsebit.numerics.reference import fake_quantize
from sparsebit.numerics.rounding import scale_search_math
from sparsebit.numerics.rounding.gptq_math import (
    InverseFactor,
    _descend_lines,
    _refit_lines,
    _round_lines,
    quantize,
    round_nearest,
    row_loss,
    with_variance,
)
from sparsebit.numerics.rounding.gptq_target_math import chosen_damping, chosen_rounding, target_weight
from sparsebit.numerics.rounding.hessian import damped, inverse_factor
from sparsebit.numerics.rounding.scale_search_math import Rounding, search_scale
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec, to_rows
from sparsebit.numerics.weight_grid import Grid, set_numbers, shared_columns

CHANNEL = PerChannel(0)
PLAIN = Rounding(act_order=False, scale_search="none", sweeps=0, refit=False)
GRANULARITIES = {"tensor": PerTensor(), "channel": PerChannel(0), "group": PerGroup(1, 5), "input": PerChannel(1)}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(rows: int, columns: int, samples: int, seed: int = 0, groups: int = 1) -> tuple[Tensor, Tensor]:
    """A weight, and second moments of inputs that correlate."""
    inputs = numbers(groups, samples, columns, seed=seed) @ numbers(groups, columns, columns, seed=seed + 1)
    inputs = inputs * torch.rand(columns, generator=torch.Generator().manual_seed(seed)).double() ** 2
    return numbers(groups, rows, columns, seed=seed + 2), inputs.mT @ inputs / samples


def grid_of(W: Tensor, bits: int = 4, symmetric: bool = True, granularity: Granularity = CHANNEL) -> Grid:
    """The grid of the weight's extremes; its groups are rows of one weight."""
    groups, _rows, columns = W.shape
    weight = W.reshape(-1, columns)
    spec = TensorSpec(bits, symmetric=symmetric, granularity=granularity)
    flat = to_rows(weight, granularity)
    scale, zero_point = qparams_from_range(flat.amin(1).float(), flat.amax(1).float(), spec)
    index = broadcast_to(torch.arange(scale.numel()), weight.shape, granularity).expand(weight.shape)
    return Grid(scale.double(), zero_point.double(), index.reshape(groups, -1, columns), spec)


def round_columns(W: Tensor, U: Tensor, grid: Grid, block_size: int) -> Tensor:
    lines = grid.lines()
    return lines.codes(_round_lines(W.mT.contiguous(), U, lines, block_size)).mT


def descend(W: Tensor, H: Tensor, codes: Tensor, grid: Grid, block_size: int) -> Tensor:
    lines = grid.lines()
    return lines.codes(_descend_lines(W.mT.contiguous(), H, lines.steps(codes.mT.contiguous()), lines, block_size)).mT


def refit_scale(W: Tensor, H: Tensor, codes: Tensor, grid: Grid) -> Grid:
    lines = grid.lines()
    return _refit_lines(W.mT.contiguous(), H, lines.steps(codes.mT.contiguous()), lines).grid


def brute_force(w: Tensor, hessian: Tensor, grid: Grid) -> float:
    codes = range(grid.spec.qmin, grid.spec.qmax + 1)
    choices = torch.tensor(list(itertools.product(codes, repeat=w.shape[-1])), dtype=torch.float64)
    values = (choices - grid.zero_point[0]) * grid.scale[0]
    error = w[0] - values
    return float(((error @ hessian[0]) * error).sum(1).min())


def test_nearest_is_the_reference() -> None:
    W, _ = problem(4, 12, 50)
    for symmetric, granularity in itertools.product([True, False], GRANULARITIES.values()):
        grid = grid_of(W, 3, symmetric, granularity)
        expected = fake_quantize(W[0], grid.scale, grid.zero_point, grid.spec)
        torch.testing.assert_close(grid.values(grid.nearest(W))[0], expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("samples", [3, 200], ids=["few samples", "many"])
@pytest.mark.parametrize("rounding", [
    PLAIN, Rounding(num_candidates=6), replace(PLAIN, act_order=True), replace(PLAIN, refit=True),
    replace(PLAIN, sweeps=3), replace(PLAIN, scale_search="nearest", num_candidates=5),
    Rounding(scale_search="gptq", num_candidates=5),
], ids=["plain", "default", "act-order", "refit", "sweeps", "nearest search", "gptq search"])  # fmt: skip
@pytest.mark.sample(33)
def test_never_worse_than_round_to_nearest(granularity: str, symmetric: bool, samples: int, rounding: Rounding) -> None:
    for seed, bits in ((0, 2), (10, 4)):
        W, H = problem(5, 12, samples, seed=seed)
        H[:, 3] = H[:, :, 3] = 0  # a dead column
        grid = grid_of(W, bits, symmetric, GRANULARITIES[granularity])
        found = quantize(W, H, grid, rounding)
        nearest = row_loss(W, grid.values(grid.nearest(W)), H)
        torch.testing.assert_close(found.nearest_loss, nearest)
        torch.testing.assert_close(found.loss, row_loss(W, found.values, H))
        assert found.loss.sum() <= nearest.sum() * (1 + 1e-9)
        if granularity in ("channel", "group"):
            assert (found.loss <= nearest * (1 + 1e-9) + 1e-12).all()
        codes = found.codes
        assert torch.equal(codes, codes.round()) and codes.min() >= grid.spec.qmin and codes.max() <= grid.spec.qmax
        assert torch.equal(found.grid.scale, found.grid.scale.float().double()) and (found.grid.scale > 0).all()
        assert torch.equal(found.grid.zero_point, grid.zero_point)
        # What a model keeps rounds to the same codes.
        kept = found.values.float()[0]
        again = fake_quantize(kept, found.grid.scale.float(), found.grid.zero_point.float(), grid.spec)
        torch.testing.assert_close(again, kept, rtol=0, atol=0)
        other = quantize(W.clone(), H.clone(), grid, rounding)
        assert torch.equal(other.codes, codes) and torch.equal(other.grid.scale, found.grid.scale)


def test_column_by_column_is_the_papers_update() -> None:
    """Algorithm 1, written with the inverse of what remains of the Hessian instead of a factor."""
    W, H = problem(3, 9, 40)
    H = damped(H, 0.01)
    grid = grid_of(W)
    w, expected = W[0].clone(), torch.empty(3, 9, dtype=torch.float64)
    for column in range(9):
        inverse = torch.linalg.inv(H[0, column:, column:])
        values = fake_quantize(w, grid.scale, grid.zero_point, grid.spec)[:, column]
        expected[:, column] = values
        w[:, column:] -= ((w[:, column] - values) / inverse[0, 0])[:, None] * inverse[0]
    for block_size in (1, 4, 128):
        codes = round_columns(W, inverse_factor(H, 0.0), grid, block_size)
        torch.testing.assert_close(grid.values(codes)[0], expected)


def test_it_comes_near_the_best_codes_there_are() -> None:
    gaps = []
    for seed in range(12):
        W, H = problem(1, 6, 100, seed=seed)
        grid = grid_of(W, 2)
        best, found = brute_force(W[0], H, grid), quantize(W, H, grid, Rounding(scale_search="none", refit=False))
        assert float(found.loss) >= best * (1 - 1e-9)
        gaps.append((float(found.loss) / best, float(found.nearest_loss) / best))
    ours, nearest = (sum(gap) / len(gaps) for gap in zip(*gaps, strict=True))
    assert ours < 1 + 0.2 * (nearest - 1)


def test_groups_are_rounded_each_for_itself() -> None:
    W, H = problem(3, 9, 40, groups=4)
    together = quantize(W, H, grid_of(W), Rounding())
    for group in range(4):
        part = slice(group, group + 1)
        alone = quantize(W[part], H[part], grid_of(W[part]), Rounding())
        assert torch.equal(together.codes[part], alone.codes)
        torch.testing.assert_close(together.values[part], alone.values)


def test_act_order_is_plain_gptq_on_sorted_columns() -> None:
    W, H = problem(3, 9, 40)
    order = H[0].diagonal().argsort(descending=True)
    grid = grid_of(W, granularity=PerGroup(1, 4))
    ordered = quantize(W, H, grid, replace(PLAIN, act_order=True))
    sorted_grid = replace(grid, index=grid.index[..., order])
    plain = quantize(W[..., order], H[:, order][..., order], sorted_grid, PLAIN)
    assert torch.equal(ordered.codes[..., order], plain.codes)


def test_descend_never_grows_the_loss_and_ends() -> None:
    W, H = problem(5, 20, 60)
    grid = grid_of(W, 3)
    codes = grid.nearest(W)
    loss = row_loss(W, grid.values(codes), H)
    for _ in range(50):
        after = descend(W, H, codes, grid, block_size=7)
        now = row_loss(W, grid.values(after), H)
        assert (now <= loss * (1 + 1e-12)).all()
        if torch.equal(after, codes):
            break
        codes, loss = after, now
    else:
        raise AssertionError("no end")
    assert torch.equal(descend(W, H, codes, grid, block_size=128), codes)


def test_the_refit_scale_is_the_closed_form() -> None:
    W, H = problem(4, 9, 40)
    grid = grid_of(W)
    q = grid.nearest(W)
    expected = ((q @ H) * W).sum(-1) / ((q @ H) * q).sum(-1)
    torch.testing.assert_close(refit_scale(W, H, q, grid).scale, expected[0], rtol=1e-6, atol=0)
    one = grid_of(W, granularity=PerTensor())
    q = one.nearest(W)
    expected = ((q @ H) * W).sum() / ((q @ H) * q).sum()
    torch.testing.assert_close(refit_scale(W, H, q, one).scale, expected[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_refit_again_and_again_reaches_the_least_squares_scales(granularity: str) -> None:
    W, H = problem(4, 9, 40)
    grid = grid_of(W, 3, symmetric=False, granularity=GRANULARITIES[granularity])
    codes = grid.nearest(W)
    losses = [float(row_loss(W, grid.values(codes), H).sum())]
    for _ in range(150):
        grid = refit_scale(W, H, codes, grid)
        losses.append(float(row_loss(W, grid.values(codes), H).sum()))
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(losses))
    # The same as one least-squares problem: columns of `design` are what each scale adds to the output.
    root = torch.linalg.cholesky(damped(H, 1e-12))[0]
    steps = (codes - grid.zero_point[grid.index])[0]
    parts = [(steps * (grid.index[0] == number)) @ root for number in range(len(grid.scale))]
    design = torch.stack([part.flatten() for part in parts], 1)
    best = torch.linalg.lstsq(design, (W[0] @ root).flatten()[:, None]).solution[:, 0]
    if bool((best > 0).all()):
        residual = float((design @ best - (W[0] @ root).flatten()).square().sum())
        assert losses[-1] <= residual * 1.001


def test_scales_of_codes_that_are_all_zero_stay() -> None:
    W, H = problem(2, 6, 40)
    grid = grid_of(W)
    codes = grid.nearest(W)
    codes[0, 1] = 0
    assert refit_scale(W, H, codes, grid).scale[1] == grid.scale[1]
    H.zero_()
    assert torch.equal(refit_scale(W, H, codes, grid).scale, grid.scale)


def test_no_scale_falls_below_the_smallest() -> None:
    W, H = problem(3, 9, 40)
    grid = grid_of(W)
    grid = replace(grid, smallest=grid.scale * torch.tensor([1.0, 0.9, 0.0]))
    found = quantize(W, H, grid, Rounding(smallest_factor=0.3))
    assert (found.grid.scale >= grid.smallest.float()).all() and found.grid.scale[0] >= grid.scale[0]


def test_the_search_finds_the_better_scale() -> None:
    """One weight is far outside, and its input is almost always zero: clipping it costs nothing."""
    W, _ = problem(2, 12, 40)
    W[..., 0] = 9.0
    H = torch.eye(12, dtype=torch.float64)[None].clone()
    H[0, 0, 0] = 1e-6
    grid = grid_of(W, 3)
    for search in ("nearest", "gptq"):
        rounding = replace(PLAIN, scale_search=search, smallest_factor=0.1)  # type: ignore[arg-type]
        found = quantize(W, H, grid, rounding)
        assert (found.grid.scale < 0.5 * grid.scale).all()
        assert (found.loss < 0.3 * found.nearest_loss).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("most", [1, 1 << 18], ids=["one set at a time", "all sets at once"])
def test_the_search_takes_what_single_candidates_say(
    granularity: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_search_math, "_CPU_ELEMENTS", most)
    W, H = problem(4, 12, 50)
    grid = grid_of(W, 2, symmetric=False, granularity=GRANULARITIES[granularity])
    found = search_scale(W, H, grid, None, Rounding(num_candidates=4, smallest_factor=0.4))
    losses, scales = [], []
    for share in torch.linspace(1, 0.4, 4, dtype=torch.float64).tolist():
        candidate = grid.with_scale(grid.scale * share)
        error = W - candidate.values(candidate.nearest(W))
        inside = grid.index[:, 0, :, None] == grid.index[:, 0, None, :]
        by_element = (error @ torch.where(inside, H, 0.0)) * error
        losses.append(torch.zeros_like(grid.scale).index_add_(0, grid.index.flatten(), by_element.flatten()))
        scales.append(candidate.scale)
    best = torch.stack(losses).argmin(0)
    assert torch.equal(found.scale, torch.stack(scales).gather(0, best[None])[0])
    assert len(best.unique()) > 1 or granularity == "tensor"


def test_few_calls_for_each_column() -> None:
    """On a GPU the number of kernels is the time: 5 for GPTQ and 6 for a sweep, beside those of blocks and groups."""

    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += not func.is_view and "empty" not in str(func)
            return func(*args, **(kwargs or {}))

    counts = {}
    for columns in (128, 256):
        W, H = problem(3, columns, 2 * columns)
        grid = grid_of(W, 2, symmetric=False, granularity=PerGroup(1, columns // 2))  # the same number of groups
        with Calls() as calls:
            quantize(W, H, grid, Rounding(block_size=columns))
        counts[columns] = calls.count
    assert counts[256] - counts[128] <= (5 + 2 * 6) * 128
    assert counts[256] < 25 * 256


def test_one_candidate_is_no_search() -> None:
    W, H = problem(2, 6, 40)
    grid = grid_of(W)
    assert search_scale(W, H, grid, None, Rounding(num_candidates=1)) is grid  # type: ignore[arg-type]


def test_two_candidates_are_a_search() -> None:
    """Codes of -8 to 7 with a scale of 1; half of it is exact."""
    W = torch.tensor([[[-2.5, 0.5, 1.5]]], dtype=torch.float64)
    one = replace(grid_of(W), scale=torch.ones(1, dtype=torch.float64))
    found = search_scale(W, torch.eye(3)[None].double(), one, None, Rounding(num_candidates=2, smallest_factor=0.5))
    assert found.scale.tolist() == [0.5]


def test_columns_that_share_a_scale() -> None:
    W, _ = problem(4, 12, 50)
    found = {name: [c.tolist() for c in shared_columns(grid_of(W, 4, True, g))] for name, g in GRANULARITIES.items()}
    whole = [list(range(12))]
    assert found == {
        "tensor": whole,
        "channel": whole,
        "group": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]],
        "input": [[column] for column in range(12)],
    }


def test_columns_of_a_set_need_not_be_neighbours() -> None:
    grid = replace(grid_of(numbers(1, 2, 5)), index=torch.tensor([[[0, 1, 0, 1, 0]] * 2]))
    assert grid_of(numbers(1, 2, 5)).lines().columns() == [slice(0, 5)]
    assert [torch.as_tensor(columns).tolist() for columns in grid.lines().columns()] == [[0, 2, 4], [1, 3]]


def test_groups_may_number_their_scales_in_another_order() -> None:
    spec = TensorSpec(4, True)
    grid = Grid(torch.ones(4), torch.zeros(4), torch.tensor([[[0, 0, 1, 1]], [[3, 3, 2, 2]]]), spec)
    assert set_numbers(grid).tolist() == [0, 0, 1, 1]


def test_a_factor_that_only_rounds_rounds_the_same() -> None:
    W, H = problem(3, 9, 40)
    factor, grid = InverseFactor(H, Rounding()), grid_of(W)
    codes = factor.round(W, grid)
    torch.testing.assert_close(factor.solved(W), InverseFactor(H, Rounding()).solved(W))
    factor.only_rounds(W.dtype)
    assert torch.equal(factor.round(W, grid), codes)
    with pytest.raises(AssertionError, match="given up"):
        factor.solved(W)


def test_the_target_makes_up_for_changed_inputs() -> None:
    """`|X_float W^T - X V^T|^2` is `tr((T - V) H (T - V)^T)` and a rest that is the same for every V."""
    original, W = numbers(1, 80, 7), numbers(1, 3, 7, seed=1)
    x = original + 0.3 * numbers(1, 80, 7, seed=2)
    H, cross = x.mT @ x / 80, original.mT @ x / 80
    T = target_weight(W, H, cross, damping=0.0)
    torch.testing.assert_close(T.mT, torch.linalg.lstsq(x, original @ W.mT).solution)

    def error(V: Tensor) -> Tensor:
        return (original @ W.mT - x @ V.mT).square().sum((0, 1)) / 80

    one, other = numbers(1, 3, 7, seed=3), numbers(1, 3, 7, seed=4)
    rest = [error(V) - row_loss(T, V, H)[0] for V in (one, other)]
    torch.testing.assert_close(*rest)
    torch.testing.assert_close(target_weight(W, H, cross, damping=0.01, share=0.0), W)
    torch.testing.assert_close(target_weight(W, H, H, damping=0.01), W)
    grid = grid_of(W, 4)
    values = [quantize(target, H, grid, Rounding()).values for target in (T, W)]
    assert error(values[0]).sum() < error(values[1]).sum()


@pytest.mark.parametrize(
    ("num_rows", "noise", "expected"),
    [(4000, 0.5, 0.01), (10, 0.02, None)],
    ids=["plenty of data", "fewer rows than columns"],
)
def test_a_correction_is_chosen_by_data_that_it_was_not_fitted_to(
    num_rows: int, noise: float, expected: float | None
) -> None:
    W, halves = numbers(1, 6, 20, seed=1), []
    for seed in (2, 3):
        original = numbers(1, num_rows, 20, seed=seed)
        x = original + noise * numbers(1, num_rows, 20, seed=10 + seed)
        halves.append((x.mT @ x / num_rows, original.mT @ x / num_rows))
    assert chosen_damping(W, halves) == expected
    assert chosen_damping(W, [(H, H) for H, _ in halves]) is None  # nothing to correct


class TestChosenRounding:
    def halves(self, num_rows: int, num_columns: int) -> tuple[list[Tensor], Tensor]:
        """`H` of each half, and that of all data: few directions have most of the input."""
        spread = numbers(num_columns, num_columns, seed=7) * torch.logspace(0, -1.5, num_columns).double()
        x = [numbers(num_rows, num_columns, seed=seed) @ spread.T for seed in (2, 3)]
        return [(rows.T @ rows / num_rows)[None] for rows in x], (spread @ spread.T)[None]

    def rounded(self, num_rows: int) -> tuple[float, float, float]:
        """The damping chosen, and the error on all data by what it was without and with it."""
        W = numbers(1, 16, 32, seed=1)
        halves, all_data = self.halves(num_rows, 32)
        H, grid, rounding = (halves[0] + halves[1]) / 2, grid_of(W, 3), Rounding(sweeps=0)
        found = chosen_rounding(W, [(half, half) for half in halves], lambda *_: W, grid, rounding)
        errors = [float(row_loss(W, quantize(W, H, grid, r).values, all_data).sum()) for r in (rounding, found)]
        return found.damping, *errors

    @pytest.mark.parametrize("num_rows", [4, 8])
    def test_few_rows_are_trusted_less(self, num_rows: int) -> None:
        damping, before, after = self.rounded(num_rows)
        assert damping in (0.1, 1.0, 10.0)  # tried in tenfold steps
        assert after < before

    def test_many_rows_are_trusted(self) -> None:
        assert self.rounded(5000)[0] == 0.01

    def test_the_codes_are_fitted_to_the_moments_of_the_inputs(self) -> None:
        """`cross` belongs to the target alone; here it is no matrix of second moments at all."""
        W = numbers(1, 16, 32, seed=1)
        halves, _ = self.halves(5000, 32)
        found = chosen_rounding(W, [(half, -half) for half in halves], lambda *_: W, grid_of(W, 3), Rounding())
        assert found.damping in (0.01, 0.1, 1.0, 10.0)

    def test_never_less_than_it_was(self) -> None:
        W = numbers(1, 16, 32, seed=1)
        halves, _ = self.halves(5000, 32)
        given = Rounding(damping=0.5)
        found = chosen_rounding(W, [(half, half) for half in halves], lambda *_: W, grid_of(W, 3), given)
        assert found.damping >= 0.5


def test_float8() -> None:
    W, H = problem(4, 12, 60)
    spec = TensorSpec(8, symmetric=True, granularity=PerChannel(0), format="float8")
    scale = (W[0].abs().amax(1) / 448).float().double()
    grid = Grid(scale, torch.zeros(4, dtype=torch.float64), torch.arange(4)[None, :, None].expand(1, 4, 12), spec)
    found = quantize(W, H, grid, Rounding())
    assert (found.loss <= found.nearest_loss).all() and found.loss.sum() < 0.8 * found.nearest_loss.sum()
    assert torch.equal(found.codes.to(torch.float8_e4m3fn).double(), found.codes)


class TestZeroPoints:
    def grid(self, weight: Tensor, symmetric: bool) -> Grid:
        spec = TensorSpec(2, symmetric, CHANNEL)
        rows = to_rows(weight[0], CHANNEL)
        scale, zero_point = qparams_from_range(rows.amin(1), rows.amax(1), spec)
        index = torch.arange(len(scale))[:, None].expand(weight.shape[1:])[None]
        return Grid(scale.double(), zero_point.double(), index, spec)

    def problem(self) -> tuple[Tensor, Tensor]:
        weight = torch.randn(1, 40, 24, dtype=torch.float64)
        x = torch.randn(200, 24, dtype=torch.float64)
        return weight, (x.T @ x / 200)[None]

    def test_moved_ones_lower_the_loss(self) -> None:
        weight, hessian = self.problem()
        grid = self.grid(weight, symmetric=False)
        still = round_nearest(weight, hessian, grid, Rounding())
        moved = round_nearest(weight, hessian, grid, Rounding(zero_point_shift=1))
        assert float(moved.loss.sum()) < float(still.loss.sum()) < float(still.nearest_loss.sum())
        assert not torch.equal(moved.grid.zero_point, grid.zero_point)
        assert 0 <= float(moved.grid.zero_point.min()) <= float(moved.grid.zero_point.max()) <= 3

    def test_they_move_in_both_directions(self) -> None:
        weight = torch.tensor([[[-2.0, -1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0]]], dtype=torch.float64)
        start = replace(self.grid(weight, symmetric=False), scale=torch.ones(2).double(), zero_point=torch.ones(2))
        rounding = Rounding(zero_point_shift=1, num_candidates=3, smallest_factor=0.9)
        found = round_nearest(weight, torch.eye(4, dtype=torch.float64)[None], start, rounding)
        assert found.grid.zero_point.tolist() == [2.0, 0.0] and torch.equal(found.values, weight)

    @pytest.mark.parametrize(("most", "expected"), [(1, 1.0), (2, 2.0)])
    def test_they_move_as_far_as_allowed(self, most: int, expected: float) -> None:
        weight = torch.tensor([[[-2.0, -1.0, 0.0, 1.0]]], dtype=torch.float64)
        start = replace(self.grid(weight, symmetric=False), scale=torch.ones(1).double(), zero_point=torch.zeros(1))
        rounding = Rounding(zero_point_shift=most, num_candidates=3, smallest_factor=0.99)
        found = round_nearest(weight, torch.eye(4, dtype=torch.float64)[None], start, rounding)
        assert found.grid.zero_point.tolist() == [expected]

    def test_a_moved_one_is_tried_with_the_scales_beside_the_best(self) -> None:
        """Of the shares 1, 0.95 and 0.9 the first is best until the zero point moves; then 0.95 is exact."""
        weight = 0.95 * torch.tensor([[[-2.0, -1.0, 0.0, 1.0]]], dtype=torch.float64)
        start = replace(self.grid(weight, symmetric=False), scale=torch.ones(1).double(), zero_point=torch.ones(1))
        rounding = Rounding(zero_point_shift=1, num_candidates=3, smallest_factor=0.9)
        found = round_nearest(weight, torch.eye(4, dtype=torch.float64)[None], start, rounding)
        assert found.grid.zero_point.tolist() == [2.0]
        torch.testing.assert_close(found.values, weight)

    def test_a_symmetric_grid_has_none(self) -> None:
        weight, hessian = self.problem()
        found = round_nearest(weight, hessian, self.grid(weight, symmetric=True), Rounding(zero_point_shift=1))
        assert not found.grid.zero_point.any()

    def test_without_a_search_nearest_is_nearest(self) -> None:
        weight, hessian = self.problem()
        grid = self.grid(weight, symmetric=False)
        found = round_nearest(weight, hessian, grid, Rounding(scale_search="none"))
        assert torch.equal(found.codes, grid.nearest(weight))
        assert torch.equal(found.loss, found.nearest_loss)

    def test_rows_that_fall_back_get_their_own_zero_point_back(self) -> None:
        weight, hessian = self.problem()
        found = quantize(weight, hessian, self.grid(weight, symmetric=False), Rounding(zero_point_shift=1))
        assert bool((found.loss <= found.nearest_loss).all())
        torch.testing.assert_close(row_loss(weight, found.values, hessian), found.loss)


def test_scales_are_rounded_to_the_type_that_is_kept() -> None:
    weight = torch.randn(1, 4, 16)
    spec = TensorSpec(4, True, CHANNEL)
    scale, zero_point = qparams_from_range(weight[0].amin(1), weight[0].amax(1), spec)
    index = torch.arange(4)[:, None].expand(4, 16)[None]
    grid = Grid(scale, zero_point, index, spec, stored=torch.bfloat16)
    found = quantize(weight, torch.eye(16)[None].double(), grid.with_scale(grid.scale), Rounding())
    assert torch.equal(found.grid.scale, found.grid.scale.bfloat16().float())
    assert found.codes.dtype == torch.float32


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_get_the_variance_that_is_wanted(granularity: Granularity, symmetric: bool) -> None:
    W, H = problem(6, 10, 60)
    wanted = 1.3 * row_loss(W, torch.zeros_like(W), H)
    rounded = quantize(W, H, grid_of(W, 3, symmetric, granularity), Rounding())
    kept = with_variance(rounded, W, H, wanted)
    assert torch.equal(kept.codes, rounded.codes) and torch.equal(kept.grid.zero_point, rounded.grid.zero_point)
    found = row_loss(kept.values, torch.zeros_like(W), H)
    shares_scales = granularity in (PerTensor(), PerChannel(1))
    torch.testing.assert_close(*((x.sum() if shares_scales else x) for x in (found, wanted)), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(kept.loss, row_loss(W, kept.values, H))


def test_a_row_that_is_constant_keeps_its_scale_and_factors_are_bounded() -> None:
    W, H = problem(3, 6, 60)
    W[:, 0] = 0
    rounded = quantize(W, H, grid_of(W + 1e-3, 3), Rounding())
    power = row_loss(W, torch.zeros_like(W), H)
    kept = with_variance(rounded, W, H, torch.stack([1 + power[:, 0], 0 * power[:, 1], 100 * power[:, 2]], 1))
    ratio = kept.grid.scale / rounded.grid.scale
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.0, 2.0], dtype=ratio.dtype), rtol=1e-6, atol=0.0)
