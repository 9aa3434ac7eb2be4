"""Draws the rooms of the package from its imports: `docs/assets/rooms.svg`.

`python scripts/rooms.py` writes the picture; with `--check` it writes nothing and fails where the picture is out of
step; with `--text` it prints the rooms. A home is a package of the outer layers in pyproject.toml; a room is a folder
or a file at the top of a home. A room is drawn above every room that it imports, so all arrows would point down.
"""

from __future__ import annotations

import argparse
import ast
import sys
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "rooms.svg"
LAYERS = (
    ("cli", "compress"),
    ("quantization", "sparse", "llm"),
    ("execution", "deploy"),
    ("graph", "kernels"),
    ("config", "numerics", "report", "records"),
)
WIDTH, ROW, GAP, CHARACTER = 1200, 22, 8, 6.6
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #1b1f24 }
  .title { font-weight: 600; font-size: 13px }
  .home { fill: #f3f5f8; stroke: #b8c0cc }
  .folder { fill: #d7e6fb; stroke: #7ba4dd }
  .file { fill: #ffffff; stroke: #b8c0cc }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ee } .home { fill: #1d2127; stroke: #4a525e }
    .folder { fill: #24405f; stroke: #5b8ac4 } .file { fill: #262b33; stroke: #4a525e }
  }
"""


def modules(home: str) -> dict[str, Path]:
    """The modules of a home by dotted name, without packages themselves."""
    files = sorted((ROOT / "sparsebit" / home).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files if file.stem != "__init__"}


def room_of(module: str) -> str:
    return module.split(".")[2]


def imported(file: Path) -> set[str]:
    """The names that a file imports from the package, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name for name in found if name.startswith("sparsebit.")}


def floors(home: str) -> list[list[tuple[str, int]]]:
    """The rooms of a home with their numbers of files, from the top floor down."""
    files = modules(home)
    below: dict[str, set[str]] = {room_of(name): set() for name in files}
    for name, file in files.items():
        for target in imported(file):
            parts = target.split(".")
            if parts[1] == home and len(parts) > 2 and parts[2] in below:
                below[room_of(name)].add(parts[2])

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in below[room] if other != room), default=0)

    counts = {room: sum(room_of(name) == room for name in files) for room in below}
    levels = sorted({floor(room) for room in below}, reverse=True)
    return [[(room, counts[room]) for room in sorted(below) if floor(room) == level] for level in levels]


def label(room: str, files: int, home: str) -> str:
    is_folder = (ROOT / "sparsebit" / home / room).is_dir()
    return f"{room}/ {files}" if is_folder else room


def draw_rooms(home: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """The rooms of a home, one line for each floor, and the y below the last one."""
    boxes: list[str] = []
    for rooms in floors(home):
        left = x
        for room, files in rooms:
            text = label(room, files, home)
            size = len(text) * CHARACTER + 10
            if left + size > x + width and left > x:
                left, y = x, y + ROW
            kind = "folder" if "/" in text else "file"
            boxes.append(f'<rect class="{kind}" x="{left:.0f}" y="{y:.0f}" width="{size:.0f}" height="18" rx="3"/>')
            boxes.append(f'<text x="{left + 5:.0f}" y="{y + 13:.0f}">{escape(text)}</text>')
            left += size + 5
        y += ROW
    return boxes, y


def picture() -> str:
    body: list[str] = []
    y = 0.0
    for homes in LAYERS:
        width = (WIDTH - GAP * (len(homes) - 1)) / len(homes)
        lefts = [number * (width + GAP) for number in range(len(homes))]
        drawn = [draw_rooms(home, x + GAP, y + 26, width - 2 * GAP) for home, x in zip(homes, lefts, strict=True)]
        bottom = max(end for _, end in drawn) + 4
        for home, x, (boxes, _) in zip(homes, lefts, drawn, strict=True):
            frame = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{bottom - y:.0f}"'
            body += [f'<rect class="home" {frame} rx="6"/>', f'<text class="title" x="{x + GAP:.0f}" y="{y + 17:.0f}">']
            body[-1] += f"{home}</text>"
            body += boxes
        y = bottom + GAP
    lines = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img">\n'
        f"<title>The rooms of the package; imports point down</title>\n<style>{STYLE}</style>\n{lines}\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the picture is out of step")
    parser.add_argument("--text", action="store_true", help="print the floors of each home")
    options = parser.parse_args()
    if options.text:
        for home in (home for homes in LAYERS for home in homes):
            sys.stdout.write(f"{home}\n")
            for rooms in floors(home):
                sys.stdout.write("    " + " | ".join(label(room, files, home) for room, files in rooms) + "\n")
        return 0
    if options.check:
        current = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture()
        return 0 if current else 1
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
