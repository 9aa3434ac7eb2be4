"""`sparsebit search`: the bits of every layer under budgets, as a config file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from sparsebit.cli import options
from sparsebit.cli.inputs.calibrated_model import calibrated, formats, load_subject, read_config
from sparsebit.cli.option_groups import retyped
from sparsebit.cli.outputs.output import Output
from sparsebit.cli.outputs.output_files import need_own_text, replace_text
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import SearchOptions
from sparsebit.quantization import QuantModel
from sparsebit.quantization.mixed_precision.latency import LatencySearch, search_latency
from sparsebit.quantization.mixed_precision.search import search_bits
from sparsebit.quantization.mixed_precision.sensitivity import sensitivity


def search(asked: SearchOptions, out: Output, recorded: Recording) -> None:
    """Calibrate, search, and write the config or the placements."""
    budgets, latency, output, name = read_budgets(asked.budget or []), asked.latency, asked.output, asked.net.model
    if not budgets and not latency:
        raise typer.BadParameter("give a --budget, as bytes=0.5, or a --latency, as 0.6", param_hint="--budget")
    if latency:
        check_latency(asked, budgets)
    for file in files_of(output, latency or []):
        need_own_text(file, "BACKEND: ", '{\n "format": "sparsebit')
    qconfig = read_config(asked.config or ("onnxruntime" if latency else "virtual"), asked.device, model=name)
    subject = load_subject(asked.net, asked.data, asked.how)
    out.remark(f"calibrating {name} ({formats(qconfig)}) on {subject.data.description}")
    steps = [step.to_entry() for step in qconfig.ALGORITHMS] if qconfig.ALGORITHMS else []
    plain = qconfig.replace("ALGORITHMS", []) if steps else qconfig
    qmodel = calibrated(subject, plain).qmodel
    batches = list(subject.data)
    if latency:
        searches = fit_latency(qmodel, batches, latency, budgets.get("bytes"), asked.method)
        files = files_of(output, [one.limit for one in searches])
        for file, one in zip(files, searches, strict=True):
            replace_text(file, one.profile.to_json())
        records = [{"output": str(file), **one.to_dict()} for file, one in zip(files, searches, strict=True)]
        written = f"written: {', '.join(map(str, files))}"
        out.result({"model": name, "searches": records}, *map(str, searches), written)
        out.next_steps(f"sparsebit quantize {_again(asked)} --placement {files[0]} -o FILE.onnx")
        return
    found = search_bits(
        *(qmodel, batches, budgets),
        weight_bits=options.read_bits(asked.candidate_bits or "2,3,4,6,8"),
        activation_bits=() if asked.activation_bits is None else options.read_bits(asked.activation_bits),
        method=asked.method,  # type: ignore[arg-type]
    )
    chosen = found.config.replace("ALGORITHMS", steps) if steps else found.config
    replace_text(output, chosen.to_yaml())
    out.result({"model": name, "output": str(output), **found.to_dict()}, str(found), f"written: {output}")
    out.next_steps(f"sparsebit quantize {_again(asked)} -c {output} -o DIR")


def _again(asked: SearchOptions) -> str:
    """The model and the data, as they were typed."""
    return " ".join(filter(None, [retyped(asked.net), f"-d {asked.data}", retyped(asked.how)]))


def check_latency(asked: SearchOptions, budgets: dict[str, float]) -> None:
    """Raise, before the work, for a latency that cannot be searched, and for options that exclude it."""
    if any(not limit > 0 for limit in asked.latency or ()):
        raise typer.BadParameter("a share of the float file's time, above 0, as 0.6", param_hint="--latency")
    if others := [name for name in budgets if name != "bytes"]:
        raise typer.BadParameter(
            f"{', '.join(others)}: cannot be combined with --latency, where layers are float or have 8 bits; "
            "--budget bytes=SHARE (of the float weights) can",
            param_hint="--budget",
        )
    if asked.output.suffix != ".json":
        raise typer.BadParameter(
            f"{asked.output}: --latency writes a placement; name a .json file", param_hint="--output"
        )
    for name, bits in {"--candidate-bits": asked.candidate_bits, "--activation-bits": asked.activation_bits}.items():
        if bits is not None:
            raise typer.BadParameter(
                f"{bits}: cannot be combined with --latency, where each layer has the bits of its config or is float: "
                "runtimes have no faster kernels for fewer bits. Leave it out, or search with --budget",
                param_hint=name,
            )


def files_of(output: Path, limits: list[float]) -> list[Path]:
    """The output; with several limits, a file for each."""
    return [output] if len(limits) < 2 else [output.with_stem(f"{output.stem}-{limit:g}") for limit in limits]


def fit_latency(
    qmodel: QuantModel, batches: list[Any], limits: list[float], max_bytes: float | None, method: str
) -> Sequence[LatencySearch]:
    """A placement for each limit."""
    scores = sensitivity(qmodel, batches, method=method, weight_bits=(), activation_bits=())  # type: ignore[arg-type]
    return search_latency(qmodel, batches, limits, max_bytes=max_bytes, scores=scores)


def read_budgets(texts: list[str]) -> dict[str, float]:
    """`bytes=0.5` and the like."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name.strip() in found:
            raise typer.BadParameter(f"{name.strip()} is given twice; give one limit", param_hint="--budget")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r}: write NAME=NUMBER, as bytes=0.5 or weight_bits=4", param_hint="--budget"
            ) from None
    return found
