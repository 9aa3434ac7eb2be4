"""parse_qconfig: the one door for configs, with the built-in names registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError
from sparsebit.quantization.quant_config import parse_qconfig

TEXT = "BACKEND: virtual\nDEVICE: cpu\nW: {QUANTIZER: {TYPE: LSQ_plus, BIT: 4}}\nA: {QUANTIZER: {BIT: 8}}\n"
VALUES = {
    "BACKEND": "virtual",
    "DEVICE": "cpu",
    "W": {"QUANTIZER": {"TYPE": "LSQ_plus", "BIT": 4}},
    "A": {"QUANTIZER": {"BIT": 8}},
}


def test_path_mapping_and_text_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "qconfig.yaml"
    file.write_text(TEXT, encoding="utf-8")
    configs = [parse_qconfig(source) for source in (str(file), file, VALUES, TEXT)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].to_dict() == {**VALUES, "W": {"QUANTIZER": {"TYPE": "lsq+", "BIT": 4}}}


def test_config_is_itself() -> None:
    config = parse_qconfig(TEXT)
    assert isinstance(config, QuantConfig) and parse_qconfig(config) is config


@pytest.mark.parametrize("name", ["uniform", "LSQ", "lsq+", "LSQ_plus", "lsq_plus", "DoReFa"])
def test_built_in_weight_quantizers(name: str) -> None:
    assert name.lower().replace("_plus", "+") == parse_qconfig(TEXT).replace("W.QUANTIZER.TYPE", name).W.QUANTIZER.TYPE


@pytest.mark.parametrize("name", ["uniform", "LSQ", "LSQ_plus", "PACT"])
def test_built_in_activation_quantizers(name: str) -> None:
    assert name.lower().replace("_plus", "+") == parse_qconfig(TEXT).replace("A.QUANTIZER.TYPE", name).A.QUANTIZER.TYPE


@pytest.mark.parametrize("kind", ["W", "A"])
@pytest.mark.parametrize("name", ["MINMAX", "moving_average", "Percentile", "MSE", "KL_HISTOGRAM", "aciq"])
def test_built_in_observers(kind: str, name: str) -> None:
    config = parse_qconfig(TEXT).replace(f"{kind}.OBSERVER.TYPE", name)
    assert config.to_dict()[kind]["OBSERVER"]["TYPE"] == name.lower()


def test_default_names_are_registered() -> None:
    config = parse_qconfig(VALUES)
    written_out = parse_qconfig(config.to_yaml(defaults=True))
    assert written_out == config and written_out.is_set("A.OBSERVER.TYPE")


@pytest.mark.parametrize(("kind", "name"), [("W", "pact"), ("A", "dorefa")])
def test_quantizer_made_for_the_other_kind(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}\.QUANTIZER\.TYPE={name}: not made for"):
        parse_qconfig(TEXT).replace(f"{kind}.QUANTIZER.TYPE", name)


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"no config file at 'qconfig\.yml'"):
        parse_qconfig("qconfig.yml")
