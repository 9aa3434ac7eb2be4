"""`sparsebit llm eval`: perplexity of a language model, or scores in tasks; packed weights stay packed."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import SpeakingOptions, grouped
from sparsebit.cli.outputs.output import Output, facts_table, kilobytes, speaking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from sparsebit.llm import TaskScore

_TASKS = "Tasks of lm-eval"


@dataclass(frozen=True)
class WindowOptions:
    """The text whose perplexity is measured."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE|DIR",
            help="Text that the model was not trained on, for perplexity.",
            show_default=False,
        ),
    ] = None
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")] = 512
    num_windows: Annotated[
        int | None, typer.Option("--num-windows", min=1, help="Windows from the beginning of the text; all of them.")
    ] = None


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-eval."""

    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="NAME,NAME",
            help="Names or patterns; needs: pip install lm_eval.",
            rich_help_panel=_TASKS,
        ),
    ] = ""
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path", metavar="DIR", help="A folder of task files of your own.", rich_help_panel=_TASKS
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Questions of each task at most; all.", rich_help_panel=_TASKS)
    ] = None
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            min=0,
            help="Answered questions before each; those of the task.",
            rich_help_panel=_TASKS,
        ),
    ] = None

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def check(self, text: Path | None) -> None:
        if text is None and not self.names:
            raise typer.BadParameter("give a text, or tasks with --tasks", param_hint="--text")
        given = {"--include-path": self.include_path, "--limit": self.limit, "--num-fewshot": self.num_fewshot}
        unused = [option for option, value in given.items() if value is not None]
        if unused and not self.names:
            raise typer.BadParameter("only together with --tasks", param_hint=unused[0])

    def scores(self, model: Any, tokenizer: Any, batch_size: int, *, quiet: bool) -> list[TaskScore]:
        from sparsebit.llm import evaluate_tasks

        # lm-eval and the package datasets show bars of their own.
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
            return evaluate_tasks(
                *(model, tokenizer, self.names),
                include_path=self.include_path,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                batch_size=batch_size,
            )


@grouped
def evaluate(
    model: llm_options.ModelFolder,
    measured: WindowOptions,
    wanted: TaskOptions,
    loading: llm_options.LoadOptions,
    say: SpeakingOptions,
    batch_size: llm_options.BatchSize = 4,
) -> None:
    """Measure the perplexity of a float or packed model on a text, or its scores in tasks of lm-eval, or both.

    The text is cut into consecutive windows; in each one every token but the first is predicted from the tokens before
    it. The weights of a packed model stay packed while it is measured. A GGUF file is measured by llama.cpp.

    sparsebit llm eval llama-w4/ --text heldout.txt --length 2048

    sparsebit llm eval llama.gguf --text heldout.txt

    sparsebit llm eval llama-w4/ --tasks arc_easy,hellaswag --limit 200 --device cuda
    """
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import kernel_paths, resident_bytes, stream_usage, token_stream, windows
        from sparsebit.llm.models.hub_classes import load_tokenizer

        if model.suffix == ".gguf":
            _evaluate_gguf(out, model, measured, loading, wanted.tasks)
            return
        wanted.check(measured.text)
        tokenizer = load_tokenizer(model, trust_remote_code=loading.trust_remote_code)
        tokens = None
        if measured.text is not None:
            tokens = windows(token_stream(measured.text, tokenizer), measured.length, measured.num_windows)
        loaded = loading.load(model)
        record: dict[str, Any] = {
            "model": str(model),
            "adapter": None if loading.adapter is None else str(loading.adapter),
        }
        facts: dict[str, str] = {}
        if tokens is not None:
            _measure(loaded, tokens, measured, batch_size, record, facts)
        scores: list[TaskScore] = []
        if wanted.names:
            scores = wanted.scores(loaded, tokenizer, batch_size, quiet=say.quiet)
            record["tasks"] = [asdict(score) for score in scores]
        size = resident_bytes(loaded)
        if loading.single_device:
            size += stream_usage(loaded).peak_bytes
        record |= {"resident_bytes": size, "packed_layers": kernel_paths(loaded)}
        facts["in memory"] = kilobytes(size)
        facts["packed layers"] = "; ".join(f"{count} {path}" for path, count in kernel_paths(loaded).items())
        out.result(record, *([_table(scores)] if scores else []), facts_table(facts))


def _measure(
    loaded: Any, tokens: Any, measured: WindowOptions, batch_size: int, record: dict[str, Any], facts: dict[str, str]
) -> None:
    """Add the perplexity on the windows to the record and to the facts."""
    from sparsebit.llm import perplexity

    found = perplexity(loaded, tokens, batch_size=batch_size)
    record |= {
        "text": str(measured.text),
        "perplexity": found.value,
        "windows": found.num_windows,
        "length": measured.length,
        "predictions": found.num_predictions,
    }
    facts["perplexity"] = f"{found.value:.3f}"
    facts["text"] = f"{measured.text}, {found.num_windows} windows of {measured.length} tokens"


def _evaluate_gguf(
    out: Output, model: Path, measured: WindowOptions, loading: llm_options.LoadOptions, tasks: str
) -> None:
    """Perplexity of a GGUF file by llama.cpp; options of model folders cannot be used with it."""
    from sparsebit.llm.gguf.evaluation import gguf_perplexity

    of_folders = {
        "--tasks": tasks,
        "--adapter": loading.adapter,
        "--single-device": loading.single_device,
        "--device": loading.device != "cpu",
        "--activations": loading.activations != "float32",
    }
    unused = [option for option, value in of_folders.items() if value]
    if unused:
        raise typer.BadParameter("not for a GGUF file, which llama.cpp runs: leave it out", param_hint=unused[0])
    text, length = measured.text, measured.length
    if text is None:
        raise typer.BadParameter("a GGUF file is measured on a text: give one", param_hint="--text")
    found = gguf_perplexity(model, text, length, measured.num_windows)
    record = {
        "model": str(model),
        "adapter": None,
        "text": str(text),
        "perplexity": found.value,
        "windows": found.num_windows,
        "length": length,
        "predictions": found.num_predictions,
        "file_bytes": model.stat().st_size,
    }
    facts = {
        "perplexity": f"{found.value:.3f}",
        "text": f"{text}, {found.num_windows} windows of {length} tokens",
        "file": kilobytes(model.stat().st_size),
        "computed by": "llama.cpp, which rounds the inputs of products to 8 bits",
    }
    out.result(record, facts_table(facts))


def _table(scores: Sequence[TaskScore]) -> Table:
    from rich.table import Table

    table = Table("task", "metric", "score", "standard error", "questions", "few-shot", title="lm-eval")
    for score in scores:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        table.add_row(score.task, metric, f"{score.value:.4f}", error, str(score.num_samples), str(score.num_fewshot))
    return table
