"""sconfig files: the first Sparsebit's forms, and what is refused."""

from __future__ import annotations

import pytest

from sparsebit.errors import ConfigError
from sparsebit.sparse.sparse_config import parse_sconfig


@pytest.mark.parametrize(
    ("text", "kind", "ratio"),
    [
        ("SPARSER:\n  TYPE: structed\n  STRATEGY: l1norm\n  RATIO: 0.5\n", "structured", 0.5),
        (
            "SPARSER:\n  TYPE: unstructed\n  STRATEGY: l1norm\n  GRANULARITY: layerwise\n  RATIO: 0.5\n",
            "unstructured",
            0.5,
        ),
        ("SPARSER:\n  TYPE: unstructed\n  STRATEGY: l1norm\n  RATIO: 0.5\n", "unstructured", 0.5),
        ("SPARSER:\n  TYPE: unstructed\n  STRATEGY: l1norm\n  RATIO: 1.0\n", "unstructured", 1.0),
        ("SPARSER:\n  TYPE: Structured\n  STRATEGY: L1\n  RATIO: 0.25\n", "structured", 0.25),
    ],
)
def test_the_forms_of_the_first_sparsebit(text: str, kind: str, ratio: float) -> None:
    config = parse_sconfig(text)
    assert (kind, "l1norm", ratio) == (config.SPARSER.TYPE, config.SPARSER.STRATEGY, config.SPARSER.RATIO)
    assert parse_sconfig(config) is config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SPARSER: {RATO: 0.5}", "SPARSER.RATO.*RATIO"),
        ("SPARSER: {RATIO: 1.5}", "SPARSER.RATIO=1.5.*at most 1"),
        ("SPARSER: {TYPE: strucured}", "SPARSER.TYPE=.?strucured.*structured"),
        ("SPARSER: {STRATEGY: l1nrm}", "SPARSER.STRATEGY.*l1norm"),
        ("SPARSER: {GRANULARITY: 4:2}", "SPARSER.GRANULARITY"),
        ("SPARSER: {TYPE: structured, GRANULARITY: '2:4'}", "is for TYPE: unstructured"),
        ("SPARSER: {TYPE: unstructured, GRANULARITY: head}", "is for TYPE: structured"),
        ("SPARSER: {TYPE: unstructured, GRANULARITY: '2:4', RATIO: 0.7}", "prunes 0.5; take RATIO out"),
        ("SPARSER: {TYPE: unstructured, GRANULARITY: '2:4', SCOPE: global}", "one ratio in every row"),
        ("SPARSER: {TYPE: unstructured, GRANULARITY: layerwise, SCOPE: global}", "means SCOPE: layer"),
        ("SPARSER: {SPECIFIC: [{'a.*': [RATO, 0.5]}]}", "at a.*RATIO"),
        ("SPARSER: {SPECIFIC: [{'a.*': [RATIO, 2]}]}", "RATIO=2.* at a"),
        ("SCHEDULE: {STEPS: 3}", "one-shot has one step"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_sconfig(text)


def test_ratios_of_single_layers() -> None:
    config = parse_sconfig(
        "SPARSER: {RATIO: 0.5, SPARE: [head], SPECIFIC: [{'layer1.*': [RATIO, 0.2]}, {'layer*': [RATIO, 0.3]}]}"
    )
    assert [config.ratio_of(name) for name in ("stem", "head", "layer1.0", "layer2.0")] == [0.5, 0.0, 0.2, 0.3]
    assert config.ratio_of(("layer2.0", "layer1.0")) == 0.2
    assert config.ratio_of(("layer1.0", "head")) == 0.0
    assert config.is_overridden(("head",)) and not config.is_overridden(("stem",))
