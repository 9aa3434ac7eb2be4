from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization import Quantizer, register_quantizer
from sparsebit.registry import QUANTIZERS
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(QUANTIZERS, "_entries", dict(QUANTIZERS._entries))
    monkeypatch.setattr(QUANTIZERS, "_aliases", dict(QUANTIZERS._aliases))


def test_without_a_name_the_type_is_it() -> None:
    @register_quantizer
    class Doubling(Quantizer):
        TYPE = "Doubling"

        def _forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert QUANTIZERS.get("doubling") is Doubling and Doubling.TYPE == "doubling"
    qmodel = calibrated(nn.Sequential(nn.ReLU()), [X], qconfig({"A.QUANTIZER.TYPE": "DOUBLING"}))
    assert torch.equal(qmodel(X), 2 * X.relu())


def test_forward_with_numbers() -> None:
    @register_quantizer("stepped")
    class Stepped(Quantizer):
        def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
            return torch.full_like(x, float(scale) + float(zero_point))

    qmodel = calibrated(nn.Sequential(nn.ReLU()), [X], qconfig({"A.QUANTIZER.TYPE": "stepped"}))
    (quantizer,) = qmodel.quantizers()
    expected = float(quantizer.scale) + float(quantizer.zero_point)
    assert qmodel(X).unique().item() == pytest.approx(expected)


def test_without_a_type_of_its_own() -> None:
    with pytest.raises(ConfigError, match="Nameless is registered without a name"):

        @register_quantizer
        class Nameless(Quantizer):
            pass


def test_a_constructor_of_the_first_sparsebit_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"Old\(config.* cannot be built; write `def __init__\(self, spec, target"):

        @register_quantizer
        class Old(Quantizer):
            TYPE = "old"

            def __init__(self, config: object) -> None:
                super().__init__(config)  # type: ignore[call-arg, arg-type]
