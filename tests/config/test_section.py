"""Section: what was written, changed copies, plain values and back."""

from __future__ import annotations

import copy
import pickle

import pytest
import yaml

from sparsebit.config.reading import read
from sparsebit.config.schema import QuantConfig
from sparsebit.config.selectors import Override
from sparsebit.errors import ConfigError
from tests.config.conftest import config

WRITTEN = config(
    {
        "BACKEND": "onnxruntime",
        "SKIP_TRACE_MODULES": ["stem.*"],
        "A.QADD.ENABLE_QUANT": False,
        "W.SPECIFIC": [{"fc": ["OBSERVER.TYPE", "MSE"], "*head": ["QUANTIZER.DISABLE", True]}],
    }
)


class TestIsSet:
    @pytest.mark.parametrize("key", ["BACKEND", "A", "A.QADD", "A.QADD.ENABLE_QUANT", "W.QUANTIZER.BIT", "W.SPECIFIC"])
    def test_written(self, key: str) -> None:
        assert QuantConfig.from_dict(WRITTEN).is_set(key)

    @pytest.mark.parametrize("key", ["SCHEDULE", "SCHEDULE.FUSE_BN", "A.QSCHEME", "W.QUANTIZER.TYPE", "A.SPECIFIC"])
    def test_default(self, key: str) -> None:
        assert not QuantConfig.from_dict(WRITTEN).is_set(key)

    def test_resolved_layer_knows_its_overrides(self) -> None:
        layer = QuantConfig.from_dict(WRITTEN).resolve("W", "fc")
        assert layer.is_set("OBSERVER.TYPE") and not layer.is_set("QUANTIZER.TYPE")

    def test_key_that_does_not_exist(self) -> None:
        with pytest.raises(
            ConfigError, match=r"A\.QAD\.ENABLE_QUANT: unknown key; .* did you mean A\.QADD\.ENABLE_QUANT\?"
        ):
            QuantConfig.from_dict(WRITTEN).is_set("A.QAD.ENABLE_QUANT")


class TestReplace:
    def test_gives_a_copy(self) -> None:
        before = QuantConfig.from_dict(config())
        after = before.replace("W.QUANTIZER.BIT", 4)
        assert (before.W.QUANTIZER.BIT, after.W.QUANTIZER.BIT) == (8, 4)
        assert after.A == before.A

    def test_several_keys_at_once(self) -> None:
        after = QuantConfig.from_dict(config()).replace(
            "W.QUANTIZER.BIT", 4, "A.QUANTIZER.DISABLE", True, "BACKEND", "openvino"
        )
        assert (after.W.QUANTIZER.BIT, after.A.QUANTIZER.DISABLE, after.BACKEND) == (4, True, "openvino")

    def test_is_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"W\.QUANTIZER\.BIT=4: tensorrt runs 8-bit"):
            QuantConfig.from_dict(config({"BACKEND": "tensorrt"})).replace("W.QUANTIZER.BIT", 4)
        with pytest.raises(ConfigError, match=r"did you mean W\.QUANTIZER\.BIT\?"):
            QuantConfig.from_dict(config()).replace("W.QUANTIZER.BITS", 4)

    def test_odd_number_of_arguments(self) -> None:
        with pytest.raises(TypeError, match="pairs"):
            QuantConfig.from_dict(config()).replace("W.QUANTIZER.BIT", 4, "BACKEND")

    def test_adds_an_override(self) -> None:
        before = QuantConfig.from_dict(WRITTEN)
        after = before.replace("W.SPECIFIC", [Override("*", (("OBSERVER.TYPE", "aciq"),)), *before.W.SPECIFIC])
        assert (before.resolve("W", "fc").OBSERVER.TYPE, after.resolve("W", "fc").OBSERVER.TYPE) == ("mse", "aciq")

    def test_default_that_follows_the_backend_follows_it_again(self) -> None:
        tensorrt = QuantConfig.from_dict(config({"BACKEND": "tensorrt"}))
        assert tensorrt.A.QSCHEME == "per-tensor-symmetric"
        assert tensorrt.replace("BACKEND", "virtual").A.QSCHEME == "per-tensor-affine"

    def test_nothing_can_be_edited(self) -> None:
        frozen = QuantConfig.from_dict(config())
        with pytest.raises(
            ConfigError, match=r"BIT=4: a config is frozen; `replace` returns a changed and checked copy"
        ):
            frozen.W.QUANTIZER.BIT = 4
        assert frozen.W.QUANTIZER.BIT == 8


class TestRoundTrip:
    def test_what_was_written(self) -> None:
        expected = copy.deepcopy(WRITTEN)
        expected["W"]["SPECIFIC"] = [{"fc": ["OBSERVER.TYPE", "MSE"]}, {"*head": ["QUANTIZER.DISABLE", True]}]
        assert QuantConfig.from_dict(WRITTEN).to_dict() == expected

    @pytest.mark.parametrize("defaults", [False, True], ids=["written", "all"])
    @pytest.mark.parametrize("changes", [{}, {"W.QUANTIZER.BIT": ..., "W.QUANTIZER.DISABLE": True}], ids=["8/8", "-/8"])
    def test_yaml(self, defaults: bool, changes: dict[str, object]) -> None:
        before = QuantConfig.from_dict({**WRITTEN, **config(changes)})
        after = QuantConfig.from_dict(read(before.to_yaml(defaults=defaults)))
        assert after == before and hash(after) == hash(before)
        assert after.is_set("SCHEDULE.FUSE_BN") is defaults

    def test_yaml_is_plain(self) -> None:
        text = QuantConfig.from_dict(WRITTEN).to_yaml(defaults=True)
        assert "!" not in text and list(yaml.safe_load(text)) == list(QuantConfig.model_fields)

    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
    )
    def test_copies_are_equal(self, again: object) -> None:
        before = QuantConfig.from_dict(WRITTEN)
        after = again(before)  # type: ignore[operator]
        assert after == before and after.is_set("BACKEND") and not after.is_set("SCHEDULE")

    def test_user_values_are_not_shared(self) -> None:
        values = config()
        made = QuantConfig.from_dict(values)
        values["W"]["QUANTIZER"]["BIT"] = 2
        assert made.W.QUANTIZER.BIT == 8
