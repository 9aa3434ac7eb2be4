"""`sparsebit graph`: the quantized graph as a Mermaid diagram."""

from __future__ import annotations

from sparsebit.cli.inputs.calibrated_model import planned
from sparsebit.cli.outputs.output import Output
from sparsebit.cli.outputs.output_files import need_own_text, replace_text
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import GraphOptions


def graph(asked: GraphOptions, out: Output, recorded: Recording) -> None:
    """Place the quantizers and draw them."""
    output, name = asked.output, asked.net.model
    if output is not None:
        need_own_text(output, "flowchart ", "```mermaid\n")
    qmodel = planned(asked.net, asked.config, asked.data)
    diagram = qmodel.dump_mermaid()
    if output is not None:
        replace_text(output, f"```mermaid\n{diagram}```\n" if output.suffix == ".md" else diagram)
        out.remark(f"wrote {output}")
    if asked.said.json:
        where = None if output is None else str(output)
        out.result({"model": name, "backend": qmodel.config.BACKEND, "output": where, "mermaid": diagram})
    elif output is None:
        out.raw(diagram)
