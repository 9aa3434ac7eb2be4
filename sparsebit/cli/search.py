"""`sparsebit search`: the bits of every layer under budgets, as a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, OutputOptions, grouped
from sparsebit.cli.output import speaking


@grouped
def search(
    model: options.Model,
    data: options.Data,
    budget: Annotated[
        list[str],
        typer.Option(
            "--budget",
            metavar="NAME=NUMBER",
            help="bytes, weight_bits, activation_bits or bops; bytes and bops up to 1 are shares. May be repeated.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="The config that was found, for -c of quantize.")
    ],
    config: options.Config = "virtual",
    candidate_bits: Annotated[
        str, typer.Option("--candidate-bits", metavar="N,N,...", help="Bits that a weight may have.")
    ] = "2,3,4,6,8",
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
    """
    limits = read_budgets(budget)
    if said.record is not None:
        raise typer.BadParameter("search keeps no record; leave it out", param_hint="--record")
    with speaking(as_json=said.json, quiet=said.quiet) as out:
        from sparsebit.cli.calibrated_model import calibrated, formats, load_subject, read_config
        from sparsebit.cli.output_files import replace_text
        from sparsebit.quantization.mixed_precision.search import search_bits

        qconfig = read_config(config, device, model=model)
        subject = load_subject(model, model_args, weights, data, how)
        out.remark(f"calibrating {model} ({formats(qconfig)}) on {subject.data.description}")
        steps = [step.to_entry() for step in qconfig.ALGORITHMS] if qconfig.ALGORITHMS else []
        plain = qconfig.replace("ALGORITHMS", []) if steps else qconfig
        qmodel = calibrated(subject, plain, asym=False).qmodel
        found = search_bits(
            qmodel,
            list(subject.data),
            limits,
            weight_bits=options.read_bits(candidate_bits),
            activation_bits=() if activation_bits is None else options.read_bits(activation_bits),
            method=method,  # type: ignore[arg-type]
        )
        chosen = found.config.replace("ALGORITHMS", steps) if steps else found.config
        replace_text(output, chosen.to_yaml())
        record = {"model": model, "output": str(output), **found.to_dict()}
        out.result(record, str(found), f"written: {output}")


def read_budgets(texts: list[str]) -> dict[str, float]:
    """`bytes=0.5` and the like."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r}: write NAME=NUMBER, as bytes=0.5 or weight_bits=4", param_hint="--budget"
            ) from None
    return found
