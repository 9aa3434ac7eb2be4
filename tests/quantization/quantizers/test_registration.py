from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config.options import selected_options
from sparsebit.config.section import Section
from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.quantization import Quantizer, QuantModel, parse_qconfig, register_quantizer
from sparsebit.quantization.quantizers.pact import PACT, PactOptions
from sparsebit.registry import QUANTIZERS
from tests.quantization.tiny import calibrated, qconfig, site

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


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


class GainOptions(Section):
    GAIN: float = Field(1.0, gt=0, le=8, description="What the calibrated scale is multiplied with.")


def register_gain() -> None:
    @register_quantizer("gain", options=GainOptions)
    class Gain(Quantizer):
        options: GainOptions

        def qparams(self) -> tuple[Tensor, Tensor]:
            scale, zero_point = super().qparams()
            return scale * self.options.GAIN, zero_point


GAINS = """
DEVICE: cpu
W: {QUANTIZER: {TYPE: gain, BIT: 8, GAIN: {GAIN: 2}}, SPECIFIC: [{"1": [QUANTIZER.GAIN.GAIN, 4.0]}]}
A: {QUANTIZER: {TYPE: gain, BIT: 8}}
"""


class TestOptions:
    def test_from_a_file_to_numbers_to_a_folder_and_back(self, tmp_path: Path) -> None:
        register_gain()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
        (tmp_path / "config.yaml").write_text(GAINS)
        config = parse_qconfig(tmp_path / "config.yaml")
        qmodel = calibrated(model, [X], config)
        found = {quantizer.name: quantizer.options for quantizer in qmodel.quantizers() if not quantizer.fake_fused}
        assert found == {
            "0.weight": GainOptions(GAIN=2.0),
            "1.weight": GainOptions(GAIN=4.0),
            "0.input": GainOptions(),
            "1.input": GainOptions(),
        }
        plain = calibrated(model, [X], config.replace("W.QUANTIZER.TYPE", "uniform", "W.SPECIFIC", []))
        for name, gain in (("0.weight", 2), ("1.weight", 4)):
            assert torch.equal(site(qmodel, name).qparams()[0], gain * site(plain, name).qparams()[0])
        qmodel.save(tmp_path / "saved")
        loaded = QuantModel.load(tmp_path / "saved", model)
        assert loaded.config == config and torch.equal(loaded(X), qmodel(X))
        assert not torch.equal(loaded(X), plain(X))

    def test_a_folder_of_a_quantizer_that_is_not_registered(self, tmp_path: Path) -> None:
        register_gain()
        config = parse_qconfig(GAINS).replace("W.SPECIFIC", [])
        calibrated(nn.Sequential(nn.Linear(4, 2)), [X], config).save(tmp_path / "saved")
        QUANTIZERS._entries.pop("gain")
        with pytest.raises(CheckpointError, match=r"W.QUANTIZER.GAIN=\{'GAIN': 2.0\}: unknown key"):
            QuantModel.load(tmp_path / "saved", nn.Sequential(nn.Linear(4, 2)))

    def test_refusals(self) -> None:
        register_gain()
        with pytest.raises(ConfigError, match=r"W.QUANTIZER.GAIN.GAIN=9: allowed: a number, above 0, at most 8"):
            qconfig({"W.QUANTIZER.GAIN.GAIN": 9})
        with pytest.raises(ConfigError, match=r"GIAN=4.0 at 1: .*did you mean W.QUANTIZER.GAIN\?"):
            qconfig({"W.SPECIFIC": [{"1": ["QUANTIZER.GIAN", 4.0]}]})

    def test_built_by_hand(self) -> None:
        register_gain()
        config = qconfig({"A.QUANTIZER": {"TYPE": "gain", "BIT": 8, "GAIN": {"GAIN": 3}}})
        assert selected_options(config.resolve("A", "fc").QUANTIZER) == GainOptions(GAIN=3.0)
        assert selected_options(config.resolve("W", "fc").QUANTIZER) == Section()

    def test_refused_options_leave_no_trace(self) -> None:
        class WithoutDefault(Section):
            GAIN: float

        with pytest.raises(ConfigError, match="quantizer 'broken': options=WithoutDefault: GAIN needs a default"):

            @register_quantizer("broken", options=WithoutDefault)
            class Broken(Quantizer): ...

        assert "broken" not in QUANTIZERS

    @pytest.mark.parametrize("own", [False, True], ids=["of_the_base", "own"])
    def test_of_an_extended_quantizer(self, own: bool) -> None:
        """One that is registered without options keeps reading those of the class that it extends."""

        @register_quantizer("softer_pact", options=PactOptions if own else None)
        class SofterPact(PACT): ...

        section = "SOFTER_PACT" if own else "PACT"
        config = qconfig({"A.QUANTIZER.TYPE": "softer_pact", f"A.QUANTIZER.{section}.ALPHA_VALUE": 3})
        qmodel = calibrated(nn.Sequential(nn.Linear(4, 2)), [X], config)
        assert site(qmodel, "0.input").alpha.item() == 3
