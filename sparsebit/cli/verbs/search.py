"""`sparsebit search`: the bits of every layer under budgets, as a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sparsebit.cli import options
from sparsebit.cli.inputs.calibrated_model import calibrated, formats, load_subject, read_config
from sparsebit.cli.option_groups import retyped
from sparsebit.cli.options import read_limits, refuse
from sparsebit.cli.outputs.output import Output
from sparsebit.cli.outputs.output_files import need_own_text, replace_text
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import SearchOptions
from sparsebit.quantization.mixed_precision.latency import search_latency
from sparsebit.quantization.mixed_precision.search import search_bits
from sparsebit.quantization.mixed_precision.sensitivity import sensitivity


def search(asked: SearchOptions, out: Output, recorded: Recording) -> None:
    """Calibrate, search, and write the config or the placements."""
    budgets, latency, output, name = read_budgets(asked.budget or []), asked.latency, asked.output, asked.net.model
    refuse({"give a --budget, as bytes=0.5, or a --latency, as 0.6": not budgets and not latency}, "--budget")
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
    method: Any = asked.method
    if latency:
        scores = sensitivity(qmodel, batches, method=method, weight_bits=(), activation_bits=())
        searches = search_latency(qmodel, batches, latency, max_bytes=budgets.get("bytes"), scores=scores)
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
        method=method,
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
    is_wrong, others = (
        any(not limit > 0 for limit in asked.latency or ()),
        [name for name in budgets if name != "bytes"],
    )
    refuse({"a share of the float file's time, above 0, as 0.6": is_wrong}, "--latency")
    why = "cannot be combined with --latency, where layers are float or have the bits of the config"
    refuse({f"{', '.join(others)}: {why}; --budget bytes=SHARE (of the float weights) can": others}, "--budget")
    is_other = asked.output.suffix != ".json"
    refuse({f"{asked.output}: --latency writes a placement; name a .json file": is_other}, "--output")
    for name, bits in {"--candidate-bits": asked.candidate_bits, "--activation-bits": asked.activation_bits}.items():
        refuse({f"{bits}: {why}; leave it out, or search with --budget": bits is not None}, name)


def files_of(output: Path, limits: list[float]) -> list[Path]:
    """The output; with several limits, a file for each."""
    return [output] if len(limits) < 2 else [output.with_stem(f"{output.stem}-{limit:g}") for limit in limits]


def read_budgets(texts: list[str]) -> dict[str, float]:
    """`bytes=0.5` and the like, as numbers."""
    try:
        return {name: float(limit) for name, limit in read_limits(texts).items()}
    except ValueError as fault:
        raise typer.BadParameter(f"{fault}; write NAME=NUMBER, as bytes=0.5", param_hint="--budget") from None
