from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib

from sparsebit.report.html import page_html
from sparsebit.report.read_ladder import run_of_ladder
from sparsebit.report.read_record import run_of_record
from sparsebit.report.writing import page_of
from tests.report.made_runs import HOSTILE, LADDER, RECORD, large_run


def page(title: str | None = None) -> str:
    return page_html(page_of([run_of_record(RECORD, "net"), run_of_ladder(LADDER, HOSTILE)], title))


def block(text: str, opening: str, closing: str) -> str:
    return text.partition(opening)[2].partition(closing)[0]


def test_the_policy_allows_this_style_and_this_script_alone() -> None:
    text = page()
    policy = block(text, 'Content-Security-Policy" content="', '"')
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for name in ("style", "script"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_nothing_is_loaded() -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!\$\{)""", page()) and "url(" not in page()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page())


def test_texts_of_records_are_no_markup() -> None:
    text = page(f"{HOSTILE} & </title>")
    assert HOSTILE not in text and text.count("<script") == 2
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;/title&gt;</title>" in text
    data = json.loads(zlib.decompress(base64.b64decode(block(text, 'id="data">', "</script>"))))
    assert data["runs"][1]["name"] == HOSTILE and data["runs"][0]["layers"][-1]["name"] == HOSTILE


def test_names_that_are_not_unicode_are_written() -> None:
    assert page_html(page_of([run_of_record(RECORD, "a\udcff\u2028b")])).encode()


def test_size_of_a_large_page() -> None:
    sizes = [len(page_html(page_of([large_run(count)]))) for count in (1, 1000)]
    assert sizes[0] < 100_000 and sizes[1] < 400_000 + 1000 * 1000
