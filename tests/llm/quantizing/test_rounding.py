"""Recipes and the rounding of one layer: what each option gains, what is refused, and scales as they are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.llm.quantizing.rounding import round_weight, round_weights
from sparsebit.llm.recipe import Recipe
from sparsebit.numerics.rounding.hessian import InputMoments


def layer() -> tuple[Tensor, InputMoments, Tensor]:
    """A weight, the moments of correlated inputs, and the inputs."""
    weight = torch.randn(48, 64)
    inputs = torch.randn(400, 64) @ (torch.eye(64) + 0.4 * torch.randn(64, 64))
    moments = InputMoments()
    moments.add(inputs)
    return weight, moments, inputs


def error(weight: Tensor, recipe: Recipe, moments: InputMoments, inputs: Tensor) -> float:
    values = round_weight(weight, moments, recipe, "fc", stored=torch.float16).packed.dequantize(torch.float32)
    return float((inputs @ (weight - values).T).square().mean())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_step_gains(bits: int, symmetric: bool) -> None:
    weight, moments, inputs = layer()
    common: dict[str, Any] = {"bits": bits, "group_size": 32, "symmetric": symmetric}
    recipes = [
        Recipe(method="rtn", scale_search="none", **common),
        Recipe(method="rtn", **common),
        Recipe(method="gptq", **common),
    ]
    plain, searched, gptq = (error(weight, recipe, moments, inputs) for recipe in recipes)
    assert gptq < searched < plain


def test_the_errors_that_are_told() -> None:
    weight, moments, inputs = layer()
    found = round_weight(weight, moments, Recipe(bits=3, group_size=32), "fc", stored=torch.float16)
    told = float((inputs @ weight.T).square().mean())
    measured = error(weight, Recipe(bits=3, group_size=32), moments, inputs)
    assert found.error == pytest.approx(measured / told, rel=1e-3)
    assert found.error < found.nearest_error


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scales_have_the_type_of_the_files(stored: torch.dtype) -> None:
    weight, moments, _ = layer()
    packed = round_weight(weight, moments, Recipe(bits=4, group_size=0), "fc", stored=stored).packed
    assert packed.scales.dtype == stored and packed.scales.shape == (48, 1)
    assert bool((packed.scales > 0).all())


def test_eight_bits_are_near() -> None:
    weight, moments, _ = layer()
    for symmetric in (True, False):
        recipe = Recipe(method="rtn", scale_search="none", bits=8, group_size=32, symmetric=symmetric)
        packed = round_weight(weight, moments, recipe, "fc", stored=torch.float32).packed
        assert float((packed.dequantize(torch.float32) - weight).abs().max()) < 0.03


def test_a_weight_of_zeros() -> None:
    _, moments, _ = layer()
    packed = round_weight(torch.zeros(4, 64), moments, Recipe(group_size=32), "fc", stored=torch.float16).packed
    assert not packed.dequantize(torch.float32).any()


def test_input_correction_takes_up_the_difference_of_inputs() -> None:
    weight, _, inputs = layer()
    noisy = inputs + 0.5 * torch.randn_like(inputs)
    moments = InputMoments()
    moments.add(noisy, inputs)
    with_it, without = (
        round_weight(weight, moments, Recipe(bits=8, input_correction=share, group_size=32), "fc", stored=torch.float32)
        for share in (1.0, 0.0)
    )
    wanted = inputs @ weight.T
    errors = [
        float((noisy @ found.packed.dequantize(torch.float32).T - wanted).square().mean())
        for found in (with_it, without)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_a_group_that_does_not_divide_is_refused() -> None:
    weight, moments, _ = layer()
    with pytest.raises(ConfigError, match=r"group_size=48 at fc: it has 64 columns.*sizes that do: 64, 32, 16"):
        round_weight(weight, moments, Recipe(group_size=48), "fc", stored=torch.float16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "spqr"}, "method='spqr': allowed: rtn, gptq, awq"),
        ({"bits": 5}, "bits=5: allowed: 2, 3, 4, 8"),
        ({"group_size": -1}, "group_size=-1"),
        ({"scale_search": "all"}, "allowed: none, nearest, gptq"),
        ({"damping": -0.1}, "damping"),
        ({"sweeps": -1}, "sweeps"),
        ({"input_correction": 2.0}, "0 to 1"),
        ({"method": "rtn", "scale_search": "gptq"}, "rtn does not run GPTQ"),
        ({"method": "rtn", "damping": 0.1, "refit": False}, "damping, refit with method='rtn'"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)


@pytest.mark.parametrize("recipe", [Recipe(bits=3, group_size=32), Recipe("rtn", 2, 32, True), Recipe("fp8")], ids=str)
def test_layers_that_are_rounded_together_are_as_if_alone(recipe: Recipe) -> None:
    weight, moments, inputs = layer()
    corrected = InputMoments()
    corrected.add(inputs, inputs + 0.1 * torch.randn_like(inputs))
    weights = {"q": weight, "k": torch.randn(16, 64), "v": 0.1 * torch.randn(16, 64)}
    alone = {name: round_weight(one, corrected, recipe, name, stored=torch.float16) for name, one in weights.items()}
    together = round_weights(weights, corrected, recipe, stored=torch.float16, take_moments=True)
    assert list(together) == ["q", "k", "v"]
    for name, own in alone.items():
        values = [one.packed.dequantize(torch.float32) for one in (own, together[name])]
        # float32 products of other sizes are summed in another order, which may move a code that lies between two
        assert float((values[0] == values[1]).float().mean()) > 0.99
        assert together[name].error == pytest.approx(own.error, rel=0.01)
        assert together[name].nearest_error == pytest.approx(own.nearest_error, rel=1e-4)
    assert corrected.num_rows == (400 if recipe.method == "fp8" else 0) and moments.num_rows == 400


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_gptq_on_floats(kind: Any) -> None:
    """The scales are those of rounding to nearest, and the error of the output is far smaller."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(rows, 128, generator=generator) / 50 for name, rows in (("a", 48), ("b", 16))}
    mixing = torch.eye(128) + torch.randn(128, 128, generator=generator) / 15
    x = torch.randn(2048, 128, generator=generator) @ mixing
    moments = InputMoments()
    moments.add(x)
    errors, scales = [], []
    for compensate in (False, True):
        found = round_weights(weights, moments, Recipe(kind, compensate=compensate), stored=torch.float16)
        exact = {name: x @ (found[name].packed.dequantize(torch.float32) - weights[name]).t() for name in weights}
        errors.append([float(exact[name].square().sum() / (x @ weights[name].t()).square().sum()) for name in weights])
        scales.append([found[name].packed.scales for name in weights])
    assert [found[name].error for name in weights] == pytest.approx(errors[1], rel=1e-3)
    assert all(map(torch.equal, *scales))
    assert all(after < 0.8 * before for before, after in zip(*errors, strict=True))
