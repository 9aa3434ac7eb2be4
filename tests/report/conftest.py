"""A page in a real browser, in which anything that the console says is a fault."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebit.report import write_page
from sparsebit.report.page_data import Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with sync_api.sync_playwright() as playwright:
        if CHROMIUM is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("there is no chromium here (apt-get install chromium, or playwright install chromium)")
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Opened:
    """A page in the browser; console messages, errors, requests and dialogs are faults."""

    def __init__(self, browser: Any, file: Path, fragment: str = "", **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1300, "height": 900}, **options})
        self.page.set_default_timeout(5000)
        self.faults: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append("dialog") or dialog.dismiss())
        self.page.on("request", lambda request: request.url.startswith("file://") or self.faults.append(request.url))
        self.page.goto(f"{file.as_uri()}{fragment}")
        self.page.wait_for_selector("#run > section, #run:empty", state="attached")

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]

    def is_as_wide_as_the_window(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Opened] = []

    def open_(*runs: Run, fragment: str = "", **options: Any) -> Opened:
        made.append(Opened(browser, write_page(tmp_path / "page.html", runs), fragment, **options))
        return made[-1]

    yield open_
    faults = [fault for one in made for fault in one.faults]
    for one in made:
        one.page.close()
    assert faults == []
