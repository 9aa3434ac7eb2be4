from __future__ import annotations


def listed(text: str) -> list[str]:
    """`"a | b"`: its parts. Several of them on a line, where a list would take a line for each."""
    return [part.strip() for part in text.split("|")]
