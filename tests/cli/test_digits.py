"""The demo's data and network."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from sparsebit.cli.digits import DigitNet, load_digits, train
from sparsebit.errors import MissingExtraError


@pytest.fixture(scope="module")
def _sklearn() -> None:
    pytest.importorskip("sklearn")


@pytest.mark.usefixtures("_sklearn")
def test_test_images_are_kept_apart() -> None:
    digits = load_digits()
    assert len(digits.train_images) == 1200 and len(digits.test_images) == 597
    assert digits.train_images.mean().abs() < 1e-5 and (digits.train_images.std() - 1).abs() < 1e-5
    seen = {image.numpy().tobytes() for image in digits.train_images}
    assert not any(image.numpy().tobytes() in seen for image in digits.test_images)
    assert digits.test_labels.bincount().min() > 40


def test_network_has_what_is_hard() -> None:
    model = DigitNet()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert any(getattr(module, "groups", 1) > 1 for module in model.modules())


@pytest.mark.usefixtures("_sklearn")
def test_training_is_repeatable_and_leaves_the_generator_alone() -> None:
    digits, state = load_digits(), torch.get_rng_state()
    few = replace(digits, train_images=digits.train_images[:128], train_labels=digits.train_labels[:128])
    one, same, other = (train(few, epochs=1, seed=seed).head.weight for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("_sklearn")
def test_training_learns() -> None:
    digits = load_digits()
    model = train(digits, epochs=2, seed=0)
    with torch.no_grad():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean()
    assert not model.training and accuracy > 0.6


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"pip install "):
        load_digits()
