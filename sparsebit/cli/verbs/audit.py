"""`sparsebit audit`: does a quantized ONNX file run in integers, is it faster than float, and if not, why?"""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType
from rich.table import Table

from sparsebit.cli.outputs.output import Output, facts_table, kilobytes, table
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import AuditOptions
from sparsebit.deploy.audit.audit_file import audit as run_audit
from sparsebit.deploy.runtimes import owner_of
from sparsebit.quantization.recording import file_record
from sparsebit.records.audit import Audit, LayerRun
from sparsebit.report.read_record import run_of_record
from sparsebit.report.writing import checked_page_path, write_page

_NAMES_SHOWN = 3


def audit(asked: AuditOptions, out: Output, recorded: Recording) -> None:
    """Run the audit and report."""
    file, runtime, threads = asked.file, owner_of(asked.file) or asked.runtime, asked.threads
    out.remark(f"auditing {file} in {runtime}, {threads} thread{'s' if threads > 1 else ''}")
    recorded.expect_file(file)
    if asked.html is not None:
        checked_page_path(asked.html)
    shapes = {one.name: one.sizes for one in asked.shape or ()}
    found = run_audit(
        file, against=asked.against, runtime=runtime, shapes=shapes, num_threads=threads, repeats=asked.repeats
    )
    for warning in found.warnings:
        out.warn(warning)
    made = file_record(file, found, run=recorded.run, warnings=recorded.warnings)
    if recorded:
        recorded.write(made)
    if asked.html is not None:
        write_page(asked.html, [run_of_record(made, file.name)])
    record = found.to_dict()
    record.pop("warnings")  # the output adds its own list, which holds them
    out.result({**record, **recorded.values()}, found.verdict, details=_tables(found))
    if asked.html is not None:
        out.remark(f"page: {asked.html}")
    out.next_steps(f"sparsebit check {file} -d SOURCE   # does the runtime compute what the file says?")


def _tables(found: Audit) -> list[RenderableType]:
    groups = [group for group in found.groups() if any(layer.heavy for layer in group) or _is_between(group)]
    return [facts_table(_facts(found)), *([_reasons(groups)] if groups else [])]


def _is_between(group: tuple[LayerRun, ...]) -> bool:
    """Whether light layers need a line: only if they are partly quantized; all-float layers cost no conversions."""
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
    rows = []
    for group in groups:
        heavy_first = sorted(group, key=lambda layer: not layer.heavy)
        names = [f"{layer.name} [{layer.op}]" for layer in heavy_first[:_NAMES_SHOWN]]
        more = [f"and {len(group) - _NAMES_SHOWN} more"] if len(group) > _NAMES_SHOWN else []
        details = list(dict.fromkeys(layer.detail for layer in group if layer.detail))
        because = group[0].cause + (f" ({details[0]})" if len(details) == 1 else "")
        rows.append(["\n".join([*names, *more]), because, group[0].remedy])
    return table(("in float", "because", "what to do"), rows)
