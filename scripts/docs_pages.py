"""Writes `reference/api/*.md`, a page per home of the package with every public module in it: an mkdocs hook.

All other pages are files, so that they can be read in the repository too. Those that list what the code knows are
written, or checked by a test, from the code: `reference/config.md` (docs/generate_config_reference.py),
`reference/backends.md` (scripts/backend_tables.py), `benchmarks/*.md` (scripts/benchmark_tables.py),
`reference/command-line.md` (tests/cli/test_main.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sparsebit"
API = "reference/api"
MERMAID = "assets/mermaid.tiny.js"  # @mermaid-js/tiny 11.17.2


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
        # Not in the search: a reader who looks for a word wants the guide, not every function that has it in its name.
        head = ["---", "search: {exclude: true}", "---", "", f"# {name}", ""]
        text = "\n".join([*head, *(f"::: {module}\n" for module in modules)])
        files.append(File.generated(config, f"{API}/{name}.md", content=text))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pages with a diagram, and only those, load the 2.5 MB that draw it: from here, not from a CDN."""
    if 'class="mermaid"' not in html:
        return html
    address = get_relative_url(MERMAID, page.url)
    return f'{html}\n<script src="{address}"></script>'


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
