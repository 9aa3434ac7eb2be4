"""Writes the reference pages from the code: an mkdocs hook, so that what is documented is what exists.

- `reference/api/*.md`: a page per home of the package, with every public module in it;
- `<!-- generated: config -->`: a table of every config key, from the schema;
- `<!-- generated: backends -->`: what each backend runs, from `sparsebit.backends`;
- `<!-- generated: command line -->`: every command, from the typer app.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from sparsebit.backends import NumberRules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sparsebit"
API = "reference/api"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that `on_files` writes where the navigation says `reference/api`."""
    pages = [{name: f"{API}/{name}.md"} for name in homes()]

    def fill(entry: Any) -> Any:
        if isinstance(entry, list):
            return [fill(item) for item in entry]
        if isinstance(entry, dict):
            return {title: pages if target == API else fill(target) for title, target in entry.items()}
        return entry

    config.nav = fill(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, modules in homes().items():
        text = "\n".join([f"# {name}", "", *(f"::: {module}\n" for module in modules)])
        files.append(File.generated(config, f"{API}/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for marker, write in GENERATED.items():
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    return markdown


def homes() -> dict[str, list[str]]:
    """{"sparsebit.numerics": [its public modules], ...}; single files of the ground floor are homes of their own."""
    found: dict[str, list[str]] = {"sparsebit": ["sparsebit"]}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if len(parts) == 2 and parts[1] == "__init__":
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts):
            found.setdefault(".".join(parts[:2]), []).append(".".join(parts))
    return found


def config_table() -> str:
    """Every key with its values, default and meaning, as the schema has them."""
    import sparsebit.quantization.quant_config  # noqa: F401  (files the built-in names that the schema lists)
    from sparsebit.config.fields import describe, section_of, walk
    from sparsebit.config.schema import QuantConfig

    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for path, field in walk(QuantConfig):
        if not section_of(field):
            # An unset key has no default worth showing: what happens then is part of its meaning.
            known = not (field.is_required() or field.default_factory) and (field.default or field.default is False)
            default = f"`{yaml.safe_dump(field.default).split()[0]}`" if known else ""
            rows.append(
                f"| `{'.'.join(path)}` | {cell(describe(field))} | {default} | {cell(field.description or '')} |"
            )
    return "\n".join(rows)


def backend_table() -> str:
    from sparsebit.backends import BACKENDS

    rows = ["| backend | weights | activations | weights where the activations stay float |", "|---|---|---|---|"]
    for backend in BACKENDS.values():
        kinds = (backend.weight, backend.activation, backend.weight_only)
        rows.append(f"| `{backend.name}` | {' | '.join(map(in_words, kinds))} |")
    return "\n".join(rows)


def in_words(rules: NumberRules) -> str:
    bits = sorted(rules.bits)
    span = f"{bits[0]} to {bits[-1]}" if len(bits) > 2 else " or ".join(map(str, bits))
    kinds = " or ".join(f"per-{kind}" for kind in ("tensor", "channel", "group") if kind in rules.granularities)
    symmetry = " or ".join(name for name, value in (("symmetric", True), ("affine", False)) if value in rules.symmetric)
    return f"{span} bits; {kinds}; {symmetry}"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def command_line() -> str:
    """What `typer ... utils docs` writes, without its title: the page has one."""
    command = [sys.executable, "-m", "typer", "sparsebit.cli.main", "utils", "docs", "--name", "sparsebit"]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return text.split("\n", 1)[1] if text.startswith("# ") else text


GENERATED: dict[str, Callable[[], str]] = {
    "<!-- generated: config -->": config_table,
    "<!-- generated: backends -->": backend_table,
    "<!-- generated: command line -->": command_line,
}
