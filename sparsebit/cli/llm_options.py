"""The options that the verbs for language models share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

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
SingleDevice = Annotated[
    bool,
    typer.Option("--single-device", help="For models larger than the device: two blocks at a time are in memory."),
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


def is_first_process() -> bool:
    """Whether this process tells the result: under torchrun the first one alone does."""
    return os.environ.get("RANK", "0") == "0"


def load_model(
    folder: Path,
    *,
    adapter: Path | None,
    device: str,
    single_device: bool,
    activations: str,
    trust_remote_code: bool,
) -> Any:
    """The model as the options want it: whole or streamed, with or without an adapter."""
    from sparsebit.llm import load, load_adapter, load_streamed

    if single_device:
        wrong = "--adapter" if adapter is not None else "--activations" if activations != "float32" else None
        if wrong is not None:
            raise typer.BadParameter(f"not together with {wrong}: load the model whole", param_hint="--single-device")
        return load_streamed(folder, device=device, trust_remote_code=trust_remote_code)
    loaded = load(folder, device=device, activations=activations, trust_remote_code=trust_remote_code)
    return loaded if adapter is None else load_adapter(loaded, adapter).eval()
