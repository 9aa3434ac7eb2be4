"""Scores in tasks of lm-eval: of the packed model itself, and errors that say what is missing.

The tasks are small files over local questions; with lm_eval in the environment they run, without it they are skipped.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparsebit.cli.main import app
from sparsebit.errors import ConfigError, MissingExtraError
from sparsebit.llm import QuantLinear, Recipe, evaluate_tasks, load, quantize
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer

QUESTIONS = [{"question": f"ab{number}c", "choices": ["dd", "xyz"], "label": number % 2} for number in range(6)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = folder / "questions.jsonl"
    rows.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    for name in ("letters_a", "letters_b"):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, rows=rows), encoding="utf-8")
    return folder


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pytest.importorskip("compressed_tensors")
    source = with_tokenizer(saved(tiny_model(num_hidden_layers=1), tmp_path / "model"))
    recipe = Recipe("rtn", group_size=32, scale_search="none")
    return quantize(source, tmp_path / "packed", recipe, check=False).folder


def tokenizer_of(folder: Path) -> Any:
    return pytest.importorskip("transformers", minversion="5.0").AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def expected_accuracy(model: Any, tokenizer: Any) -> float:
    """Of each question the likelier choice, computed without lm-eval."""
    hits = 0
    for question in QUESTIONS:
        sums = []
        for choice in question["choices"]:
            context = tokenizer(question["question"], add_special_tokens=False)["input_ids"]
            whole = tokenizer(f"{question['question']} {choice}", add_special_tokens=False)["input_ids"]
            logs = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            sums.append(sum(float(logs[at - 1, whole[at]]) for at in range(len(context), len(whole))))
        hits += sums.index(max(sums)) == question["label"]
    return hits / len(QUESTIONS)


@pytest.mark.slow
def test_the_packed_model_is_the_one_that_answers(packed: Path, task_folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    model, tokenizer = load(packed), tokenizer_of(packed)
    calls: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, QuantLinear):
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    found = evaluate_tasks(model, tokenizer, ["letters_*"], include_path=task_folder, batch_size=2)
    assert [score.task for score in found] == ["letters_a", "letters_b"] and len(set(calls)) == 7
    assert {score.metric for score in found} == {"acc"} and all(score.higher_is_better for score in found)
    assert found[0].num_samples == len(QUESTIONS) and found[0].num_fewshot == 0
    assert found[0].value == pytest.approx(expected_accuracy(model, tokenizer))
    limited = evaluate_tasks(model, tokenizer, ["letters_a"], include_path=task_folder, limit=3, num_fewshot=2)
    assert limited[0].num_samples == 3 and limited[0].num_fewshot == 2


@pytest.mark.slow
def test_the_command(packed: Path, task_folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    common = ["llm", "eval", str(packed), "--tasks", "letters_a", "--include-path", str(task_folder), "--limit", "4"]
    found = CliRunner().invoke(app, [*common, "--json", "-q"])
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["tasks"][0]["metric"] == "acc" and math.isfinite(record["tasks"][0]["value"])
    assert "perplexity" not in record and sum(record["packed_layers"].values()) == 7
    shown = CliRunner().invoke(app, common)
    assert "letters_a" in shown.stdout and "standard error" in shown.stdout


def test_an_unknown_task_names_the_nearest(packed: Path, task_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("lm_eval.tasks", reason="lm_eval is not installed: pip install lm_eval")
    real = tasks.TaskManager
    # The thousands of tasks that lm-eval brings along take long to read.
    monkeypatch.setattr(tasks, "TaskManager", lambda **given: real(**{**given, "include_defaults": False}))
    with pytest.raises(ConfigError, match="'leters_a' is not known to lm-eval; the nearest are letters_a, letters_b"):
        evaluate_tasks(load(packed), tokenizer_of(packed), ["leters_a"], include_path=task_folder)
    broken = (task_folder / "letters_b.yaml").read_text(encoding="utf-8").replace("questions.jsonl", "none.jsonl")
    (task_folder / "letters_b.yaml").write_text(broken, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"letters_b: cannot be built .*include_path"):
        evaluate_tasks(load(packed), tokenizer_of(packed), ["letters_b"], include_path=task_folder)
    with pytest.raises(ConfigError, match="is not a folder"):
        evaluate_tasks(load(packed), tokenizer_of(packed), ["letters_a"], include_path=task_folder / "none")
    with pytest.raises(ConfigError, match="no tasks are given"):
        evaluate_tasks(load(packed), tokenizer_of(packed), [])


def test_without_lm_eval_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match="pip install lm_eval"):
        evaluate_tasks(None, None, ["letters_a"])


@pytest.mark.parametrize(
    ("given", "told"),
    [((), "give a text, or tasks"), (("--text", "x.txt", "--limit", "3"), "only together with --tasks")],
    ids=["nothing", "limit of a text"],
)
def test_options_that_do_not_fit_together(tmp_path: Path, given: tuple[str, ...], told: str) -> None:
    found = CliRunner().invoke(app, ["llm", "eval", str(tmp_path), *given])
    assert found.exit_code == 2 and told in " ".join(found.output.split())
