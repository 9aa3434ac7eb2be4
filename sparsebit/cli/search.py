"""`sparsebit search`: the bits of every layer under budgets, as a config file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, OutputOptions, grouped
from sparsebit.cli.output import speaking

if TYPE_CHECKING:
    from sparsebit.quantization import QuantModel
    from sparsebit.quantization.mixed_precision.latency import LatencySearch


@grouped
def search(
    model: options.Model,
    data: options.Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The config that was found (.yaml), for -c of quantize; with --latency a placement (.json), for "
            "--placement.",
        ),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="NAME=NUMBER",
            help="bytes, weight_bits, activation_bits or bops; bytes and bops up to 1 are shares. May be repeated.",
        ),
    ] = None,
    latency: Annotated[
        list[float] | None,
        typer.Option(
            "--latency",
            metavar="SHARE",
            help="The time that the file may take in its runtime here, as a share of the float file's: layers that "
            "cost accuracy stay float as far as that allows. May be repeated: one file for each.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE|BACKEND",
            help="A YAML config, or a backend's name for its 8-bit default (virtual; with --latency onnxruntime).",
        ),
    ] = None,
    candidate_bits: Annotated[
        str | None,
        typer.Option("--candidate-bits", metavar="N,N,...", help="Bits that a weight may have (2,3,4,6,8)."),
    ] = None,
    activation_bits: Annotated[
        str | None,
        typer.Option("--activation-bits", metavar="N,N,...", help="Bits that an activation may have (its own)."),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="How layers are judged: gradient, kl or sqnr.")
    ] = "gradient",
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    device: options.Device = None,
    how: DataOptions = DataOptions(),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Choose the bits of every layer under budgets, and write the config.

    One pass over the data says what each layer costs at each number of bits; an exact program chooses.

    sparsebit search -m my_model:Net -w net.safetensors -d calibration.npz --budget bytes=0.5
    --candidate-bits 2,3,4,8 -o mixed.yaml

    sparsebit search -m my_model:Net -w net.safetensors -d calibration.npz -c onnxruntime --latency 0.6 -o fast.json
    """
    limits = read_budgets(budget or [])
    if not limits and not latency:
        raise typer.BadParameter("give a --budget, as bytes=0.5, or a --latency, as 0.6", param_hint="--budget")
    if latency:
        check_latency(latency, limits, output)
        check_no_candidates({"--candidate-bits": candidate_bits, "--activation-bits": activation_bits})
    if said.record is not None:
        raise typer.BadParameter("search keeps no record; leave it out", param_hint="--record")
    with speaking(as_json=said.json, quiet=said.quiet) as out:
        from sparsebit.cli.calibrated_model import calibrated, formats, load_subject, read_config
        from sparsebit.cli.output_files import replace_text
        from sparsebit.quantization.mixed_precision.search import search_bits

        qconfig = read_config(config or ("onnxruntime" if latency else "virtual"), device, model=model)
        subject = load_subject(model, model_args, weights, data, how)
        out.remark(f"calibrating {model} ({formats(qconfig)}) on {subject.data.description}")
        steps = [step.to_entry() for step in qconfig.ALGORITHMS] if qconfig.ALGORITHMS else []
        plain = qconfig.replace("ALGORITHMS", []) if steps else qconfig
        qmodel = calibrated(subject, plain, asym=False).qmodel
        if latency:
            told = fit_latency(qmodel, list(subject.data), latency, limits.get("bytes"), output, method)
            files = ", ".join(str(file) for file in told)
            records = [{"output": str(file), **one.to_dict()} for file, one in told.items()]
            use = f"written: {files} (sparsebit quantize --placement FILE)"
            out.result({"model": model, "searches": records}, *(str(one) for one in told.values()), use)
            return
        found = search_bits(
            qmodel,
            list(subject.data),
            limits,
            weight_bits=options.read_bits(candidate_bits or "2,3,4,6,8"),
            activation_bits=() if activation_bits is None else options.read_bits(activation_bits),
            method=method,  # type: ignore[arg-type]
        )
        chosen = found.config.replace("ALGORITHMS", steps) if steps else found.config
        replace_text(output, chosen.to_yaml())
        record = {"model": model, "output": str(output), **found.to_dict()}
        out.result(record, str(found), f"written: {output}")


def check_latency(latency: list[float], budgets: dict[str, float], output: Path) -> None:
    """Refuse what cannot be searched, before the work."""
    if any(not limit > 0 for limit in latency):
        raise typer.BadParameter("a share of the float file's time, above 0, as 0.6", param_hint="--latency")
    if others := [name for name in budgets if name != "bytes"]:
        raise typer.BadParameter(
            f"{', '.join(others)}: beside --latency, layers are float or have 8 bits, and --budget bytes=SHARE (of the "
            "float weights) is what can be limited too",
            param_hint="--budget",
        )
    if output.suffix != ".json":
        raise typer.BadParameter(f"{output}: --latency gives a placement; name a .json file", param_hint="--output")


def check_no_candidates(given: dict[str, str | None]) -> None:
    """Refuse bits to choose from beside a limit on the time: they would not be looked at."""
    for name, bits in given.items():
        if bits is not None:
            raise typer.BadParameter(
                f"{bits}: beside --latency each layer has the bits of its config or is float: runtimes have no faster "
                "kernels for fewer bits. Leave it out, or search with --budget in place of --latency",
                param_hint=name,
            )


def fit_latency(
    qmodel: QuantModel,
    batches: list[Any],
    limits: list[float],
    max_bytes: float | None,
    output: Path,
    method: str = "gradient",
) -> dict[Path, LatencySearch]:
    """A placement for each limit, written to `output`, or to a file for each limit where there are several."""
    from sparsebit.cli.output_files import replace_text
    from sparsebit.quantization.mixed_precision.latency import search_latency
    from sparsebit.quantization.mixed_precision.sensitivity import sensitivity

    scores = sensitivity(qmodel, batches, method=method, weight_bits=(), activation_bits=())  # type: ignore[arg-type]
    found = search_latency(qmodel, batches, limits, max_bytes=max_bytes, scores=scores)
    files = [output] if len(limits) == 1 else [output.with_stem(f"{output.stem}-{one.limit:g}") for one in found]
    for file, one in zip(files, found, strict=True):
        replace_text(file, one.profile.to_json())
    return dict(zip(files, found, strict=True))


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
