"""`sparsebit llm eval`: perplexity of a language model, or scores in tasks; packed weights stay packed.

A folder is loaded whole or streamed (`LoadOptions`); a GGUF file is run by llama.cpp, which takes none of those
options. transformers and lm-eval are imported inside of the verb, so that `--help` stays fast.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from sparsebit.cli.llm import options as llm_options
from sparsebit.cli.option_groups import SpeakingOptions, grouped, option
from sparsebit.cli.outputs.output import Output, facts_table, kilobytes, speaking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from sparsebit.llm import TaskScore


@dataclass(frozen=True)
class WindowOptions:
    """The text whose perplexity is measured."""

    text: Path | None = option(
        None, "Text that the model was not trained on, for perplexity.", "FILE|DIR", show_default=False
    )
    length: int = option(512, "Tokens of a window.", min=2)
    num_windows: int | None = option(None, "Windows from the beginning of the text; all of them.", min=1)

    def record(self, model: Path, found: Any) -> dict[str, Any]:
        """The measured perplexity."""
        counts = {"windows": found.num_windows, "length": self.length, "predictions": found.num_predictions}
        return {"model": str(model), "text": str(self.text), "perplexity": found.value, **counts}

    def facts(self, found: Any) -> dict[str, str]:
        text = f"{self.text}, {found.num_windows} windows of {self.length} tokens"
        return {"perplexity": f"{found.value:.3f}", "text": text}


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-eval."""

    heading: ClassVar = "Tasks of lm-eval"

    tasks: str = option("", "Names or patterns; needs: pip install lm_eval.", "NAME,NAME")
    include_path: Path | None = option(None, "A folder of task files of your own.", "DIR")
    limit: int | None = option(None, "Questions of each task at most; all.", min=1)
    num_fewshot: int | None = option(None, "Answered questions before each; those of the task.", min=0)

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def check(self, text: Path | None) -> None:
        given = {"--include-path": self.include_path, "--limit": self.limit, "--num-fewshot": self.num_fewshot}
        unused = [option for option, value in given.items() if value is not None]
        if not self.names and (unused or text is None):
            wrong = "give a text, or tasks with --tasks" if text is None else "only together with --tasks"
            raise typer.BadParameter(wrong, param_hint="--text" if text is None else unused[0])

    def scores(self, model: Any, tokenizer: Any, batch_size: int, *, quiet: bool) -> list[TaskScore]:
        from sparsebit.llm import evaluate_tasks

        # lm-eval and the package datasets show bars of their own.
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
            how: dict[str, Any] = {"limit": self.limit, "num_fewshot": self.num_fewshot, "batch_size": batch_size}
            return evaluate_tasks(model, tokenizer, self.names, include_path=self.include_path, **how)


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

        from sparsebit.llm import kernel_paths, perplexity, resident_bytes, stream_usage, token_stream, windows
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
        adapter = None if loading.adapter is None else str(loading.adapter)
        record: dict[str, Any] = {"model": str(model), "adapter": adapter}
        facts: dict[str, str] = {}
        if tokens is not None:
            found = perplexity(loaded, tokens, batch_size=batch_size)
            record |= measured.record(model, found)
            facts |= measured.facts(found)
        scores: list[TaskScore] = []
        if wanted.names:
            scores = wanted.scores(loaded, tokenizer, batch_size, quiet=say.quiet)
            record["tasks"] = [asdict(score) for score in scores]
        size = resident_bytes(loaded)
        if loading.single_device:
            size += stream_usage(loaded).peak_bytes
        record |= {
            "resident_bytes": size,
            "packed_layers": kernel_paths(loaded),
            "kv_cache": llm_options.cache_of(loaded),
        }
        facts["in memory"] = kilobytes(size)
        facts["packed layers"] = "; ".join(f"{count} {path}" for path, count in kernel_paths(loaded).items())
        facts["cache"] = llm_options.cache_of(loaded)
        out.result(record, *([_table(scores)] if scores else []), facts_table(facts))


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
        "--kv-cache": loading.kv_cache != "folder",
    }
    unused = [option for option, value in of_folders.items() if value]
    if unused:
        raise typer.BadParameter("not for a GGUF file, which llama.cpp runs: leave it out", param_hint=unused[0])
    if measured.text is None:
        raise typer.BadParameter("a GGUF file is measured on a text: give one", param_hint="--text")
    found, size = gguf_perplexity(model, measured.text, measured.length, measured.num_windows), model.stat().st_size
    facts = measured.facts(found) | {"file": kilobytes(size)}
    facts["computed by"] = "llama.cpp, which rounds the inputs of products to 8 bits"
    out.result(measured.record(model, found) | {"adapter": None, "file_bytes": size}, facts_table(facts))


def _table(scores: Sequence[TaskScore]) -> Table:
    from rich.table import Table

    table = Table("task", "metric", "score", "standard error", "questions", "few-shot", title="lm-eval")
    for score in scores:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        table.add_row(score.task, metric, f"{score.value:.4f}", error, str(score.num_samples), str(score.num_fewshot))
    return table
