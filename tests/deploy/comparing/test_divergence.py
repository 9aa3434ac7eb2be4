from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebit.deploy.comparing.divergence import (
    SiteDifference,
    first_divergence,
    kernel_fault,
    site_codes,
    site_differences,
)
from sparsebit.deploy.sessions.runtime_sessions import RUNTIMES
from tests.deploy.tiny_files import Tiny

X = np.random.default_rng(0).normal(size=(2, 8, 6, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny((2, 8, 6, 6))
    middle = tiny.quantized(tiny.conv(tiny.quantized("x"), "first"))
    last = tiny.quantized(tiny.conv(middle, "second"))
    return tiny.save(tmp_path_factory.mktemp("divergence") / "m.onnx", last)


@pytest.fixture(scope="module")
def codes(file: Path) -> dict[str, Any]:
    return site_codes(file, "onnxruntime", {"x": X}, optimize=False)


def test_every_site_in_the_order_of_the_graph(codes: dict[str, Any]) -> None:
    assert [name.split("/")[0] for name in codes] == ["x", "first_out", "second_out"]
    assert all(values.dtype == np.uint8 for values in codes.values())
    assert np.array_equal(codes[next(iter(codes))], np.clip(np.rint(X / np.float32(0.03)) + 128, 0, 255))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.exact_sums
def test_looking_does_not_disturb(runtime: str, file: Path, codes: dict[str, Any]) -> None:
    pytest.importorskip(runtime)
    found = site_differences(file, runtime, {"x": X}, codes)
    assert [difference.site for difference in found] == list(codes)
    assert all(difference.largest <= 1 and difference.share < 0.01 for difference in found)


def test_only_the_sites_that_are_asked_for(file: Path, codes: dict[str, Any]) -> None:
    name = list(codes)[1]
    assert list(site_codes(file, "onnxruntime", {"x": X}, sites={name, "unknown"})) == [name]


def test_differences_are_counted_in_steps(file: Path, codes: dict[str, Any]) -> None:
    first, second, third = codes
    changed = {**codes, second: codes[second].astype(np.int64)}
    changed[second][0, 0, 0, :3] += 5
    changed[third] = codes[third][:1]  # another shape says nothing
    found = site_differences(file, "onnxruntime", {"x": X}, changed, optimize=False)
    assert found == [SiteDifference(first, 0, 0.0), SiteDifference(second, 5, 3 / X.size)]
    assert str(found[1]) == f"{second}: 0.52% of its codes differ, by up to 5 steps"


def site(largest: int) -> SiteDifference:
    return SiteDifference(f"s{largest}", largest, 0.1 if largest else 0.0)


@pytest.mark.parametrize(
    ("steps", "fault", "first"),
    [
        ([], None, None),
        ([0, 0], None, None),
        ([0, 1, 0, 7], None, 7),  # drift, which grows
        ([0, 3, 1], 3, 3),
        ([1, 1], None, 1),
    ],
    ids=str,
)
def test_what_drift_explains_and_what_not(steps: list[int], fault: int | None, first: int | None) -> None:
    differences = [site(largest) for largest in steps]
    found = kernel_fault(differences), first_divergence(differences)
    assert [None if difference is None else difference.largest for difference in found] == [fault, first]
