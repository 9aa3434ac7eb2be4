"""Few samples and many parameters: what is learned on some samples is judged on others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.quantization import BlockReconstruction, QuantModel, gptq, reconstruct
from sparsebit.quantization.algorithms.rounding import reconstruction
from tests.quantization import tiny

CONFIG = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 3}}, A: {QUANTIZER: {BIT: 8}}}"
WIDTH = 96


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
    ).eval()


def inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def related(x: Tensor) -> Tensor:
    """Inputs that depend on each other: there learned rounding has something to gain."""
    mixing = torch.randn(WIDTH // 8, WIDTH, generator=torch.Generator().manual_seed(2))
    return x[:, : WIDTH // 8] @ mixing / 3


def rounded(data: list[Tensor]) -> QuantModel:
    qmodel = tiny.calibrated(wide_model(), data, CONFIG, example_inputs=data[0])
    gptq(qmodel, data, damping=1.0)
    return qmodel


def error(qmodel: QuantModel, x: Tensor | None = None) -> float:
    """On data that no algorithm saw."""
    x = inputs(512, seed=1) if x is None else x
    with torch.no_grad():
        target = wide_model()(x)
        return float((qmodel(x) - target).square().sum() / target.square().sum())


def learned(data: list[Tensor], **options: Any) -> tuple[QuantModel, dict[str, BlockReconstruction]]:
    qmodel = rounded(data)
    return qmodel, reconstruct(qmodel, data, method="autoround", steps=60, batch_size=16, **{"lr": 0.05, **options})


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["layers", "network"])
def test_what_fits_a_few_samples_alone_is_put_back(blocks: str, caplog: pytest.LogCaptureFixture) -> None:
    data = [inputs(32)]
    before = error(rounded(data))
    without, _ = learned(data, blocks=blocks, held_out=0.0)
    assert error(without) > before
    with caplog.at_level(logging.INFO):
        qmodel, found = learned(data, blocks=blocks)
    assert error(qmodel) <= before
    for result in found.values():
        assert result.held_before is not None and result.held_after is not None
        assert result.is_kept == (result.held_after < result.held_before)
    put_back = [name for name, result in found.items() if not result.is_kept]
    assert put_back and all(found[name].after == found[name].before for name in put_back)
    assert all(found[name].num_changed == 0 for name in put_back)
    assert any(f"did not fall: {', '.join(put_back)}" in record.message for record in caplog.records)


def test_what_holds_for_others_is_kept() -> None:
    data, others = list(related(inputs(512)).split(128)), related(inputs(512, seed=1))
    qmodel = tiny.calibrated(wide_model(), data, CONFIG, example_inputs=data[0])  # rounded to nearest
    before = error(qmodel, others)
    found = reconstruct(qmodel, data, method="adaround", steps=100)
    assert all(result.is_kept for result in found.values())
    assert error(qmodel, others) < 0.7 * before


def test_held_out_samples_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value in a held-out sample changes nothing but the judgement."""
    seen: list[Tensor] = []
    train = reconstruction.train_block

    def watched(data: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(x for (x,) in data.inputs)
        assert data.held_out is not None and sum(len(x) for (x,) in data.held_out.inputs) == 8
        return train(data, *args, **kwargs)

    monkeypatch.setattr(reconstruction, "train_block", watched)
    data = list(inputs(32).split(12))
    learned(data, blocks="network")
    assert sum(map(len, seen)) == 24


@pytest.mark.parametrize(("count", "is_judged"), [(1, False), (5, True)])
def test_samples_without_a_batch_dimension(count: int, is_judged: bool) -> None:
    """Each row depends on the others: a batch is one sample, and one alone is learned from."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.one(x))
            return self.two(x - x.mean(0))

    torch.manual_seed(0)
    model, data = Centred().eval(), list(torch.randn(count, 12, 8))
    qmodel = tiny.calibrated(model, data, CONFIG, example_inputs=data[0])
    found = reconstruct(qmodel, data, steps=20)
    assert all((result.held_before is not None) == is_judged for result in found.values())


def test_weighted_errors_are_those_of_the_samples() -> None:
    """Weights of errors (`fisher`) are found for all samples, and each part uses its own."""
    data = list(inputs(32).split(12))
    _, found = learned(data, blocks="layers", fisher=True)
    assert all(result.held_before is not None for result in found.values())
