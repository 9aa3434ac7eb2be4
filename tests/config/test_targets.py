"""`activation` is the word; the older `feature` equals it wherever a user gives or compares it."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.config.targets import ACTIVATION, as_target, is_for, mismatch, targets_of
from sparsebit.errors import ConfigError


@pytest.mark.parametrize("word", ["activation", "feature", ACTIVATION])
def test_both_words_are_the_same_target(word: str) -> None:
    found = as_target(word)
    assert found == "activation" and found == "feature" and found == ACTIVATION
    assert "feature" == found and "activation" == found  # noqa: SIM300
    assert not (found != "feature") and not ("feature" != found)  # noqa: SIM202, SIM300
    assert found in ("weight", "feature") and ["weight", found].count("feature") == 1
    match found:
        case "feature":
            pass
        case _:
            pytest.fail("no match")


def test_it_equals_nothing_else() -> None:
    for other in ("weight", "features", "Activation", "", 0, None, ("feature",)):
        assert other != ACTIVATION and ACTIVATION != other  # noqa: SIM300
    assert as_target("weight") != "feature" and as_target("weight") == "weight"


def test_it_is_written_as_activation() -> None:
    assert f"{ACTIVATION}" == str(ACTIVATION) and repr(ACTIVATION) == "'activation'"
    assert json.dumps({"target": ACTIVATION}) == '{"target": "activation"}'
    assert {"weight": 1, "activation": 2}[ACTIVATION] == 2 and hash(ACTIVATION) == hash("activation")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda word: pickle.loads(pickle.dumps(word))])
def test_a_copy_equals_the_old_word_too(way: Any) -> None:
    assert way(ACTIVATION) == "feature" and way(ACTIVATION) == "activation"


@pytest.mark.parametrize("word", ["features", "input", "", "W"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"target '{word}'; allowed: 'weight', 'activation'"):
        as_target(word)


@pytest.mark.parametrize("targets", [("feature",), ("activation",), (ACTIVATION,), ["feature"], "feature"], ids=repr)
def test_targets_of_a_class(targets: Any) -> None:
    kind = type("Own", (), {"TARGETS": targets})
    assert is_for(kind, "activation") and is_for(kind, "feature") and is_for(kind, "") and not is_for(kind, "weight")
    assert [str(target) for target in targets_of(kind)] == ["activation"]
    assert mismatch(kind, "weight") == "is for activation tensors, not for a weight"


def test_a_class_without_targets_is_for_both() -> None:
    assert is_for(object, "weight") and is_for(object, "feature")
    for_weights = type("Own", (), {"TARGETS": ("weight",)})
    assert mismatch(for_weights, "feature") == "is for weight tensors, not for an activation"


class Compared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.target = ACTIVATION

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.target == "weight" else x + 1


def test_it_is_compared_inside_a_compiled_graph() -> None:
    compiled = torch.compile(Compared(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.full((2,), 5.0)), torch.full((2,), 6.0))
