"""The command as such: it starts light, and a fault ends in one message and the right exit code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import sparsebit as package
from sparsebit.cli import main
from sparsebit.cli.main import app
from sparsebit.errors import ConfigError
from tests.cli.conftest import Sparsebit

GRAPH = ("graph", "-m", "own_project:Net")


def test_starts_without_torch(project_root: Path) -> None:
    code = "import sys, sparsebit.cli.main; print(sorted({'torch', 'numpy', 'pydantic', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["quantize", "--help"], ["llm", "--help"], ["llm", "quantize", "-h"]]
)
def test_help_is_shown_without_torch(arguments: list[str], project_root: Path) -> None:
    code = (
        "import sys; from sparsebit.cli.main import app; app(sys.argv[1:], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=project_root, capture_output=True, text=True, check=True)
    assert "Usage: " in done.stdout and done.stdout.endswith("\n[]\n")


def test_runs_as_a_module(project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparsebit.cli", "--version"],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"sparsebit {package.__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("buffering", "arguments"), [
    ([], ["--version"]), ([], ["quantize", "--help"]), ([], ["config", "check", "virtual", "--json"]),
    (["-u"], ["--version"]), (["-u"], ["--help"]),
    pytest.param(["-u"], ["config", "check", "virtual", "--json"], marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_full_disk_is_a_message(
    buffering: list[str], arguments: list[str], project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        command = [sys.executable, *buffering, "-m", "sparsebit.cli", *arguments]
        done = subprocess.run(command, cwd=project_root, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.endswith("error: [Errno 28] No space left on device\n")


def test_a_reader_that_goes_away_is_no_error(project_root: Path) -> None:
    command = [sys.executable, "-m", "sparsebit.cli", "quantize", "--help"]
    with subprocess.Popen(command, cwd=project_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""


def test_help_lists_every_verb_on_one_screen(sparsebit: Sparsebit) -> None:
    answer = sparsebit("--help")
    lines = answer.out.splitlines()
    assert answer.code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80 and "..." not in answer.out
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "verb", [["quantize"], ["profile"], ["graph"], ["check"], ["audit"], ["config", "check"], ["demo"]], ids=" ".join
)
def test_every_verb_has_help(sparsebit: Sparsebit, verb: list[str]) -> None:
    answer = sparsebit(*verb, "-h")
    assert answer.code == 0 and "--json" in answer.out and "--quiet" in answer.out


@pytest.mark.parametrize("arguments", [["quantise"], ["graph"], ["graph", "--modell", "x:y"]], ids=" ".join)
def test_wrong_usage_is_2(sparsebit: Sparsebit, arguments: list[str]) -> None:
    answer = sparsebit(*arguments)
    assert answer.code == 2 and not answer.out and "Usage:" in answer.err


def options_of(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    return own.union(*(options_of(inner) for inner in getattr(command, "commands", {}).values()))


def test_page_names_every_option_and_no_other(project_root: Path) -> None:
    page = (project_root / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    known = options_of(typer.main.get_command(app)) | {"--help", "-h"}
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", re.sub(r"`pip .*?`|\| jq -r|python -m", "", page)))
    assert named - known == set() and known - named == {"-h"}


def test_mendable_fault_is_1_and_one_message(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit("graph", "-m", "own_project:Netz")
    assert answer.code == 1 and not answer.out
    assert answer.err == "error: --model own_project:Netz: own_project has no 'Netz'; did you mean Net?\n"


def test_traceback_on_demand(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit("--traceback", "graph", "-m", "own_project:Net", "-c", "nowhere.yaml")
    assert isinstance(answer.exception, ConfigError)


def test_unwritable_file_is_a_message(sparsebit: Sparsebit, project: Path) -> None:
    answer = sparsebit(*GRAPH, "-o", project / "no" / "such" / "folder" / "graph.mmd")
    assert answer.code == 1 and "No such file" in answer.err and "Traceback" not in answer.err


def test_interrupt_is_130(sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "working", interrupted)
    answer = sparsebit(*GRAPH)
    assert answer.code == 130 and answer.err == "interrupted: nothing was left half-written\n"


def test_sigterm_is_143_and_its_handler_is_put_back(
    sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    def unhandled(*_: object) -> None:
        """By default the signal would end all tests of this process."""

    monkeypatch.setattr(main, "working", killed)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        answer = sparsebit(*GRAPH)
        assert answer.code == 143 and answer.err == "interrupted: nothing was left half-written\n"
        assert signal.getsignal(signal.SIGTERM) == unhandled
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (SystemExit(0), "the model or the data ended the run: it called sys.exit(0)"),
        (MemoryError(), "out of memory (MemoryError: no message"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), "out of memory (RuntimeError"),
        (OSError(28, "No space left on device", "saved"), "No space left on device: 'saved'"),
    ],
    ids=["exit", "memory", "torch's memory", "disk"],
)
def test_ends_that_nobody_asked_for(
    sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, message: str
) -> None:
    def failing(*_: object) -> None:
        raise fault

    monkeypatch.setattr(main, "working", failing)
    answer = sparsebit(*GRAPH)
    assert answer.code == 1 and message in answer.err and answer.err.startswith("error: ")


def test_fault_of_our_own_is_not_hidden(sparsebit: Sparsebit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(main, "working", faulty)
    assert isinstance(sparsebit(*GRAPH).exception, AssertionError)
