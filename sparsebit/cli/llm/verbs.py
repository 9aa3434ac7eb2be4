"""`sparsebit llm`: the verbs for language models."""

from __future__ import annotations

import typer

from sparsebit.cli.llm import compress as llm_compress
from sparsebit.cli.llm import convert as llm_convert
from sparsebit.cli.llm import eval as llm_eval
from sparsebit.cli.llm import finetune as llm_finetune
from sparsebit.cli.llm import generate as llm_generate
from sparsebit.cli.llm import quantize as llm_quantize
from sparsebit.cli.verb import Verb

app = typer.Typer(help="Language models: compress, quantize, convert, evaluate, fine-tune.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Language models: compress, quantize, convert, evaluate, fine-tune."""


app.command("compress", cls=Verb)(llm_compress.compress)
app.command("quantize", cls=Verb)(llm_quantize.quantize)
app.command("convert", cls=Verb)(llm_convert.convert)
app.command("finetune", cls=Verb)(llm_finetune.finetune)
app.command("merge", cls=Verb)(llm_finetune.merge)
app.command("eval", cls=Verb)(llm_eval.evaluate)
app.command("generate", cls=Verb)(llm_generate.generate)
