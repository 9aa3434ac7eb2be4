"""`sparsebit llm`: the verbs for language models."""

from __future__ import annotations

import typer

from sparsebit.cli import llm_convert, llm_eval, llm_finetune, llm_generate, llm_quantize
from sparsebit.cli.verb import Verb

app = typer.Typer(help="Language models: quantize, convert, evaluate, generate, fine-tune.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Language models: quantize, convert, evaluate, generate, fine-tune."""


app.command("quantize", cls=llm_quantize.QuantizeVerb)(llm_quantize.quantize)
app.command("convert", cls=Verb)(llm_convert.convert)
app.command("finetune", cls=Verb)(llm_finetune.finetune)
app.command("merge", cls=Verb)(llm_finetune.merge)
app.command("eval", cls=Verb)(llm_eval.evaluate)
app.command("generate", cls=Verb)(llm_generate.generate)
