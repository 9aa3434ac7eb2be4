"""Small faults in the code, one at a time, and whether the tests notice: `python scripts/mutation.py --sample 80`.

A mutant is the project with one operator, number, condition or boolean changed, in a copy of the working tree. It runs
against the mirrored test file and those beside it, or those of its neighbours. The sample is fixed by `--seed`.
`--workers` run at the same time, each with a copy of its own. With `--log FILE` a run can be stopped and resumed; each
line is one mutant. What survives is a missing test, or a change that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    "sparsebit/numerics/**/*.py",
    "sparsebit/quantization/planning/plan.py",
    "sparsebit/quantization/planning/sites.py",
    "sparsebit/quantization/planning/grouping.py",
    "sparsebit/quantization/planning/group_rules.py",
    "sparsebit/quantization/planning/placement.py",
    "sparsebit/quantization/exporting/export*.py",
    "sparsebit/deploy/exporting/qdq.py",
    "sparsebit/deploy/exporting/to_onnx.py",
)
# Tests of the neighbours, by a folder above the mutant, for files without a mirrored test file.
MORE = {
    "sparsebit/numerics": ("tests/quantization/quantizers/test_base.py",),
    "sparsebit/quantization": (
        "tests/quantization/planning/test_plan.py",
        "tests/quantization/planning/test_sites.py",
        "tests/quantization/planning/test_group_rules.py",
    ),
    "sparsebit/deploy": ("tests/deploy/onnx_graph/test_qdq_graph.py",),
}
# Files without a test file of their own name, and the tests that cover them.
MIRRORED = {
    "sparsebit/numerics/choices/highs_solver.py": "tests/numerics/choices/test_integer_program.py",
    "sparsebit/numerics/rounding/scale_search_math.py": "tests/numerics/rounding/test_gptq_math.py",
    "sparsebit/numerics/weight_grid.py": "tests/numerics/rounding/test_gptq_math.py",
    "sparsebit/numerics/rounding/gptq_target_math.py": "tests/numerics/rounding/test_gptq_math.py",
    "sparsebit/quantization/planning/grouping.py": "tests/quantization/planning/test_plan.py",
}
# Tests of a file beyond its mirrored ones.
BESIDE = {
    "sparsebit/deploy/exporting/to_onnx.py": (
        "tests/deploy/exporting/test_dynamic_size_branches.py",
        "tests/deploy/exporting/test_qdq.py",
    ),
    "sparsebit/quantization/exporting/export.py": ("tests/quantization/exporting/test_call_state.py",),
    "sparsebit/quantization/planning/grouping.py": (
        "tests/quantization/planning/test_sites.py",
        "tests/quantization/ops/test_quant_opr.py",
    ),
}
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """`start`, `end`: bytes of the file that `after` replaces."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every mutant of a file."""
    lines, code = [0], text.encode()
    for line in code.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node in _code(ast.parse(text)):
        for changed in _changes(node):
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            before = code[start:end].decode()
            found.append(Mutant(file, node.lineno, start, end, before, f"({ast.unparse(changed)})"))
    return found


def mutated(text: str, mutant: Mutant) -> str:
    data = text.encode()
    return (data[: mutant.start] + mutant.after.encode() + data[mutant.end :]).decode()


def tests_of(file: str) -> list[str]:
    """The mirrored test file and those beside it; where there is none, those of the neighbours."""
    path = Path(file)
    mirrored = Path(MIRRORED.get(file, Path("tests", *path.parts[1:-1], f"test_{path.name}")))
    if (ROOT / mirrored).exists():
        return [str(mirrored), *BESIDE.get(file, ())]
    return list(next(MORE[str(folder)] for folder in path.parents if str(folder) in MORE))


def _code(tree: ast.AST) -> Iterator[Any]:
    """The expressions of the code: not of annotations, messages, decorators or assertions.

    `strict=True` of `zip` is an assertion too: that the lengths are equal.
    """
    for name, value in ast.iter_fields(tree):
        if isinstance(tree, ast.Raise) or name in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(tree, ast.keyword) and tree.arg == "strict":
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Assert)):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _code(child)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        changed.ops = [_COMPARISONS[type(node.ops[0])]()]
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        changed.op = _ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        changed.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = changed.operand
    elif isinstance(node, ast.IfExp):
        changed.body, changed.orelse = changed.orelse, changed.body
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        changed.value = node.value + 1
    else:
        return
    yield changed


def sample(count: int, seed: int) -> list[Mutant]:
    """So many mutants of all targets: the same ones for the same seed and code."""
    files = sorted({path for pattern in TARGETS for path in ROOT.glob(pattern)})
    found = [mutant for path in files for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
    return random.Random(seed).sample(found, min(count, len(found)))


def run(mutant: Mutant, tree: Path, timeout: float) -> str:
    """Whether the tests notice it: "killed", "survived" or "timeout", as of an endless loop."""
    file = tree / mutant.file
    text = file.read_text()
    file.write_text(mutated(text, mutant))
    try:
        return "survived" if passes(tests_of(mutant.file), tree, timeout) else "killed"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        file.write_text(text)


def passes(tests: list[str], tree: Path, timeout: float) -> bool:
    paths = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=tree, env=environment, capture_output=True, timeout=timeout, check=False
    )
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutation.py", description=__doc__)
    parser.add_argument("--sample", type=int, default=80, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of one mutant")
    parser.add_argument("--log", type=Path, help="a file of results, to which a later run adds")
    options = parser.parse_args()
    done = _known(options.log)
    mutants = sample(options.sample, options.seed)
    waiting = [mutant for mutant in mutants if mutant not in done]
    counts = Counter(done[mutant] for mutant in mutants if mutant in done)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPool(options.workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            trees.put(_copy_of_project(Path(folder) / str(number)))

        def in_a_tree(work: Callable[[Path], Any]) -> Any:
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        tests = sorted({tuple(tests_of(mutant.file)) for mutant in waiting})
        sound = pool.map(lambda one: in_a_tree(lambda tree: passes(list(one), tree, options.timeout)), tests)
        failing = {one for one, is_sound in zip(tests, sound, strict=True) if not is_sound}
        for one in sorted(failing):
            _say(f"{' '.join(one)}: fail without a mutant; their mutants are left out")
        waiting = [mutant for mutant in waiting if tuple(tests_of(mutant.file)) not in failing]

        def result_of(mutant: Mutant) -> tuple[Mutant, str]:
            return mutant, in_a_tree(lambda tree: run(mutant, tree, options.timeout))

        for mutant, result in pool.imap_unordered(result_of, waiting):
            counts[result] += 1
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps({**asdict(mutant), "result": result}) + "\n")
            if result == "survived":
                _say(f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
    _say(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 2 if failing else 1 if counts["survived"] else 0


def _copy_of_project(tree: Path) -> Path:
    for folder in ("sparsebit", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", tree / "pyproject.toml")
    return tree


def _known(log: Path | None) -> dict[Mutant, str]:
    if log is None or not log.exists():
        return {}
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {Mutant(**{key: value for key, value in one.items() if key != "result"}): one["result"] for one in records}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
