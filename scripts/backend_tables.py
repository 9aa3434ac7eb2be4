"""Writes the tables of docs/guides/backends.md out of the runtime profiles: what is documented is what is planned.

`python scripts/backend_tables.py` writes the page; with `--check` it writes nothing and fails where the page is out of
step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from marked_sections import table, update

from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "backends.md"


def placement() -> str:
    head = ("backend", "inputs", "only behind a convolution", "outputs", "absorbs", "batch norms folded by default")
    return table(head, map(_placement, PROFILES.values()))


def recommended() -> str:
    rows = ((_code([profile.name]), *_config(profile)) for profile in PROFILES.values())
    return table(("backend", "weights", "activations", "FUSE_BN"), rows)


def costs() -> str:
    head = ("backend", "key that you write", "cost")
    rows = [
        (_code([profile.name]), _yaml(setting), cost)
        for profile in PROFILES.values()
        for setting, cost in profile.costs.items()
    ]
    return table(head, rows)


def _placement(profile: RuntimeProfile) -> tuple[str, ...]:
    is_virtual = profile.inputs is None
    return (
        _code([profile.name]),
        "every known op" if profile.inputs is None else _code(profile.inputs),
        _code(profile.conv_fed),
        _code(profile.outputs),
        "every activation" if is_virtual else _code(profile.absorbs),
        "yes" if profile.folds_batchnorm else "no",
    )


def _config(profile: RuntimeProfile) -> tuple[str, str, str]:
    config = profile.recommended()
    parts = [config["W"], config["A"], config["SCHEDULE"]]
    weights, activations, schedule = (part if isinstance(part, dict) else {} for part in parts)
    formats = [f"{part['QUANTIZER']['BIT']} bits, {part['QSCHEME']}" for part in (weights, activations)]
    return formats[0], formats[1], str(schedule["FUSE_BN"]).lower()


def _yaml(setting: str) -> str:
    """`A.QADD.ENABLE_QUANT=False` as it stands in a config file."""
    key, _, value = setting.partition("=")
    return f"`{key}: {value.lower()}`"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    sections = {"placement": placement(), "recommended": recommended(), "costs": costs()}
    return update(PAGE, sections, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
