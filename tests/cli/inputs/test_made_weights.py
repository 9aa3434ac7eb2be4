"""Random weights are noticed, whichever generator they come from; loaded and seeded ones are not called random."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from sparsebit.cli.inputs import made_weights
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.inputs.made_weights import why_random
from tests.cli.conftest import Sparsebit

STATE = nn.Linear(3, 2).state_dict()


def loaded() -> nn.Module:
    model = nn.Linear(3, 2)
    model.load_state_dict(STATE)
    return model


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def not_a_number() -> nn.Module:
    model = loaded()
    nn.init.constant_(model.weight, float("nan"))
    return model


def of_numpy() -> nn.Module:
    model = nn.Linear(3, 2)
    model.load_state_dict({"weight": torch.tensor(numpy.random.rand(2, 3)), "bias": torch.zeros(2)})
    return model


def of_python() -> nn.Module:
    model = loaded()
    nn.init.constant_(model.weight, random.random())
    return model


def new_head() -> nn.Module:
    return nn.Sequential(loaded(), nn.Linear(2, 2))


def random_buffer() -> nn.Module:
    model = loaded()
    model.register_buffer("noise", torch.randn(2), persistent=False)
    return model


@pytest.mark.parametrize("factory", [loaded, seeded, not_a_number, lambda: nn.ReLU(), lambda: nn.LazyLinear(2)])
def test_the_same_weights_at_every_call(factory: Callable[[], nn.Module]) -> None:
    assert why_random(factory(), factory) == ""


@pytest.mark.parametrize(("factory", "words"), [
    (lambda: nn.Linear(3, 2), r"2 of its 2 tensors .*\(weight, bias\)"), (of_numpy, r"\(weight\)"),
    (of_python, r"\(weight\)"), (new_head, r"2 of its 4 tensors .*\(1.weight, 1.bias\)"), (random_buffer, r"\(noise\)"),
    (lambda: nn.Linear(3, random.choice(range(2, 10**6))), r"\(weight, bias\)"),
])  # fmt: skip
def test_other_weights_at_every_call(factory: Callable[[], nn.Module], words: str) -> None:
    found = why_random(factory(), factory)
    assert re.search(words, found), found


def test_the_second_call_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)

    def chatty() -> nn.Module:
        print("loading", torch.rand(1), random.random())  # noqa: T201
        return nn.Linear(3, 2)

    before = torch.get_rng_state(), random.getstate()
    assert why_random(model, chatty)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert capsys.readouterr().out == ""


def once_only() -> Callable[[], nn.Module]:
    calls: list[int] = []

    def make() -> nn.Module:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the process group is initialized already")
        return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))

    return make


def cached() -> Callable[[], nn.Module]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return lambda: model


@pytest.mark.parametrize("maker", [once_only, cached])
def test_a_model_that_is_made_once_is_judged_by_its_norms(maker: Callable[[], Callable[[], nn.Module]]) -> None:
    factory = maker()
    model = factory()
    assert "1 normalization layers" in why_random(model, factory)
    nn.init.constant_(model[1].weight, 0.9)  # type: ignore[index]
    assert why_random(model, factory) == ""
    assert why_random(nn.Linear(3, 2), None) == ""  # nothing to judge by


def test_slow_and_large_models_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> nn.Module:
        raise AssertionError

    assert why_random(nn.Linear(3, 2), refused, seconds=made_weights.MOST_SECONDS + 1) == ""
    monkeypatch.setattr(made_weights, "MOST_BYTES", 8)
    assert why_random(nn.Linear(3, 2), refused) == ""


DATA = ("--data", "own_project:calls")


def test_a_forgotten_file_of_weights_is_a_warning(sparsebit: Sparsebit, project: Path) -> None:
    quantize = ("quantize", "-m", "own_project:Optional", "-c", "weights-only", "-o", "out", "--json")
    answer = sparsebit(*quantize)
    assert answer.code == 0, answer.err
    assert answer.err.startswith("weights: as own_project:Optional makes them (no --weights)\n")
    assert answer.json["weights"] == "as own_project:Optional makes them (no --weights)"
    assert "--weights FILE, or --random-weights" in answer.json["warnings"][0]
    assert "random" not in sparsebit(*quantize, "--random-weights").err
    torch.save({"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4)}, "trained.pt")
    answer = sparsebit(*quantize, "-w", "trained.pt")
    assert answer.code == 0 and "random" not in str(answer.json["warnings"]), answer.err
    assert answer.err.startswith("weights: trained.pt\n") and answer.json["weights"] == "trained.pt"


def test_every_verb_begins_with_the_weights(
    sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("float.onnx").touch()

    def stop(*_: object) -> str:
        raise LoadingError("enough")

    monkeypatch.setattr("sparsebit.cli.inputs.loading.why_random", stop)
    monkeypatch.setattr("sparsebit.cli.verbs.check.runtime_of", lambda file: "onnxruntime")
    named = ("-m", "own_project:Optional")
    verbs: list[tuple[str, ...]] = [
        ("quantize", *named, *DATA, "-o", "int8"),
        ("quantize", *named, "-c", "weights-only", "-o", "int8"),
        ("profile", *named, *DATA),
        ("search", *named, *DATA, "--budget", "bytes=0.5", "-o", "mixed.yaml"),
        ("prune", *named, *DATA, "--ratio", "0.5", "-o", "small"),
        ("export", *named, *DATA, "-o", "float.onnx"),
        ("check", "float.onnx", *named, *DATA),
    ]
    first = "weights: as own_project:Optional makes them (no --weights)\n"
    for verb in verbs:
        assert sparsebit(*verb).err == f"{first}error: enough\n", verb
        assert sparsebit(*verb, "--quiet").err == "error: enough\n", verb
