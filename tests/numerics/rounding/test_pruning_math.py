"""Least squares for weights with given zeros."""

from __future__ import annotations

import pytest
import torch

from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.pruning_math import (
    fit_masked,
    held_out_damping,
    obs_scores,
    output_error,
    sparse_gpt_scores,
)


def moments(rows: int = 400, columns: int = 12, groups: int = 2, noise: float = 0.1) -> InputMoments:
    mixing = torch.randn(groups, columns, columns)
    dense = torch.randn(groups, rows, columns) @ mixing
    found = InputMoments(torch.float64)
    found.add(dense + noise * torch.randn_like(dense), dense)
    return found


def exact(W: torch.Tensor, H: torch.Tensor, C: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
    V = torch.zeros_like(W)
    for group in range(W.shape[0]):
        for row in range(W.shape[1]):
            kept = M[group, row].nonzero().flatten()
            wanted = (W[group, row] @ C[group])[kept]
            V[group, row, kept] = torch.linalg.solve(H[group][kept][:, kept], wanted)
    return V


@pytest.mark.parametrize("kind", ["columns", "elements"])
def test_the_fit_is_the_least_squares_solution(kind: str) -> None:
    found = moments()
    H, C, W = found.hessian(), found.cross(), torch.randn(2, 5, 12, dtype=torch.float64)
    M = torch.rand(2, 5, 12) > 0.4
    if kind == "columns":
        M[:] = M[:, :1]
        M[:, 2] = False  # a removed row
    V = fit_masked(W, H, C, M, damping=0.0)
    assert (V[~M] == 0).all()
    assert torch.allclose(V, exact(W, H, C, M), atol=1e-4)
    assert (output_error(W, V, H, C) <= output_error(W, W * M, H, C) + 1e-9).all()


def test_inputs_of_any_size_are_fitted() -> None:
    """The steps of conjugate gradients are in units of each column's input."""
    found = moments(rows=2000, columns=40, groups=1)
    sizes = torch.logspace(-4, 4, 40, dtype=torch.float64)
    H, C = (matrix * sizes * sizes[:, None] for matrix in (found.hessian(), found.cross()))
    W, M = torch.randn(1, 5, 40, dtype=torch.float64) / sizes, torch.rand(1, 5, 40) > 0.4
    wanted = exact(W, H, C, M)
    error = fit_masked(W, H, C, M, damping=0.0) - wanted
    assert float(((error @ H) * error).sum()) < 1e-8 * float(((wanted @ H) * wanted).sum())


def test_rows_with_the_same_zeros_are_solved_exactly() -> None:
    """Also where inputs correlate so much that conjugate gradients would take too many steps."""
    mixing = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    x = torch.randn(1, 300, 60, dtype=torch.float64) * torch.logspace(0, -4, 60, dtype=torch.float64) @ mixing
    H, W, M = x.mT @ x / 300, torch.randn(1, 5, 60, dtype=torch.float64), (torch.arange(60) % 3 > 0).expand(1, 5, 60)
    wanted = exact(W, H, H, M)
    error = fit_masked(W, H, H, M, damping=0.0) - wanted
    assert float(((error @ H) * error).sum()) < 1e-18 * float(((wanted @ H) * wanted).sum())


def test_by_default_one_percent_is_added_to_the_second_moments() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert fit_masked(one, one, 0 * one, one.bool()).item() == pytest.approx(0.01 / 1.01)
    assert obs_scores(one, one).item() == pytest.approx(1.01)


def test_columns_without_input_keep_their_weight() -> None:
    found = InputMoments(torch.float64)
    x = torch.randn(50, 4, dtype=torch.float64)
    x[:, 2] = 0
    found.add(x, x)
    W = torch.randn(1, 3, 4, dtype=torch.float64)
    M = torch.ones_like(W).bool()
    assert torch.allclose(fit_masked(W, found.hessian(), found.cross(), M), W)


def test_a_fit_that_only_follows_noise_is_damped_or_left_out() -> None:
    """Fewer rows than columns: without damping the fit would be of the data at hand."""
    halves = []
    for _ in range(2):
        x = torch.randn(1, 10, 40, dtype=torch.float64)
        found = InputMoments(torch.float64)
        found.add(x, x + 0.01 * torch.randn_like(x))
        halves.append((found.hessian(), found.cross()))
    W = torch.randn(1, 6, 40, dtype=torch.float64)
    M = torch.rand(1, 6, 40) > 0.5
    assert held_out_damping(W, M, halves) in (None, 1.0)


@pytest.mark.parametrize("damping", [0.001, 0.01, 0.1, 1.0, None])
def test_the_damping_is_the_one_that_suits_the_other_half(damping: float | None) -> None:
    """Of one weight of 1, whose fit to data without any correlation is `damping / (1 + damping)`."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    wanted = 1.0 if damping is None else damping / (1 + damping)
    assert held_out_damping(one, one.bool(), [(one, 0 * one), (one, wanted * one)]) == damping


def test_of_equal_weights_the_first_are_removed() -> None:
    scores = sparse_gpt_scores(torch.ones(1, 4, 64), torch.eye(64)[None], 0.25, None)
    assert scores.flatten().sort(stable=True).indices[:64].tolist() == list(range(64))
    assert scores.flatten()[:64].max() + 1 <= scores.flatten()[64:].min()


def test_each_128_columns_lose_the_same_share() -> None:
    W = torch.ones(1, 4, 256) + torch.arange(256) / 256
    W[..., 128] = 0.5  # the smallest
    scores = sparse_gpt_scores(W, torch.eye(256)[None], 0.25, None)
    removed = torch.zeros(4 * 256, dtype=torch.bool)
    removed[scores.flatten().argsort()[: len(removed) // 4]] = True
    assert removed.view(4, 2, 128).sum((0, 2)).tolist() == [128, 128]


def test_the_score_of_obs_is_what_the_loss_grows_by() -> None:
    x = torch.randn(1, 300, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    found = InputMoments(torch.float64)
    found.add(x)
    H, W = found.hessian(), torch.randn(1, 1, 6, dtype=torch.float64)
    scores = obs_scores(W, H, damping=0.0)
    for column in range(6):
        M = torch.ones_like(W).bool()
        M[..., column] = False
        V = fit_masked(W, H, H, M, damping=0.0)
        assert float(((W - V) @ H * (W - V)).sum()) == pytest.approx(float(scores[..., column]), rel=1e-6)


@pytest.mark.parametrize("pattern", [None, (2, 4), (1, 4)])
def test_sparse_gpt_loses_less_than_magnitudes(pattern: tuple[int, int] | None) -> None:
    x = torch.randn(2, 500, 24, dtype=torch.float64) @ (torch.randn(24, 24, dtype=torch.float64) + torch.eye(24))
    found = InputMoments(torch.float64)
    found.add(x)
    H, W = found.hessian(), torch.randn(2, 8, 24, dtype=torch.float64)
    share = 0.5 if pattern is None else 1 - pattern[0] / pattern[1]
    scores = sparse_gpt_scores(W, H, share, pattern, block_size=8)

    def loss(values: torch.Tensor) -> float:
        if pattern is None:
            M = torch.ones(values.numel(), dtype=torch.bool)
            M[values.flatten().argsort()[: values.numel() // 2]] = False
            M = M.view_as(values)
        else:
            order = values.unflatten(-1, (-1, 4)).argsort(-1)
            kept = torch.zeros_like(values).unflatten(-1, (-1, 4)).scatter(-1, order[..., -pattern[0] :], 1.0)
            M = kept.flatten(-2).bool()
        V = fit_masked(W, H, H, M)
        return float(((W - V) @ H * (W - V)).sum())

    assert loss(scores) < loss(W.abs())
