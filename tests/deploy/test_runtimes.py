from __future__ import annotations

import pytest

from sparsebit.backends import BACKENDS
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
from sparsebit.graph.ops.op_rows import ROWS
from sparsebit.quantization.quant_config import parse_qconfig


def test_every_backend_has_a_profile() -> None:
    assert PROFILES.keys() == BACKENDS.keys()
    assert all(name == profile.name for name, profile in PROFILES.items())


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
class TestProfile:
    def test_ops_are_those_of_the_table(self, profile: RuntimeProfile) -> None:
        names = {row.name for row in ROWS}
        assert (profile.inputs or frozenset()) | profile.conv_fed | profile.outputs | profile.absorbs <= names
        assert profile.conv_fed <= (profile.inputs or names)

    def test_the_recommended_config_is_sound_and_without_costs(self, profile: RuntimeProfile) -> None:
        config = parse_qconfig(profile.recommended())
        assert profile.name == config.BACKEND and config.W.QUANTIZER.BIT == config.A.QUANTIZER.BIT == 8
        assert f"A.QSCHEME={profile.activation_scheme}" not in profile.costs
        assert f"W.QSCHEME={profile.weight_scheme}" not in profile.costs

    def test_costs_are_of_keys_and_values_that_exist(self, profile: RuntimeProfile) -> None:
        config = parse_qconfig(profile.recommended())
        for setting, cost in profile.costs.items():
            key, _, value = setting.partition("=")
            assert not config.is_set(key) or str(value)
            assert len(cost) > 20
