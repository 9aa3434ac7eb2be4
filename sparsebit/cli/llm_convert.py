"""`sparsebit llm convert`: a packed language model in another file format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import llm_options, options
from sparsebit.cli.output import facts_table, speaking


def convert(
    model: llm_options.ModelFolder,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="What does not exist yet; it appears whole.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="compressed-tensors, gptq (version 2), gptq-v1 or gguf."),
    ],
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Keep the result without loading it and comparing logits.")
    ] = False,
    trust_remote_code: llm_options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a packed model in another file format; codes and scales stay as they are.

    Before it is kept, the result is loaded, and its logits have to be those of the original.

    sparsebit llm convert llama-w4/ -o llama-w4-gptq/ --to gptq

    sparsebit llm convert llama-w4/ -o llama-w4.gguf --to gguf
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from dataclasses import asdict

        from sparsebit.llm import convert as run

        made = run(model, output, to, check=not no_check, trust_remote_code=trust_remote_code)
        check = made.check
        record = {
            "output": str(made.output),
            "format": made.format,
            "layers": {name: asdict(layer) for name, layer in made.formats.items()},
            "check": None if check is None else asdict(check),
        }
        facts = {"written": str(made.output), "layers": f"{len(made.formats)} packed layers as {made.format}"}
        if check is None:
            facts["checked"] = "not loaded (--no-check)"
        else:
            facts["checked"] = f"loaded by {check.reader}; logits differ by {check.difference:.1g} of the largest"
            facts["vLLM"] = f"would refuse: {'; '.join(check.vllm)}" if check.vllm else ""
        out.result(record, facts_table(facts))
