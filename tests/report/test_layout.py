from __future__ import annotations

import itertools

from sparsebit.report.layout import draw
from sparsebit.report.page_data import Drawing
from tests.report.made_runs import large_run


def drawn(names: list[str], inputs: list[list[int]]) -> Drawing:
    return draw(names, inputs)


def test_layers_are_inside_their_boxes_and_apart_from_each_other() -> None:
    drawing = large_run(200).drawing
    assert drawing is not None
    width, height = drawing.layer_width, drawing.layer_height
    for place, at in enumerate(drawing.box_of):
        box = drawing.boxes[at]
        assert box.x <= drawing.x[place] and drawing.x[place] + width <= box.x + box.width
        assert box.y <= drawing.y[place] and drawing.y[place] + height <= box.y + box.height
    spots = sorted(zip(drawing.x, drawing.y, strict=True))
    for (x1, y1), (x2, y2) in itertools.pairwise(spots):
        assert abs(x1 - x2) >= width or abs(y1 - y2) >= height


def test_boxes_are_inside_their_parents_and_siblings_do_not_overlap() -> None:
    drawing = large_run(120).drawing
    assert drawing is not None
    for box in drawing.boxes[1:]:
        outer = drawing.boxes[box.parent]
        assert outer.x < box.x and outer.y < box.y
        assert box.x + box.width < outer.x + outer.width and box.y + box.height < outer.y + outer.height
    for one, two in itertools.combinations(drawing.boxes[1:], 2):
        if one.parent == two.parent:
            aside = one.x + one.width <= two.x or two.x + two.width <= one.x
            assert aside or one.y + one.height <= two.y or two.y + two.height <= one.y


def test_a_layer_is_below_what_it_reads_and_branches_are_side_by_side() -> None:
    drawing = drawn(["a", "b", "c", "d"], [[], [0], [0], [1, 2]])
    assert drawing.y[0] < drawing.y[1] == drawing.y[2] < drawing.y[3] and drawing.x[1] != drawing.x[2]


def test_branches_are_ordered_by_what_they_read() -> None:
    # 2 reads 1, and 3 reads 0: without an order, the edges would cross
    drawing = drawn(["a", "b", "c", "d"], [[], [], [1], [0]])
    assert (drawing.x[0] < drawing.x[1]) == (drawing.x[3] < drawing.x[2])


def test_a_module_of_one_part_gets_no_box() -> None:
    drawing = drawn(["features.block.conv", "features.block.relu", "head.fc"], [[], [0], [1]])
    assert [box.name for box in drawing.boxes] == ["", "features.block"]


def test_names_with_slashes_are_paths_too() -> None:
    drawing = drawn(["/layer1/conv/Conv", "/layer1/conv2/Conv", "/fc/Gemm"], [[], [0], [1]])
    assert [box.name for box in drawing.boxes] == ["", "layer1"]


def test_many_parts_of_one_module_are_put_into_boxes() -> None:
    drawing = large_run(1000, is_flat=True).drawing
    assert drawing is not None
    assert 20 < len(drawing.boxes) < 60 and all(box >= 1 for box in drawing.box_of)


def test_a_long_network_is_about_as_wide_as_high() -> None:
    drawing = drawn([f"l{i}" for i in range(60)], [[i - 1] if i else [] for i in range(60)])
    assert 0.7 < drawing.boxes[0].width / drawing.boxes[0].height < 4


def test_loops_unknown_order_and_no_edges() -> None:
    looped = drawn(["a.x", "b.x", "a.y"], [[], [0], [1]])  # a reads b, which reads a
    assert len(set(zip(looped.x, looped.y, strict=True))) == 3
    loose = drawn(["a", "b"], [[1], [0]])
    assert len(set(zip(loose.x, loose.y, strict=True))) == 2
    assert drawn([], []).boxes[0].width > 0
