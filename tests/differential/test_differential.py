"""Random quantized nets through every runtime: a few here, any number with `python -m tests.differential`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.differential import judging
from tests.differential.grammar import generate
from tests.differential.judges import FAST, available
from tests.differential.judging import judged
from tests.differential.net import Net
from tests.differential.shrinking import smallest_net
from tests.fuzz.choices import Choices
from tests.fuzz.program import ModuleClass, Statement

pytest.importorskip("onnxruntime")
SEEDS = [21, 9, 26, *range(100, 130)]  # the first ones: one net each for three backends


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_runtime_computes_what_the_file_says(seed: int) -> None:
    net = generate(Choices.from_seed(seed))
    verdict = judged(net, [name for name in FAST if name in available()])
    assert not verdict.faults, f"{verdict.faults}\n{net.source()}"


def test_the_same_seed_makes_the_same_net() -> None:
    nets = [generate(Choices.from_seed(seed)).source() for seed in range(40)]
    assert nets == [generate(Choices.from_seed(seed)).source() for seed in range(40)] and len(set(nets)) == 40


def _net(*layers: str) -> Net:
    statements = tuple(
        Statement("layer", (f"x = self.m{place}(x)",), members=(f"self.m{place} = nn.{layer}",))
        for place, layer in enumerate(layers)
    )
    config = (("BACKEND", "onnxruntime"), ("A.OBSERVER.TYPE", "mse"))
    return Net(ModuleClass("Net", "self, x", statements, "x"), (), shape=(2, 3, 5, 5), config=config)


@pytest.mark.parametrize("steps", [0, 1])
def test_one_wrong_code_is_a_fault(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, feeds: Any) -> dict[str, Any]:
        found = known["onnxruntime"](model, feeds)
        sites = [name for name in found if name.endswith("/codes")]
        for name in sites[1:2]:
            found[name] = found[name].copy()
            found[name].flat[3] ^= steps  # the last bit of one code
        return found

    known = available()
    monkeypatch.setattr(judging, "available", lambda: {"wrong": wrong})
    verdict = judged(_net("LazyConv2d(4, 3)", "ReLU()", "LazyConv2d(2, 1)"), ["wrong"])
    assert verdict.judged == ["simulation", "wrong"] and verdict.num_sites == 3
    faults = " ".join(verdict.faults.values())
    assert bool(verdict.faults) == bool(steps) and ("1 of 72" in faults) == bool(steps)


def test_a_wrong_simulation_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> dict[str, Any]:
        found = simulated(*args)
        return {name: value + (value.dtype.kind == "f") * 1e-3 for name, value in found.items()}

    simulated = judging._simulated
    monkeypatch.setattr(judging, "_simulated", shifted)
    verdict = judged(_net("LazyConv2d(4, 3)"), [])
    assert list(verdict.faults) == ["simulation after DequantizeLinear"]


def test_a_net_is_shrunk_and_printed_as_code() -> None:
    def still_fails(net: Net) -> bool:
        return "LazyConv2d" in net.source()

    net = smallest_net(_net("ReLU()", "LazyConv2d(8, 4, padding=2)", "LazyBatchNorm2d()", "Tanh()"), still_fails)
    text = net.source()
    assert len(net.root.statements) == 1 and "nn.LazyConv2d(1, 1, padding=1)" in text
    assert net.shape == (1, 1, 1, 1) and net.config == (("BACKEND", "onnxruntime"),)
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["CONFIG"] == {"BACKEND": "onnxruntime"}


def test_a_refusal_without_a_row_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(model: Any, feeds: Any) -> dict[str, Any]:
        raise RuntimeError("no")

    monkeypatch.setattr(judging, "available", lambda: {"refusing": refusing})
    verdict = judged(_net("LazyConv2d(4, 3)"), ["refusing"])
    assert verdict.faults == {"refusing refuses": "RuntimeError: no"}
