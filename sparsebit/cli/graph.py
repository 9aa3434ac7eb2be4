"""`sparsebit graph`: the quantized graph as a Mermaid diagram."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.output import speaking


def graph(
    model: options.Model,
    config: options.Config = "onnxruntime",
    model_args: options.ModelArgs = None,
    data: options.Example = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A .mmd file, or .md with the diagram in a fence (else: stdout)."
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw the graph with its quantizers as a Mermaid diagram.

    The diagram shows the plan; nothing is calibrated. GitHub, GitLab and mermaid.live render it.

    sparsebit graph -m torchvision.models:resnet18 -c tensorrt -o resnet18.md
    """
    with speaking(as_json=json, quiet=quiet) as out:
        from sparsebit.cli.calibrated_model import planned
        from sparsebit.cli.output_files import replace_text

        qmodel = planned(model, model_args, config, data)
        diagram = qmodel.dump_mermaid()
        if output is not None:
            replace_text(output, f"```mermaid\n{diagram}```\n" if output.suffix == ".md" else diagram)
            out.remark(f"wrote {output}")
        if json:
            where = None if output is None else str(output)
            out.result({"model": model, "backend": qmodel.config.BACKEND, "output": where, "mermaid": diagram})
        elif output is None:
            out.raw(diagram)
