from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutation(project_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation", project_root / "scripts" / "mutation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation"] = module
    spec.loader.exec_module(module)
    return module


CODE = '''
def clipped(x: float, top: int = 3) -> float:
    """Not 1 < 2."""
    if not x > top and x:
        raise ValueError(f"{x + 1} and {top}", 4)
    return x * 2
'''


def test_mutants_are_of_code_alone(mutation: ModuleType) -> None:
    found = {(mutant.before, mutant.after) for mutant in mutation.mutants_of("file.py", CODE)}
    assert found == {
        ("3", "(4)"),
        ("not x > top and x", "(not x > top or x)"),
        ("not x > top", "(x > top)"),
        ("x > top", "(x >= top)"),
        ("x * 2", "(x / 2)"),
        ("2", "(3)"),
    }


def test_a_mutant_changes_one_place(mutation: ModuleType) -> None:
    for mutant in mutation.mutants_of("file.py", CODE):
        changed = mutation.mutated(CODE, mutant)
        ast.parse(changed)
        assert sum(one != other for one, other in zip(CODE.split("\n"), changed.split("\n"), strict=True)) == 1


def test_the_sample_is_fixed_and_every_target_has_tests(
    mutation: ModuleType, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "mutants_of", functools.cache(mutation.mutants_of))  # each sample reads all targets
    one, two = mutation.sample(30, 0), mutation.sample(30, 0)
    assert one == two and len(set(one)) == 30 and one != mutation.sample(30, 1)
    for file in {mutant.file for mutant in mutation.sample(10_000, 0)}:
        assert all((project_root / test).exists() for test in mutation.tests_of(file))
