"""The options that the verbs for language models share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A model folder: config.json, safetensors, tokenizer.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model; off unless given.")
]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", metavar="DIR", help="An adapter of the model, as finetune writes it.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Windows of text at once.")]
Activations = Annotated[
    str,
    typer.Option(
        "--activations",
        metavar="float32|bfloat16|int8",
        help="On a CPU, how far kernels may round the inputs of packed layers; a probe takes the fastest.",
    ),
]
