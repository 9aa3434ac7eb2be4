"""`sparsebit audit`: does a quantized ONNX file run in integers, is it faster than float, and if not, why?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sparsebit.cli.option_groups import OutputOptions, grouped
from sparsebit.cli.output import facts_table, kilobytes, speaking
from sparsebit.cli.recording import recording

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparsebit.records.audit import Audit, LayerRun

_NAMES_SHOWN = 3


class InputShape(NamedTuple):
    """What `--shape` says of one input."""

    name: str
    sizes: tuple[int, ...]


def read_shape(text: str) -> InputShape:
    """`x=1x3x224x224`."""
    name, _, sizes = text.rpartition("=")
    parts = sizes.lower().split("x")
    if not name or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: write the input's name and its sizes, image=1x3x224x224")
    return InputShape(name, tuple(map(int, parts)))


@grouped
def audit(
    file: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The quantized file, of any tool.")],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FLOAT.onnx",
            help="The float file; without it, the same file without its quantization.",
        ),
    ] = None,
    runtime: Annotated[
        str, typer.Option("--runtime", "-r", metavar="NAME", help="onnxruntime or openvino.")
    ] = "onnxruntime",
    threads: Annotated[
        int, typer.Option("--threads", "-t", min=1, help="Threads; 1 is compared by CPU time, more by wall time.")
    ] = 1,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=0, help="Rounds of timing; 0: none. Default: as many as fit in 5 seconds."),
    ] = None,
    shape: Annotated[
        list[InputShape] | None,
        typer.Option(
            "--shape",
            metavar="NAME=NxCxHxW",
            parser=read_shape,
            help="The shape of an input whose dimensions are open; once per input.",
        ),
    ] = None,
    said: OutputOptions = OutputOptions(),
) -> None:
    """Look into the graph that a runtime really executes: which layers run in integers, which do not, and why.

    The file is timed in turns with the float model. The inputs are random: speed is measured, not accuracy.

    sparsebit audit resnet18-int8.onnx

    sparsebit audit model.onnx --against float.onnx --runtime openvino --shape image=1x3x640x640
    """
    with (
        speaking(as_json=said.json, quiet=said.quiet) as out,
        recording(said.record, "audit", out) as recorded,
    ):
        from sparsebit.deploy.audit import audit as run_audit

        out.remark(f"auditing {file} in {runtime}, {threads} thread{'s' if threads > 1 else ''}")
        recorded.expect_file(file)
        found = run_audit(
            file,
            against=against,
            runtime=runtime,
            shapes={one.name: one.sizes for one in shape or ()},
            num_threads=threads,
            repeats=repeats,
        )
        for warning in found.warnings:
            out.warn(warning)
        if recorded:
            from sparsebit.quantization.recording import file_record

            recorded.write(file_record(file, found, run=recorded.run, warnings=recorded.warnings))
        record = found.to_dict()
        record.pop("warnings")  # the output adds its own list, which holds them
        out.result({**record, **recorded.told()}, *([] if said.quiet else _tables(found)), found.verdict)


def _tables(found: Audit) -> list[RenderableType]:
    groups = [group for group in found.groups() if any(layer.heavy for layer in group) or _is_between(group)]
    return [facts_table(_facts(found)), *([_reasons(groups)] if groups else [])]


def _is_between(group: tuple[LayerRun, ...]) -> bool:
    """Whether light layers are worth a line: they are quantized in part; what is float all over costs no conversion."""
    return group[0].cause != "it is not quantized" and not group[0].on_purpose


def _facts(found: Audit) -> dict[str, str]:
    return {
        "layers": _by_arithmetic(found.heavy),
        "between": _by_arithmetic(tuple(layer for layer in found.layers if not layer.heavy)),
        "left over": ", ".join(f"{count} {op}" for op, count in found.leftovers.items()) or "no conversion",
        "size": size_words(found),
        "time": time_words(found),
        "inputs": "; ".join(f"{name} {words}" for name, words in found.feeds.items()),
        "runtime": f"{found.runtime} {found.runtime_version}, {found.cpu}",
    }


def _by_arithmetic(layers: tuple[LayerRun, ...]) -> str:
    """`20 integer, 1 float`."""
    return ", ".join(f"{count} {word}" for word, count in Counter(layer.arithmetic for layer in layers).most_common())


def size_words(found: Audit) -> str:
    """`11.8 MB; 46.8 MB in float: 0.25 of it`."""
    own = kilobytes(found.num_bytes)
    if found.float_bytes is None:
        return own
    return f"{own}; {kilobytes(found.float_bytes)} in float: {found.num_bytes / found.float_bytes:.2f} of it"


def time_words(found: Audit) -> str:
    """`12.4 ms; its float twin 15.3 ms: 0.81 of it (CPU time, 1 thread, 126 rounds)`; empty where nothing was timed."""
    if found.ratio is None:
        return ""
    quantized, plain = found.latency["quantized"], found.latency["float"]
    one = found.num_threads == 1
    times = (quantized.cpu_ms, plain.cpu_ms) if one else (quantized.wall_ms, plain.wall_ms)
    clock = "CPU time, 1 thread" if one else f"wall time, {found.num_threads} threads"
    source = "its float twin" if found.float_source == "twin" else found.float_source
    how = f"{clock}, {quantized.num_rounds} rounds"
    return f"{times[0]:.3g} ms; {source} {times[1]:.3g} ms: {found.ratio:.2f} of it ({how})"


def _reasons(groups: list[tuple[LayerRun, ...]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("in float", "because", "what to do"):
        table.add_column(column, overflow="fold")
    for group in groups:
        heavy_first = sorted(group, key=lambda layer: not layer.heavy)
        names = [f"{layer.name} [{layer.op}]" for layer in heavy_first[:_NAMES_SHOWN]]
        more = [f"and {len(group) - _NAMES_SHOWN} more"] if len(group) > _NAMES_SHOWN else []
        details = list(dict.fromkeys(layer.detail for layer in group if layer.detail))
        because = group[0].cause + (f" ({details[0]})" if len(details) == 1 else "")
        table.add_row(Text("\n".join([*names, *more])), Text(because), Text(group[0].remedy))
    return table
