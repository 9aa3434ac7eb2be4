"""The processor that a runtime runs on: its name, and whether its 8-bit products can overflow."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_VNNI = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


@functools.cache
def cpu_name() -> str:
    """`Intel(R) Xeon(R) Platinum 8481C`, or the architecture if the system does not name it."""
    fields = _fields()
    return fields.get("model name") or platform.processor() or platform.machine()


def is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def saturates(machine: str = "", flags: str | None = None) -> bool:
    """Whether sums of two uint8 x int8 products clip at 16 bits: on x86 without VNNI. Unknown counts as False.

    >>> saturates("x86_64", "sse4_2 avx2"), saturates("x86_64", "avx2 avx512_vnni"), saturates("aarch64", "asimd")
    (True, False, False)
    """
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return False
    found = _fields().get("flags", "") if flags is None else flags
    return bool(found) and not _VNNI & set(found.split())


@functools.cache
def _fields() -> dict[str, str]:
    """The first entry of /proc/cpuinfo; empty if there is none."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return {}
    first = file.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
