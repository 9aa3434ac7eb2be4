"""Random lives of models: a few of a fixed seed here, any number with `python -m tests.stateful`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import qconfig
from tests.stateful.networks import NETWORKS, ChosenByNumber, Optional
from tests.stateful.quantized import QuantizedLife
from tests.stateful.running import failure_of, run_lives


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_quantized(name: str) -> None:
    run_lives("quantized", 3, 0, names=(name,))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "tied"])
def test_pruned(name: str) -> None:
    run_lives("pruned", 3, 0, names=(name,))


def test_language() -> None:
    pytest.importorskip("compressed_tensors")
    run_lives("language", 3, 0)


def test_the_steps_of_a_fault_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def deepcopy(self: QuantModel, memo: dict[int, Any]) -> Any:
        copied = QuantModel.__reduce__(self)
        again = copied[0](*copied[1])
        with torch.no_grad():
            next(again.parameters()).add_(1)
        return again

    monkeypatch.setattr("tests.stateful.quantized.NETWORKS", {"residual": NETWORKS["residual"]})
    monkeypatch.setattr(QuantizedLife, "names", ("residual",))
    monkeypatch.setattr(QuantModel, "__deepcopy__", deepcopy)
    found = failure_of("quantized", 20, 0)
    assert "a deep copy: other values" in found and "state.deepcopy()" in found


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["deepcopy", "pickle"])
def test_a_copy_before_calibration_takes_calls_of_another_form(copied: Any) -> None:
    x = torch.randn(2, 6)
    qmodel = copied(QuantModel(ChosenByNumber().eval(), qconfig()))
    torch.testing.assert_close(qmodel(x, i=1), qmodel.original(x, i=1))


def test_a_call_of_another_form_keeps_the_sites_that_were_changed() -> None:
    """The graph of the new form lacks sites of the old one: those of the branch that only that call takes."""
    x, model = torch.randn(4, 2, 6), Optional().eval()
    qmodel = QuantModel(model, qconfig(), example_inputs={"x": x, "mask": x})
    qmodel.replace_quantizer("first.weight", {"bits": 4})
    torch.testing.assert_close(qmodel(x), model(x))
    assert qmodel.sites["first.weight"].spec.bits == 4 and "mul.input.0" not in qmodel.sites
    torch.testing.assert_close(pickle.loads(pickle.dumps(qmodel))(x), model(x))
    torch.testing.assert_close(qmodel(x, x), model(x, x))
    assert qmodel.sites["first.weight"].spec.bits == 4 and "mul.input.0" in qmodel.sites
