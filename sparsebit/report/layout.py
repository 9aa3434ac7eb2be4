"""Places the layers of a graph in nested boxes of modules. The page draws at these positions and computes none itself.

A layered layout: in every module, a part's row is the longest path to it, and parts of one row are sorted by the
average place of what they read. Long columns are broken, as in a newspaper, so that a model of a hundred blocks is
about as wide as high. A module's box has the same place whether it is drawn folded or open, so opening one moves
nothing.

The code is our own because no library fits: networkx has layers but neither nested boxes nor fewer crossings without
numpy, grandalf is unmaintained and takes seconds for 1,000 nodes, and Graphviz is a program of its own. Time grows with
the number of edges times the depth of modules; 3,000 layers take about 0.1 s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparsebit.report.page_data import Box, Drawing

WIDTH, HEIGHT = 148, 44  # of a layer
_GAP_X, _GAP_Y = 18, 26
_PAD, _TITLE = 14, 32  # around the parts of a module, and above them
_ASPECT = 1.7  # width over height of a module
_MOST_PARTS = 90  # in one module; more parts are grouped into boxes of consecutive ones
_SWEEPS = 4


@dataclass
class _Group:
    """A module: `parts` are layers (indices) and modules inside it, in the order of their first layer."""

    name: str
    parts: list[int | _Group] = field(default_factory=list)
    x: int = 0
    y: int = 0
    width: int = 0
    height: int = 0


def draw(names: Sequence[str], inputs: Sequence[Sequence[int]]) -> Drawing:
    """The drawing of layers with these names; `inputs`: the indices of the layers that each reads."""
    root = _chunked(_tree(names))
    paths = _paths(root, len(names))
    edges: dict[int, list[tuple[int, int]]] = {}
    for target, sources in enumerate(inputs):
        for source in sources:
            _add_edge(edges, paths[source], paths[target])
    places: dict[int, tuple[int, int]] = {}
    _place(root, edges, places)
    boxes: list[Box] = []
    box_of, x, y = [-1] * len(names), [0] * len(names), [0] * len(names)
    _flatten(root, (-1, 0, 0), places, boxes, (box_of, x, y))
    return Drawing(tuple(boxes), tuple(box_of), tuple(x), tuple(y), WIDTH, HEIGHT, _TITLE)


def _tree(names: Sequence[str]) -> _Group:
    """Modules by the parts of the names; a module with a single part is that part."""
    root = _Group("")
    known: dict[tuple[str, ...], _Group] = {(): root}
    for index, name in enumerate(names):
        path = tuple(part for part in re.split(r"[./]", name) if part)[:-1]
        for length in range(1, len(path) + 1):
            if path[:length] not in known:
                known[path[:length]] = group = _Group(".".join(path[:length]))
                known[path[: length - 1]].parts.append(group)
        known[path].parts.append(index)
    return _simplified(root, is_root=True)


def _simplified(group: _Group, *, is_root: bool = False) -> _Group:
    parts = [part if isinstance(part, int) else _simplified(part) for part in group.parts]
    group.parts = [
        part.parts[0] if isinstance(part, _Group) and len(part.parts) == 1 and isinstance(part.parts[0], int) else part
        for part in parts
    ]
    only = group.parts[0] if len(group.parts) == 1 else None
    return only if isinstance(only, _Group) and not is_root else group


def _chunked(group: _Group) -> _Group:
    """Modules with very many parts get boxes of consecutive ones."""
    for part in group.parts:
        if isinstance(part, _Group):
            _chunked(part)
    if len(group.parts) > _MOST_PARTS:
        size = max(12, math.ceil(math.sqrt(len(group.parts))))
        starts = range(0, len(group.parts), size)
        name = f"{group.name} " if group.name else ""
        group.parts = [
            _Group(f"{name}{start + 1} to {min(start + size, len(group.parts))}", group.parts[start : start + size])
            for start in starts
        ]
    return group


def _paths(root: _Group, num_layers: int) -> list[tuple[tuple[_Group, int], ...]]:
    """For each layer the modules around it, from the outside, each with the index of the part that it is in."""
    found: list[tuple[tuple[_Group, int], ...]] = [()] * num_layers
    stack: list[tuple[_Group, tuple[tuple[_Group, int], ...]]] = [(root, ())]
    while stack:
        group, above = stack.pop()
        for place, part in enumerate(group.parts):
            path = (*above, (group, place))
            if isinstance(part, _Group):
                stack.append((part, path))
            else:
                found[part] = path
    return found


def _add_edge(
    edges: dict[int, list[tuple[int, int]]],
    source: tuple[tuple[_Group, int], ...],
    target: tuple[tuple[_Group, int], ...],
) -> None:
    """Note the edge in the innermost module that holds both ends."""
    for (group, one), (other, two) in zip(source, target, strict=False):
        if group is not other:
            return
        if one != two:
            edges.setdefault(id(group), []).append((one, two))
            return


def _place(group: _Group, edges: dict[int, list[tuple[int, int]]], places: dict[int, tuple[int, int]]) -> None:
    """Sizes of the module and places of its parts relative to it, from the inside out."""
    for part in group.parts:
        if isinstance(part, _Group):
            _place(part, edges, places)
    sizes = [(part.width, part.height) if isinstance(part, _Group) else (WIDTH, HEIGHT) for part in group.parts]
    rows = _rows(len(sizes), edges.get(id(group), []))
    left, most = _PAD, _PAD + _TITLE
    for column in _columns(rows, sizes):
        width = max(_row_width(row, sizes) for row in column)
        top = _PAD + _TITLE
        for row in column:
            x, height = left + (width - _row_width(row, sizes)) // 2, max(sizes[part][1] for part in row)
            for part in row:
                at = x, top + (height - sizes[part][1]) // 2
                one = group.parts[part]
                if isinstance(one, _Group):
                    one.x, one.y = at
                else:
                    places[one] = at
                x += sizes[part][0] + _GAP_X
            top += height + _GAP_Y
        left, most = left + width + 2 * _GAP_X, max(most, top - _GAP_Y)
    group.width, group.height = max(left - 2 * _GAP_X, 0) + _PAD, most + _PAD


def _rows(count: int, edges: list[tuple[int, int]]) -> list[list[int]]:
    """Rows of parts: the row is the longest path to the part. Edges against the order of the layers are ignored."""
    before: list[set[int]] = [set() for _ in range(count)]
    for source, target in edges:
        if source < target:
            before[target].add(source)
    rank = [0] * count
    for part in range(count):
        rank[part] = max((rank[source] + 1 for source in before[part]), default=0)
    rows: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for part in range(count):
        rows[rank[part]].append(part)
    after: list[set[int]] = [set() for _ in range(count)]
    for target, sources in enumerate(before):
        for source in sources:
            after[source].add(target)
    # Fewer crossings (barycenter method): each part moves to the mean place of its neighbours, down and up in turns.
    for sweep in range(_SWEEPS):
        near = before if sweep % 2 == 0 else after
        place = {part: float(index) - len(row) / 2 for row in rows for index, part in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            means = {part: sum(place[one] for one in near[part]) / len(near[part]) for part in row if near[part]}
            row.sort(key=lambda part: means.get(part, place[part]))
            place |= {part: float(index) - len(row) / 2 for index, part in enumerate(row)}
    return [broken for row in rows for broken in _broken(row)]


def _broken(row: list[int]) -> list[list[int]]:
    """A row of very many parts, such as layers without any edges, as several rows."""
    most = max(6, math.ceil(math.sqrt(len(row))))
    return [row[start : start + most] for start in range(0, len(row), most)]


def _columns(rows: list[list[int]], sizes: list[tuple[int, int]]) -> list[list[list[int]]]:
    if not rows:
        return []
    heights = [max(sizes[part][1] for part in row) + _GAP_Y for row in rows]
    widths = [_row_width(row, sizes) + 2 * _GAP_X for row in rows]
    total, widest = sum(heights), max(widths)
    # At least three rows per column: shorter columns would save no height and hide which row comes first.
    count = min(max(1, round(math.sqrt(_ASPECT * total / widest))), math.ceil(len(rows) / 3))
    columns: list[list[list[int]]] = [[]]
    used = 0
    for row, height in zip(rows, heights, strict=True):
        if columns[-1] and used + height / 2 > total * len(columns) / count:
            columns.append([])
        columns[-1].append(row)
        used += height
    return columns


def _row_width(row: list[int], sizes: list[tuple[int, int]]) -> int:
    return sum(sizes[part][0] for part in row) + _GAP_X * (len(row) - 1)


def _flatten(
    group: _Group,
    above: tuple[int, int, int],
    places: dict[int, tuple[int, int]],
    boxes: list[Box],
    layers: tuple[list[int], list[int], list[int]],
) -> None:
    """Absolute places. `above`: the index of the box around this one, and where that begins."""
    parent, left, top = above
    x, y, mine = left + group.x, top + group.y, len(boxes)
    boxes.append(Box(group.name, parent, x, y, group.width, group.height))
    for part in group.parts:
        if isinstance(part, _Group):
            _flatten(part, (mine, x, y), places, boxes, layers)
        else:
            layers[0][part], layers[1][part], layers[2][part] = mine, x + places[part][0], y + places[part][1]
