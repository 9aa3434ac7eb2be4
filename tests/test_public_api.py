"""Only the classes of `QuantModel` use its underscored attributes; everything else has public names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from torch import nn

import sparsebit
from sparsebit.quantization import QuantModel
from sparsebit.quantization.simulation import SimulatedModel
from tests.conftest import ROOT

HIERARCHY = [kind for kind in QuantModel.__mro__ if issubclass(kind, SimulatedModel)]
FILES = {Path(inspect.getfile(kind)) for kind in HIERARCHY}
PACKAGE = Path(sparsebit.__file__).parent


def private_names() -> set[str]:
    """Underscored methods, class attributes and attributes of `self` of the hierarchy."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    found |= {name for kind in HIERARCHY for name in vars(kind)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - set(dir(nn.Module()))


def uses(file: Path, names: set[str]) -> list[str]:
    """Accesses of these attributes on anything but `self` and `cls`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in names:
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    return found


class TestPrivateNames:
    def test_the_hierarchy_is_found(self) -> None:
        assert {"quant_model.py", "training.py", "verified.py", "simulation.py"} <= {file.name for file in FILES}
        assert {"_original", "_captured", "_root", "_runner", "_example", "_weights_now"} <= private_names()

    def test_a_use_is_found(self, tmp_path: Path) -> None:
        (tmp_path / "helper.py").write_text(
            "def f(qmodel, self):\n    self._root\n    return qmodel.model._original[0]\n"
        )
        assert uses(tmp_path / "helper.py", private_names()) == ["helper.py:3: qmodel.model._original"]

    def test_no_function_outside_of_the_hierarchy_uses_them(self) -> None:
        files = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
        assert [use for file in sorted(files) if file not in FILES for use in uses(file, private_names())] == []
