"""How long the page of `sparsebit report` takes to open in Chromium, and a frame while zooming, by number of layers.

python benchmarks/report_page.py
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sparsebit.report import write_page
from sparsebit.report.causes import causes_of
from sparsebit.report.layout import draw
from sparsebit.report.page_data import HEIGHTS, Bins, Layer, Run, Tensor

ROUNDS = 9
ZOOM = """async () => {
  const surface = document.querySelector('.canvas svg'), at = surface.getBoundingClientRect(), frames = [];
  for (let step = 0, last = performance.now(); step < 40; step++) {
    const wheel = { deltaY: step < 20 ? -120 : 120, clientX: at.left + 300, clientY: at.top + 300, cancelable: true };
    surface.dispatchEvent(new WheelEvent('wheel', wheel));
    await new Promise(requestAnimationFrame);
    const now = performance.now(); frames.push(now - last); last = now;
  }
  return frames.sort((one, two) => one - two)[20];
}"""


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for num_layers in (100, 1000, 3000):
            file = write_page(Path(folder) / "page.html", [made_run(num_layers)])
            opened, frames = zip(*(measure(browser, file) for _ in range(ROUNDS)), strict=True)
            times = f"open {statistics.median(opened):.2f} s (slowest {max(opened):.2f})"
            frame = f"a frame {statistics.median(frames):.0f} ms"
            print(f"{num_layers} layers, {file.stat().st_size / 1000:.0f} kB: {times}, {frame}")
        browser.close()


def measure(browser: Any, file: Path) -> tuple[float, float]:
    """Seconds until the graph is drawn, and the median milliseconds of a frame while zooming in and out."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    began = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector("rect.tile")
    seconds = time.perf_counter() - began
    frame = float(page.evaluate(ZOOM))
    page.close()
    return seconds, frame


def made_run(num_layers: int) -> Run:
    """Residual blocks of four layers in stages of six blocks; each layer with two quantized tensors."""
    chance = random.Random(0)
    layers = []
    for place in range(num_layers):
        block, inputs = place // 4, {place - 1} if place else set()
        inputs |= {place - 4} if place % 4 == 0 and place else set()
        name = f"stages.{block // 6}.blocks.{block % 6}.conv{place % 4}"
        layer = Layer(name, "conv", "integer", 8, 8, 45.0 - place % 35, 9216, 36864, macs=10**6, ms=0.1, float_ms=0.2)
        tensors = made_tensor("weight", chance), made_tensor("input", chance)
        layer = layer.replace(inputs=tuple(sorted(inputs)), tensors=tensors)
        layers.append(layer.replace(causes=causes_of(layer)))
    drawing = draw([layer.name for layer in layers], [layer.inputs for layer in layers])
    return Run("large", "ONNX file", layers=tuple(layers), drawing=drawing)


def made_tensor(role: str, chance: random.Random) -> Tensor:
    """With all that a record may hold of one."""
    scales = tuple(sorted(chance.random() for _ in range(64)))
    bins = [Bins(-1.0, chance.random(), "".join(chance.choices(HEIGHTS, k=64))) for _ in range(2)]
    numbers = [round(chance.uniform(0, 4), 4) for _ in range(6)]
    return Tensor(role, "int8", 8, 64, *(10 + 10 * numbers[0], *numbers[1:5], 0.01), "minmax", scales, scales, *bins)


if __name__ == "__main__":
    main()
