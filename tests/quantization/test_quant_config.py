"""parse_qconfig: the one door for configs, with the built-in names registered."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel
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


@pytest.mark.parametrize("name", ["virtual", "onnxruntime", "OpenVINO", "tensorrt"])
def test_backends_are_configs(name: str) -> None:
    config = parse_qconfig(name)
    assert name.lower() == config.BACKEND and config.W.QUANTIZER.BIT == config.A.QUANTIZER.BIT == 8
    assert QuantModel(nn.Sequential(nn.Linear(2, 2)), name).cfg == config
    weights = parse_qconfig(f"{name}-weights-only")
    assert name.lower() == weights.BACKEND and weights.A.QUANTIZER.DISABLE and weights.W == config.W


@pytest.mark.parametrize("name", ["onnxrt", "onnx", "tensort", "weightsonly"])
def test_near_names_are_offered(name: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean (onnxruntime|tensorrt|weights-only)\? Names: virtual, onnx"):
        parse_qconfig(name)


@pytest.mark.parametrize(("short", "name"), [("ort", "onnxruntime"), ("OV", "openvino"), ("trt", "tensorrt")])
def test_usual_short_names_are_known(short: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {name}\?"):
        parse_qconfig(short)


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_empty_text(text: str) -> None:
    with pytest.raises(ConfigError, match="the config is empty text: give the path of a YAML file"):
        parse_qconfig(text)


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tensorrt").write_text(TEXT, encoding="utf-8")
    assert parse_qconfig("tensorrt").BACKEND == "virtual"


def test_what_is_not_near_a_name_is_a_path() -> None:
    with pytest.raises(ConfigError, match="no config file at 'zzz'"):
        parse_qconfig("zzz")
