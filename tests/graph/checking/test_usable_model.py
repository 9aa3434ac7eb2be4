"""Models without values are refused with the reason, by every verb that takes a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.errors import CaptureError
from sparsebit.sparse import SparseModel, load, save

X = torch.randn(4, 4)
STRUCTURED = {"SPARSER": {"TYPE": "structured", "RATIO": 0.5}}


class Coroutine(nn.Linear):
    async def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 4)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (on_meta, "the model is on the meta device"),
    "one tensor on meta": (lambda: nn.Sequential(nn.Linear(4, 4), on_meta()), r"\(1\.weight, 1\.bias\)"),
    "lazy": (lambda: nn.LazyLinear(4), "run it once"),
    "coroutine": (lambda: Coroutine(4, 4), "`async def`"),
}
VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "quantize": lambda model: sparsebit.quantize(model, [X], "onnxruntime"),
    "prune": lambda model: SparseModel(model, STRUCTURED, X),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", MODELS)
def test_the_reason_is_given(name: str, verb: str) -> None:
    make, reason = MODELS[name]
    with pytest.raises(CaptureError, match=reason):
        VERBS[verb](make().eval())


def test_a_pruned_folder_needs_a_model_with_values(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    smodel = SparseModel(model, STRUCTURED, X)
    smodel.calc_params()
    save(smodel.shrink(), tmp_path / "small")
    with pytest.raises(CaptureError, match="meta device"):
        load(tmp_path / "small", nn.Sequential(on_meta(), nn.ReLU(), nn.Linear(8, 4)))
