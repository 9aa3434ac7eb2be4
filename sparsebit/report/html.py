"""A `Page` as one HTML file that loads nothing: it contains style, script and data, and its policy allows only these.

Names of layers and other texts of records reach the page only as packed JSON in a block that is not executed; the
script writes them as text, never as markup. Packed, because a layer's histograms and scales are 2 kB of text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from functools import cache
from html import escape
from importlib import resources

from sparsebit.report.page_data import Page, plain

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="sparsebit {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript><p>This page is drawn by its own script; allow it, or use sparsebit report --text.</p></noscript></main>
<script type="application/octet-stream" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""  # noqa: E501


def page_html(page: Page) -> str:
    """The whole file."""
    style, script = _asset("page.css"), _asset("page.js")
    hashes = f"style-src '{_sha256(style)}'; script-src '{_sha256(script)}'"
    policy = f"default-src 'none'; {hashes}; img-src data:; base-uri 'none'; form-action 'none'"
    return _TEMPLATE.format(
        policy=policy,
        version=escape(page.version),
        title=escape(page.title.encode("utf-8", "replace").decode()),
        style=style,
        data=_as_data(page),
        script=script,
    )


def _as_data(page: Page) -> str:
    """JSON, deflated, in base64."""
    text = json.dumps(plain(page), allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


@cache
def _asset(name: str) -> str:
    text = (resources.files("sparsebit.report") / "assets" / name).read_text(encoding="utf-8")
    return f"\n{text}"


def _sha256(text: str) -> str:
    """The form in which a Content-Security-Policy names an inline block."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
