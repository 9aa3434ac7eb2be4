from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from sparsebit.errors import ConfigError
from sparsebit.option_fields import check_options, option, options_of


@dataclass(frozen=True)
class Oven:
    heat: int = option(180, "Degrees.", least=50, most=250)
    share: float = option(0.5, "Of the shelf.", least=0, below=1, usual="a half is usual")
    rate: float = option(1.0, "Per minute.", above=0)
    mode: str = option("fan", "How it heats.", choices=("fan", "grill"))
    minutes: int | None = option(None, "At most.", least=1)
    label: str = ""

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"heat": 49}, "heat=49: allowed: 50 to 250"),
        ({"heat": 251}, "heat=251: allowed: 50 to 250"),
        ({"share": 1.0}, "share=1.0: allowed: 0 to less than 1; a half is usual"),
        ({"share": float("nan")}, "share=nan: allowed"),
        ({"rate": 0.0}, "rate=0.0: allowed: more than 0"),
        ({"mode": "boil"}, "mode='boil': allowed: fan, grill"),
        ({"minutes": 0}, "minutes=0: allowed: 1 or more"),
        ({"heat": None}, "heat=None: allowed"),
    ],
    ids=str,
)
def test_values_outside_of_the_limits_are_errors(given: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        Oven(**given)


def test_limits_themselves() -> None:
    Oven(heat=50, share=0, rate=1e-9, minutes=1)
    Oven(heat=250, mode="grill", minutes=None)
    assert list(options_of(Oven)) == ["heat", "share", "rate", "mode", "minutes"]
