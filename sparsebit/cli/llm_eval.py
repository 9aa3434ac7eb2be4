"""`sparsebit llm eval`: perplexity of a language model, or scores in tasks; a packed one is measured packed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import llm_options, options
from sparsebit.cli.output import facts_table, kilobytes, speaking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from sparsebit.llm import TaskScore

_TASKS = "Tasks of lm-eval"


def evaluate(
    model: llm_options.ModelFolder,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE|DIR",
            help="Text that the model was not trained on, for perplexity.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")] = 512,
    num_windows: Annotated[
        int | None, typer.Option("--num-windows", min=1, help="Windows from the beginning of the text; all of them.")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="NAME,NAME",
            help="Names or patterns; needs: pip install lm_eval.",
            rich_help_panel=_TASKS,
        ),
    ] = "",
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path", metavar="DIR", help="A folder of task files of your own.", rich_help_panel=_TASKS
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Questions of each task at most; all.", rich_help_panel=_TASKS)
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            min=0,
            help="Answered questions in front of each; those of the task.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    batch_size: llm_options.BatchSize = 4,
    adapter: llm_options.Adapter = None,
    device: llm_options.Device = "cpu",
    single_device: llm_options.SingleDevice = False,
    activations: llm_options.Activations = "float32",
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the perplexity of a float or packed model on a text, or its scores in tasks of lm-eval, or both.

    The text is cut into windows one after another; in each one every token but the first is predicted from those in
    front of it. The weights of a packed model stay packed while it is measured.

    sparsebit llm eval llama-w4/ --text heldout.txt --length 2048

    sparsebit llm eval llama-w4/ --tasks arc_easy,hellaswag --limit 200 --device cuda
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import (
            evaluate_tasks,
            kernel_paths,
            perplexity,
            resident_bytes,
            stream_usage,
            token_stream,
            windows,
        )
        from sparsebit.llm.hub_classes import load_tokenizer

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        _check_use(text, names, {"--include-path": include_path, "--limit": limit, "--num-fewshot": num_fewshot})
        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        tokens = None if text is None else windows(token_stream(text, tokenizer), length, num_windows)
        loaded = llm_options.load_model(
            model,
            adapter=adapter,
            device=device,
            single_device=single_device,
            activations=activations,
            trust_remote_code=trust_remote_code,
        )
        record: dict[str, Any] = {"model": str(model), "adapter": None if adapter is None else str(adapter)}
        facts: dict[str, str] = {}
        if tokens is not None:
            found = perplexity(loaded, tokens, batch_size=batch_size)
            record |= {
                "text": str(text),
                "perplexity": found.value,
                "windows": found.num_windows,
                "length": length,
                "predictions": found.num_predictions,
            }
            facts["perplexity"] = f"{found.value:.3f}"
            facts["text"] = f"{text}, {found.num_windows} windows of {length} tokens"
        scores: list[TaskScore] = []
        if names:
            # lm-eval and the package datasets show bars of their own.
            with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
                scores = evaluate_tasks(
                    loaded,
                    tokenizer,
                    names,
                    include_path=include_path,
                    limit=limit,
                    num_fewshot=num_fewshot,
                    batch_size=batch_size,
                )
            record["tasks"] = [asdict(score) for score in scores]
        size = resident_bytes(loaded)
        if single_device:
            size += stream_usage(loaded).peak_bytes
        record |= {"resident_bytes": size, "packed_layers": kernel_paths(loaded)}
        facts["in memory"] = kilobytes(size)
        facts["packed layers"] = "; ".join(f"{count} {path}" for path, count in kernel_paths(loaded).items())
        out.result(record, *([_table(scores)] if scores else []), facts_table(facts))


def _check_use(text: Path | None, names: Sequence[str], of_tasks: dict[str, object]) -> None:
    if text is None and not names:
        raise typer.BadParameter("give a text, or tasks with --tasks", param_hint="--text")
    unused = [option for option, value in of_tasks.items() if value is not None]
    if unused and not names:
        raise typer.BadParameter("only together with --tasks", param_hint=unused[0])


def _table(scores: Sequence[TaskScore]) -> Table:
    from rich.table import Table

    table = Table("task", "metric", "score", "standard error", "questions", "few-shot", title="lm-eval")
    for score in scores:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        table.add_row(score.task, metric, f"{score.value:.4f}", error, str(score.num_samples), str(score.num_fewshot))
    return table
