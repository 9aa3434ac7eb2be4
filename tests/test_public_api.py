"""Public names are declared and documented, and all that docs, examples and other code needs."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import nn

import sparsebit
from sparsebit.quantization import QuantModel
from sparsebit.quantization.faithful.simulation import SimulatedModel
from tests.conftest import ROOT

PUBLIC = ("sparsebit", "sparsebit.quantization", "sparsebit.sparse", "sparsebit.compress", "sparsebit.llm")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Modules that these files may import besides: benchmarks of single kernels, and the data of the demo.
DEVELOPER = {
    "benchmarks/llm_sharding.py": {"sparsebit.llm"},
    "benchmarks/llm_kv_cache.py": {"sparsebit.llm"},
    "benchmarks/kernel_cuts.py": {"sparsebit.kernels"},
    "benchmarks/effort.py": {"sparsebit.quantization.effort"},
    "benchmarks/llm_finetune.py": {"sparsebit.llm", "sparsebit.numerics"},
    "benchmarks/llm_decode.py": {"sparsebit.llm"},
    "benchmarks/llm_gptq_slice.py": {"sparsebit.llm", "sparsebit.execution", "sparsebit.numerics"},
    "benchmarks/activation_products.py": {"sparsebit.llm.layers"},
    "benchmarks/llm_activations.py": {"sparsebit.llm.layers", "sparsebit.kernels"},
    "benchmarks/packed_linear.py": {"sparsebit.kernels"},
    "benchmarks/packed_linear_ways.py": {"sparsebit.kernels"},
    "benchmarks/token_attention.py": {"sparsebit.kernels"},
    "benchmarks/fake_quant.py": {"sparsebit.numerics"},
    "benchmarks/conv_channels.py": {"sparsebit.deploy.sessions.timing"},
    "benchmarks/deploy.py": {"sparsebit.deploy.sessions.timing"},
    "benchmarks/onnx_in_opsets.py": {"sparsebit.deploy.loading.compare", "sparsebit.deploy.sessions.timing"},
    "benchmarks/placement.py": {"sparsebit.deploy.sessions.timing"},
    "benchmarks/programs.py": {"sparsebit.deploy", "sparsebit.execution.batches"},
    "benchmarks/placement_limits.py": {
        "sparsebit.deploy.audit.region_times",
        "sparsebit.quantization.placement_search",
    },
    "benchmarks/sparse_speed.py": {"sparsebit.deploy.sessions.runtime_sessions", "sparsebit.deploy.sessions.timing"},
    "benchmarks/sparse_two_four.py": {"sparsebit.sparse.two_four"},
    "benchmarks/compress.py": {"sparsebit.compress"},
    "benchmarks/compress_tools.py": {"sparsebit.compress"},
    "benchmarks/report_page.py": {"sparsebit.report"},
    "benchmarks/qat_step.py": {"sparsebit.numerics", "sparsebit.quantization.speed"},
    "examples/ptq_onnx_file.py": {"sparsebit.cli.digits"},
    "examples/ptq_program.py": {"sparsebit.cli.digits"},
    "examples/qat_accelerate.py": {"sparsebit.cli.digits"},
    "examples/qat_digits.py": {"sparsebit.cli.digits"},
    "examples/qat_lightning.py": {"sparsebit.cli.digits"},
}

HIERARCHY = [kind for kind in QuantModel.__mro__ if issubclass(kind, SimulatedModel)]
PACKAGE = Path(sparsebit.__file__).parent
CLASS_FILES = {Path(inspect.getfile(kind)) for kind in HIERARCHY}


def private_names() -> set[str]:
    """Underscored methods, class attributes and attributes of `self` of the model's classes."""
    found: set[str] = set()
    for file in CLASS_FILES:
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
    def test_the_classes_are_found(self) -> None:
        assert {file.name for file in CLASS_FILES} == {"quant_model.py", "simulation.py"}
        assert {"_set_up", "_build", "_run", "_record"} <= private_names()

    def test_the_class_stays_small(self) -> None:
        own = [
            value for value in vars(QuantModel).values() if getattr(value, "__module__", "") == QuantModel.__module__
        ]
        assert len(own) <= 25

    def test_a_use_is_found(self, tmp_path: Path) -> None:
        (tmp_path / "helper.py").write_text("def f(qmodel, self):\n    self._build\n    return qmodel.model._record\n")
        assert uses(tmp_path / "helper.py", private_names()) == ["helper.py:3: qmodel.model._record"]

    def test_only_the_classes_use_them(self) -> None:
        files = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
        names = private_names()
        assert [use for file in sorted(files) if file not in CLASS_FILES for use in uses(file, names)] == []


def undeclared(code: str, developer: Iterable[str] = ()) -> list[str]:
    """The names that `code` takes from sparsebit and that are not public."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparsebit":
            module = str(node.module)
            if any(module == allowed or module.startswith(f"{allowed}.") for allowed in developer):
                continue
            known = importlib.import_module(module).__all__ if module in PUBLIC else ()
            found += [f"{module}.{alias.name}" for alias in node.names if alias.name not in known]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("sparsebit.")]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sparsebit":
            found += [f"sparsebit.{node.attr}"] if node.attr not in sparsebit.__all__ else []
    return found


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]


class TestPublicNames:
    @pytest.mark.parametrize("module", PUBLIC)
    def test_each_is_there_and_sorted(self, module: str) -> None:
        names = importlib.import_module(module).__all__
        assert len(set(names)) == len(names)
        assert all(hasattr(importlib.import_module(module), name) for name in names)
        assert not [name for name in names if name.startswith("_") and name != "__version__"]

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'quantise'"):
            sparsebit.quantise  # noqa: B018
        assert {"quantize", "Tolerance", "__version__"} <= set(dir(sparsebit))

    def test_the_page_lists_them_with_their_docstrings(self) -> None:
        command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "api_names.py"), "--check"]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize(
        ("code", "found"),
        [
            ("from sparsebit import quantize", []),
            ("from sparsebit.quantization import _x, TensorSpec", ["sparsebit.quantization._x"]),
            ("from sparsebit.numerics.spec import TensorSpec", ["sparsebit.numerics.spec.TensorSpec"]),
            ("import sparsebit.deploy.audit.audit_file", ["sparsebit.deploy.audit.audit_file"]),
            ("import sparsebit\nsparsebit.quantise(model)", ["sparsebit.quantise"]),
        ],
    )
    def test_undeclared_names_are_found(self, code: str, found: list[str]) -> None:
        assert undeclared(code) == found

    @pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
    def test_pages_use_no_others(self, page: Path) -> None:
        blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
        assert [name for block in blocks for name in undeclared(block)] == []

    def test_examples_and_benchmarks_use_no_others(self) -> None:
        found = {}
        for file in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
            name = file.relative_to(ROOT).as_posix()
            found[name] = undeclared(file.read_text(encoding="utf-8"), DEVELOPER.get(name, ()))
        assert {name: names for name, names in found.items() if names} == {}
