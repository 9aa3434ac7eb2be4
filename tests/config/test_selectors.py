"""Selectors: which layers a glob means, which override wins, and what was meant by a glob that means nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from sparsebit.config import selectors
from sparsebit.config.config_errors import Faults
from sparsebit.config.selectors import Override, Selector, matches, matches_any, near_names, read_overrides


@pytest.mark.parametrize(("glob", "name", "expected"), [
    ("layer1.0.conv1", "layer1.0.conv1", True), ("layer1.*", "layer1.0.conv1", True),
    ("*conv1", "layer1.0.conv1", True), ("layer?.0.conv[12]", "layer3.0.conv2", True),
    ("layer[!1].*", "layer1.0.conv1", False), ("layer1", "layer1.0.conv1", False),
    ("LAYER1.*", "layer1.0.conv1", False), ("layer1_0_conv1", "layer1.0.conv1", True),
    ("*_conv1", "layer1.0.conv1", True), ("layer1.0", "layer1_0", False), ("a.c", "abc", False), ("*", "", True),
    ("fc", "", False),
])  # fmt: skip
def test_matches(glob: str, name: str, expected: bool) -> None:
    assert matches(glob, name) is expected


@pytest.mark.parametrize("path", ["stem.conv", "0.conv", "Mixed_5b.branch1x1", "encoder.selfAttention.q_proj"])
def test_layers_answer_to_the_name_of_their_node(path: str) -> None:
    model = nn.Module()
    parent, parts = model, path.split(".")
    for part in parts[:-1]:
        parent.add_module(part, nn.Module())
        parent = getattr(parent, part)
    parent.add_module(parts[-1], nn.Linear(1, 1))
    graph = fx.Graph()
    node = graph.call_module(path, (graph.placeholder("x"),))
    fx.GraphModule(model, graph)(torch.ones(1))
    assert matches(node.name, path)


def test_matches_any() -> None:
    assert matches_any(["head", "blocks.*.drop_path"], "blocks.3.drop_path")
    assert not matches_any([], "head")


def globs_for(overrides: Iterable[Override], name: str) -> list[str]:
    selector = Selector(overrides)
    return [selector.overrides[place].glob for place in selector.matching(name)]


class TestSelector:
    def test_keeps_the_order_written_and_the_first_wins(self) -> None:
        overrides = read_overrides([{"layer*": ["A", 1]}, {"fc": ["A", 2], "*": ["A", 3]}])
        assert globs_for(overrides, "fc") == ["fc", "*"]
        assert globs_for(overrides, "layer1.0") == ["layer*", "*"]
        assert Selector(overrides).first("fc") == overrides[1]
        assert Selector(overrides[:2]).first("head") is None

    @pytest.mark.parametrize("glob", ["layer1.*", "layer[12]", "blocks.?.mlp"])
    def test_glob_selects_itself_and_what_covers_it(self, glob: str) -> None:
        assert globs_for([Override(name, ()) for name in ("*", glob, "other*")], glob) == ["*", glob]

    @given(
        st.lists(st.text("ab.[]!*?_A1", min_size=1, max_size=5), max_size=8), st.text("ab._A1", min_size=1, max_size=6)
    )
    def test_finds_what_trying_every_glob_finds(self, globs: list[str], name: str) -> None:
        expected = [glob for glob in globs if glob == name or matches(glob, name)]
        assert globs_for([Override(glob, ()) for glob in globs], name) == expected

    @pytest.mark.parametrize("form", ["blocks.{}.fc", "blocks.{}.*", "*.{}.fc*", "*block{}?"])
    def test_tries_few_of_many_globs(self, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []
        monkeypatch.setattr(selectors, "matches", lambda glob, name: bool(tried.append(glob)))
        selector = Selector([Override(form.format(number), ()) for number in range(1000, 9000)])
        for number in range(1000, 9000):
            selector.matching(f"blocks.{number}.fc")
            selector.matching(f"block{number}s")
        assert len(tried) <= 9000


class TestReadOverrides:
    def test_several_globs_in_one_entry(self) -> None:
        assert read_overrides([{"a": ["QUANTIZER.BIT", 4, "quantizer.type", "lsq"], "b": ["QSCHEME", "x"]}]) == (
            Override("a", (("QUANTIZER.BIT", 4), ("QUANTIZER.TYPE", "lsq"))),
            Override("b", (("QSCHEME", "x"),)),
        )

    def test_written_form_comes_back(self) -> None:
        entries = [{"a": ["QUANTIZER.BIT", 4, "QSCHEME", "per-tensor-affine"]}, {"b": ["QUANTIZER.BIT", 2]}]
        assert [override.to_entry() for override in read_overrides(entries)] == entries

    def test_overrides_are_taken_as_they_are(self) -> None:
        overrides = (Override("a", (("QUANTIZER.BIT", 4),)),)
        assert read_overrides(overrides) == overrides

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, "but is empty; take the key out"),
            ({"a": ["K", 1]}, "but is a mapping; put [ ] around it"),
            ("fc", "but is 'fc'"),
            ([["a"]], "each entry must be a mapping"),
            ([{"a": []}], "'a' must have a list of keys and values in turn"),
            ([{"a": 8}], "but has 8"),
            ([{"a": ["K"]}], "but has ['K']"),
            ([{"a": [8, "K"]}], "but has [8, 'K']"),
            ([{"": ["K", 1]}], "a glob must be text"),
            ([{7: ["K", 1]}], "put 7 in quotes"),
            ([{"a": ["K", 1, "k", 2]}], "'a' sets a key twice"),
        ],
    )
    def test_faults(self, value: object, expected: str) -> None:
        with pytest.raises(Faults) as caught:
            read_overrides(value)
        assert expected in str(caught.value)


class TestNearNames:
    NAMES = ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1", "fc")

    @pytest.mark.parametrize(
        ("glob", "first"),
        [("layr1.0.conv1", "layer1.0.conv1"), ("FC", "fc"), ("layer1_0_convv2", "layer1.0.conv2"), ("con1", "conv1")],
    )
    def test_nearest_first(self, glob: str, first: str) -> None:
        assert near_names(glob, self.NAMES)[0] == first

    def test_part_of_a_name(self) -> None:
        assert near_names("layer2", self.NAMES)[0] == "layer2.0.conv1"

    def test_no_more_than_asked_for_and_none_twice(self) -> None:
        found = near_names("*conv*", self.NAMES, count=2)
        assert len(found) == len(set(found)) == 2

    def test_nothing_like_it(self) -> None:
        assert near_names("zzzz", self.NAMES) == [] == near_names("fc", [])
