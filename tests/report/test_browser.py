"""The page in a real browser: it loads, and every part works with the mouse, the keyboard and on a phone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sparsebit.report.page_data import Run
from sparsebit.report.read_ladder import run_of_ladder
from sparsebit.report.read_record import run_of_record
from tests.report.conftest import Opened
from tests.report.made_runs import HOSTILE, LADDER, LANGUAGE_LADDER, RECORD, large_run


def net(name: str = "net") -> Run:
    """A run with all parts: cards, ladder, graph, layers, tables, notes."""
    searched, made = run_of_ladder(LADDER, name), run_of_record(RECORD, name)
    return searched.replace(layers=made.layers, drawing=made.drawing, tables=made.tables, notes=made.notes)


def test_every_part_is_there(opened: Any) -> None:
    page = opened(net())
    heads = page.texts("h2")
    assert {"What was tried", "Graph", "Layers", "Parameters in float", "What ran", "Notes"} <= set(heads)
    assert "✓ goal met" in page.texts(".badge")[0] and len(page.texts(".card")) == 3
    assert len(page.page.locator("#ladder tbody tr").all()) == 4 and page.is_as_wide_as_the_window()


def test_absent_parts_are_hidden(opened: Any) -> None:
    page = opened(Run("empty", "model"))
    assert page.texts("h2") == [] and page.page.locator("#run > *").count() == 0


def test_tables_sort_and_filter(opened: Any) -> None:
    page = opened(large_run(40))
    first = page.page.locator("#layers tbody tr td:first-child")
    head = page.page.locator("#layers th", has_text="bytes")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending" and first.first.inner_text().endswith("blocks.3.conv3")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending" and first.first.inner_text() == "stages.0.blocks.0.conv0"
    page.page.get_by_label("Filter Layers").fill("stages.1.blocks.2")
    assert first.count() == 4 and "4 of 40 rows" in page.page.locator("#layers").inner_text()


def test_long_tables_show_their_end_on_demand(opened: Any) -> None:
    page = opened(large_run(450))
    rows = page.page.locator("#layers tbody tr")
    assert rows.count() == 200
    page.page.get_by_text("Show all 450 rows").click()
    assert rows.count() == 450


def test_copy_as_csv(opened: Any) -> None:
    page = opened(replace(large_run(3), notes=()))
    page.page.evaluate("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
    page.page.locator("#layers").get_by_text("Copy CSV").click()
    page.page.wait_for_function("window.copied")
    lines = page.page.evaluate("window.copied").splitlines()
    assert lines[0].startswith("layer,operator,") and lines[1].startswith("stages.0.blocks.0.conv0,conv,integer,8,")
    assert len(lines) == 4


def test_a_click_on_a_layer_shows_its_details(opened: Any) -> None:
    page = opened(net())
    page.page.locator('rect[data-name="stem.conv"]').click()
    details = page.page.locator("#details").inner_text()
    assert "stem.conv" in details and "QLinearConv" in details and "0.5 ms, 0.9 ms in float" in details
    assert "sets the only scale" in details
    assert page.page.locator("#details svg .bars").count() > 16 and "layer=stem.conv" in page.page.url
    page.page.locator("#layers tbody tr", has_text="block.conv2").click()
    assert page.page.locator("#details h3").first.inner_text() == "block.conv2"
    assert page.page.locator("rect.chosen").get_attribute("data-name") == "block.conv2"


def test_colours_by_every_metric(opened: Any) -> None:
    page = opened(net())
    tile = page.page.locator('rect[data-name="block.conv2"]')
    seen = {}
    for button in page.page.get_by_role("group", name="Colour by").get_by_role("button").all():
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        page.page.wait_for_timeout(50)
        seen[button.inner_text()] = tile.get_attribute("class").split()[1]
    assert seen == {"Error": "l6", "Time": "l5", "Bits": "l1", "Bytes": seen["Bytes"], "Integer or float": "integer"}
    assert "is-float" in page.page.locator('rect[data-name="block.add"]').get_attribute("class")
    assert "float" in page.page.locator("#legend").inner_text()


def test_search_and_links(opened: Any) -> None:
    page = opened(large_run(300))
    page.page.keyboard.press("/")
    page.page.keyboard.type("stages.7.blocks.2.conv1")
    page.page.keyboard.press("Enter")
    assert page.page.locator("#details h3").first.inner_text() == "stages.7.blocks.2.conv1"
    page.page.wait_for_selector('rect[data-name="stages.7.blocks.2.conv1"]')
    page.page.locator("#search").fill("blocks.0.conv2")  # in full after a dot: before the names that only hold it
    page.page.keyboard.press("Enter")
    assert page.page.locator("#details h3").first.inner_text() == "stages.0.blocks.0.conv2"
    again = opened(net(), fragment=f"#layer={quote(HOSTILE)}")
    assert again.page.locator("#details h3").first.inner_text() == HOSTILE
    assert (
        opened(net(), fragment="#layer=%E0%A4%A").page.locator("#details h3").first.inner_text() == "No layer is chosen"
    )


def test_modules_open_when_zoomed_into(opened: Any) -> None:
    page = opened(large_run(600))
    count = page.page.locator(".canvas rect.tile").count
    assert page.page.locator("rect.tile.folded").count() > 10 and count() < 200
    page.page.locator("rect.tile.folded").nth(3).click()
    page.page.wait_for_selector('rect.tile:not(.folded)[data-name^="stages."]')
    page.page.get_by_label("Show all").click()
    page.page.wait_for_timeout(100)
    before = page.page.locator(".canvas svg > g").get_attribute("transform")
    page.page.mouse.move(400, page.page.locator(".canvas").bounding_box()["y"] + 200)
    page.page.mouse.wheel(0, -300)
    page.page.wait_for_function(
        "before => document.querySelector('.canvas svg > g').getAttribute('transform') !== before", arg=before
    )


def test_drag_moves_the_graph(opened: Any) -> None:
    page = opened(large_run(100))
    page.page.locator(".canvas").scroll_into_view_if_needed()
    box, transform = page.page.locator(".canvas").bounding_box(), page.page.locator(".canvas svg > g")
    before = transform.get_attribute("transform")
    page.page.mouse.move(box["x"] + 20, box["y"] + 300)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 120, box["y"] + 340, steps=4)
    page.page.mouse.up()
    page.page.wait_for_timeout(50)
    assert transform.get_attribute("transform") != before


def test_the_ladder_and_its_plot_show_recipes(opened: Any) -> None:
    page = opened(net())
    page.page.locator('.point[data-step="02-w4"]').click()
    assert (
        page.page.locator("#step h3").inner_text() == "02-w4"
        and HOSTILE in page.page.locator("#step pre").first.inner_text()
    )
    page.page.locator("#ladder tbody tr", has_text="03-broken").click()
    assert "no kernel" in page.page.locator("#step").inner_text()
    assert page.page.locator(".point[data-step]").count() == 3 and page.page.locator(".point.best").count() == 1


def test_two_runs_differences_first(opened: Any) -> None:
    layers = tuple(replace(layer, sqnr_db=12.0) if layer.name == "block.conv1" else layer for layer in net().layers)
    page = opened(net("before"), net("after").replace(layers=layers))
    rows = page.page.locator("#comparison tbody tr")
    table = page.page.locator("#comparison table").nth(1)
    assert table.locator("tbody tr").first.inner_text().split("\t")[:4] == [
        "block.conv1",
        "24.0 dB",
        "12.0 dB",
        "12.0 dB",
    ]
    assert rows.count() > 4 and page.texts("#runs button") == ["before", "after"]
    page.page.locator("#runs button", has_text="after").click()
    page.page.locator("#layers tbody tr", has_text="block.conv1").click()
    assert "12.0 dB" in page.page.locator("#details").inner_text()
    page.page.get_by_role("group", name="Compare by").get_by_text("Time").click()
    assert "0 ms" in table.inner_text() or "0 µs" in table.inner_text()


def test_dark_by_the_system_and_by_the_switch(opened: Any) -> None:
    def back(page: Opened) -> str:
        return str(page.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark, light = opened(net(), color_scheme="dark"), opened(net(), color_scheme="light")
    assert back(dark) == "rgb(20, 23, 28)" and back(light) == "rgb(246, 247, 249)"
    dark.page.locator("#theme").click()
    assert back(dark) == back(light)


def test_a_phone(opened: Any) -> None:
    page = opened(net("before"), net("after"), viewport={"width": 400, "height": 800})
    assert page.is_as_wide_as_the_window()
    page.page.locator("#layers tbody tr").first.click()
    assert page.is_as_wide_as_the_window()


def test_by_keyboard_alone(opened: Any) -> None:
    page = opened(net())
    page.page.locator(".canvas svg").focus()
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowDown")
    said = page.page.locator("#said").inner_text()
    page.page.keyboard.press("Enter")
    assert said and page.page.locator("#details h3").first.inner_text() == said.split(",")[0]
    for key in ("+", "-", "Escape", "0", "ArrowLeft", "ArrowRight", "ArrowUp"):
        page.page.keyboard.press(key)
    reached = set()
    for _ in range(120):
        page.page.keyboard.press("Tab")
        reached.add(
            page.page.evaluate("document.activeElement.closest('section')?.id + ' ' + document.activeElement.tagName")
        )
    assert {
        "ladder BUTTON",
        "ladder path",
        "ladder TR",
        "graph svg",
        "graph BUTTON",
        "graph INPUT",
        "layers TR",
    } <= reached


def test_every_control_has_a_name(opened: Any) -> None:
    page = opened(net(), net("other"))
    nameless = page.page.evaluate(
        "[...document.querySelectorAll('button, input, svg[role], [role=region]')]"
        ".filter(item => !(item.textContent.trim() || item.getAttribute('aria-label'))).map(item => item.outerHTML)"
    )
    assert nameless == []


def test_hostile_names_are_text(opened: Any) -> None:
    page = opened(net(HOSTILE), net("other"))
    assert page.page.locator("h1").inner_text() == f"{HOSTILE} and other"
    assert page.page.locator("#layers tbody td", has_text=HOSTILE).count() >= 1
    assert page.page.evaluate("document.querySelectorAll('script').length") == 2


def test_a_thousand_layers_open_and_stay_quick(opened: Any) -> None:
    page = opened(large_run(1000), large_run(1000, name="flat", is_flat=True))
    assert page.page.locator("#layers tbody tr").count() == 200
    page.page.locator("#runs button", has_text="flat").click()
    page.page.wait_for_selector("rect.tile")
    assert page.page.locator(".canvas rect").count() < 1500


def test_the_policy_stops_other_scripts(opened: Any, tmp_path: Path) -> None:
    page = opened(net())
    page.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.page.evaluate("window.ran") is None
    page.faults[:] = [fault for fault in page.faults if "Content Security Policy" not in fault]


def test_print_shows_whole_tables(opened: Any) -> None:
    page = opened(net())
    page.page.emulate_media(media="print")
    assert page.page.evaluate("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
    assert not page.page.locator("#theme").is_visible() and json.dumps(page.texts("h2"))


def test_a_language_model_has_bits_and_no_times(opened: Any) -> None:
    page = opened(run_of_ladder(LANGUAGE_LADDER, "llama"))
    heads = page.texts("#ladder th")
    assert "bits" in heads and "loss, % of perplexity" in heads and "time" not in heads and "MACs" not in heads
    assert (
        "bits of a weight" in page.page.locator("#ladder .plot text").all_text_contents()
        and page.page.locator(".point[data-step]").count() == 3
    )
    page.page.locator('.point[data-step="03-w3"]').click()
    assert "recipe_for('transformers', bits=3)" in page.page.locator("#step pre").inner_text()


def test_a_single_step_has_no_plot(opened: Any) -> None:
    page = opened(run_of_ladder(LANGUAGE_LADDER.replace(steps=LANGUAGE_LADDER.steps[1:2]), "llama"))
    assert page.page.locator(".point").count() == 0 and "02-w4-gptq" in page.page.locator("#step").inner_text()
    assert "1 row" in page.page.locator("#ladder").inner_text()


def test_what_pruning_left_is_a_colour(opened: Any) -> None:
    layers = tuple(replace(one, kept=0.1 if place % 2 else 1.0, sqnr_db=None) for place, one in enumerate(net().layers))
    page = opened(net().replace(layers=layers))
    assert page.texts('#graph [aria-pressed="true"]') == ["What stays"]
    levels = [
        page.page.locator(f'rect[data-name="{name}"]').get_attribute("class") for name in ("stem.conv", "stem.relu")
    ]
    assert "l0" in levels[0].split() and "l6" in levels[1].split()
    page.page.locator("#layers tbody tr").nth(1).click()
    assert "weight that stays" in page.page.locator("#details").inner_text()


def test_further_tables_open_by_a_click_by_key_and_for_printing(opened: Any) -> None:
    page = opened(net())
    summary = page.page.locator("summary", has_text="Parameters in float")
    assert page.page.locator("details table").count() == 0
    summary.focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("details table")
    assert "stem.conv.bias" in page.page.locator("details[open]").inner_text()
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.page.wait_for_function(
        "document.querySelectorAll('details table').length === document.querySelectorAll('details').length"
    )


@pytest.mark.parametrize("num_layers", [0, 1000])
def test_the_size_of_the_page(opened: Any, tmp_path: Path, num_layers: int) -> None:
    """At most 400 kB and 1 kB a layer, with all that a record may hold of a layer."""
    layers = large_run(num_layers).layers
    found = next(layer.tensors for layer in net().layers if layer.name == "stem.conv")
    values = tuple(0.001234 * (1 + place) for place in range(64))
    tensors = tuple(replace(tensor, scales=values, peaks=values, observer="minmax") for tensor in found)
    full = tuple(replace(layer, tensors=tensors, causes=net().layers[0].causes) for layer in layers)
    opened(net().replace(layers=full, drawing=large_run(num_layers).drawing if num_layers else None))
    assert (tmp_path / "page.html").stat().st_size <= 400_000 + 1000 * num_layers
