"""`sparsebit profile`: which layers lose most, as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.gains import GainOptions, gains_record, gains_table, gains_title
from sparsebit.cli.option_groups import DataOptions, OutputOptions, grouped
from sparsebit.cli.output import decibel, speaking
from sparsebit.cli.recording import Recording, recording

if TYPE_CHECKING:
    from rich.table import Table

    from sparsebit.cli.calibrated_model import Subject
    from sparsebit.cli.first_batch import FirstBatch
    from sparsebit.quantization import QuantModel
    from sparsebit.records import Coverage, ErrorProfile, LayerError, OutputError, RunRecord

_ROWS = 20
_FLOAT = "the float model"


@grouped
def profile(
    model: options.Model,
    data: options.Data,
    config: options.OptionalConfig = None,
    quantized: Annotated[
        Path | None,
        typer.Option(
            "--quantized", metavar="DIR", help="A folder of `sparsebit quantize`, in place of --config and --asym."
        ),
    ] = None,
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    asym: options.Asym = False,
    device: options.Device = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="All layers quantized together (errors pile up), not each one alone.")
    ] = False,
    top: Annotated[
        int | None, typer.Option("--top", min=0, help=f"Layers shown; 0: all ({_ROWS}, with --json all).")
    ] = None,
    gains: GainOptions = GainOptions(),
    how: DataOptions = DataOptions(),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Show what quantization costs every layer, the worst first.

    The order is that of the SQNR of a layer's output (signal against quantization noise in dB; 6 dB are a bit): unlike
    the mean squared error it does not depend on how large the layer's numbers are. With --gains, also the accuracy that
    comes back when each of the worst layers is float.

    Errors are those against the float model. Algorithms (GPTQ, reconstruction) change weights, and a layer's error is
    then that against the changed weights; the title says so. The output of a saved model whose weights were changed is
    compared with the float model if --weights names it.

    sparsebit profile -m my_model:Net -w net.safetensors -c config.yaml -d calibration.npz --top 5

    sparsebit profile -m my_model:Net -w net.safetensors -d calibration.npz --gains 5 --test-data test.npz
    """
    gains.check()
    if quantized is not None and (config or asym or device):
        raise typer.BadParameter(
            "a saved model has its config: leave --config, --asym and --device out", param_hint="--quantized"
        )
    with (
        speaking(as_json=said.json, quiet=said.quiet) as out,
        recording(said.record, "profile", out) as recorded,
    ):
        from sparsebit.cli.calibrated_model import calibrated, formats, load_subject, read_config
        from sparsebit.records import OutputError

        qconfig = None if quantized is not None else read_config(config or "onnxruntime", device, model=model)
        subject = load_subject(model, model_args, weights, data, how)
        recorded.expect(subject.model, model)
        if qconfig is None:
            assert quantized is not None
            qmodel, first_batch, output_reference = _saved(quantized, subject, has_weights=weights is not None)
            recorded.expect_numbers(qmodel, model)
        else:
            out.remark(f"calibrating {model} ({formats(qconfig)}) on {subject.data.description}")
            qmodel, first_batch = calibrated(subject, qconfig, asym=asym).qmodel, subject.first_batch
            output_reference = _FLOAT
        references = {"output": output_reference, "layers": _own_reference(qmodel)}
        sqnr = first_batch.sqnr_db(qmodel, qmodel.config.DEVICE)
        test = gains.load(subject.model, data, how, first_batch)
        errors = qmodel.profile(subject.data, sync=sync, histograms=bool(recorded))
        found_gains = None if test is None else gains.measure(qmodel, test)
        errors = replace(errors, gains=found_gains)
        found = list(errors.layers)
        if recorded:
            recorded.write(
                _record(model, subject, qmodel, OutputError(sqnr, first_batch.num_samples), errors, recorded)
            )
        wanted = top if top is not None else (0 if said.json else _ROWS)
        shown = found[:wanted] if wanted else found
        record = {
            "model": model,
            "backend": qmodel.config.BACKEND,
            "sync": sync,
            "compared_with": references,
            "output_sqnr_db": sqnr,
            "num_layers": len(found),
            "layers": [as_record(error) for error in shown],
            **({} if found_gains is None else {"gains": gains_record(found_gains)}),
            **recorded.told(),
        }
        title = _title(formats(qmodel.config), sync, sqnr, references)
        told = () if found_gains is None or test is None else (gains_title(found_gains, test), gains_table(found_gains))
        out.result(record, title, error_table(shown, qmodel.coverage), *_rest(found, shown), *told)


def _own_reference(qmodel: QuantModel) -> str:
    """What the model computes with its quantizers off, in words."""
    if not qmodel.float_values_are_lost and not len(qmodel.float_parameters):
        return _FLOAT
    return f"the weights that {', '.join(qmodel.applied_algorithms) or 'algorithms'} left"


def _saved(folder: Path, subject: Subject, *, has_weights: bool) -> tuple[QuantModel, FirstBatch, str]:
    """A saved model, the first batch through what its outputs are compared with, and that in words.

    It is the model with its own weights unquantized: those of the model given do not matter. Where algorithms changed
    them, a float model whose weights were given by name (`has_weights`) is what the outputs are compared with.
    """
    from sparsebit.quantization import QuantModel

    qmodel = QuantModel.load(folder, subject.model)
    reference = _own_reference(qmodel)
    if reference != _FLOAT and has_weights:
        return qmodel, subject.first_batch, _FLOAT
    switches = qmodel.is_quantized("weight"), qmodel.is_quantized("activation")
    qmodel.set_quant(w_quant=False, a_quant=False)
    first_batch = subject.first_batch.again(qmodel, qmodel.config.DEVICE)
    qmodel.set_quant(*switches)
    return qmodel, first_batch, reference


def _record(
    name: str, subject: Subject, qmodel: QuantModel, output: OutputError, errors: ErrorProfile, to: Recording
) -> RunRecord:
    """What is known of the model, and what it loses."""
    from sparsebit.quantization.recording import record

    words = subject.data.description
    found = replace(errors, data=words)
    made = record(qmodel, output, found, name=name, run=to.run, warnings=to.warnings)
    return made.replace(calibration=made.calibration and replace(made.calibration, data=words))


def as_record(error: LayerError) -> dict[str, object]:
    """The values of one layer for `--json`."""
    return {"layer": error.layer, "mse": error.error, "sqnr_db": error.sqnr_db}


def error_table(errors: list[LayerError], coverage: Coverage) -> Table:
    """A row per layer: its number formats, its errors, and a bar of its noise."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("weight")
    table.add_column("activation")
    table.add_column("MSE", justify="right")
    table.add_column("SQNR", justify="right")
    table.add_column("noise / signal", no_wrap=True)
    dtypes = {f"{layer.name}.{role}": dtype for layer in coverage.quantized for role, dtype in layer.sites.items()}
    most = max((_noise(error.sqnr_db) for error in errors), default=0.0)
    for error in errors:
        name = error.layer
        # A layer quantizes its inputs; a site between layers (`conv.output`) stands for itself.
        own = [
            dtype
            for site, dtype in dtypes.items()
            if site == name or site.startswith((f"{name}.input", f"{name}.shared"))
        ]
        bar = Text("█" * max(1, round(16 * _noise(error.sqnr_db) / most)) if most else "", style=_colour(error.sqnr_db))
        activation = ", ".join(dict.fromkeys(own)) or "-"
        cells = name, dtypes.get(f"{name}.weight", "-"), activation, f"{error.error:.3g}", decibel(error.sqnr_db)
        table.add_row(*map(Text, cells), bar)
    return table


def _noise(sqnr_db: float) -> float:
    """Amplitude of the noise relative to the signal; silence counts as all noise."""
    return float(10 ** (-max(sqnr_db, 0.0) / 20))


def _colour(sqnr_db: float) -> str:
    return "red" if sqnr_db < 15 else "yellow" if sqnr_db < 25 else "green"


def _title(formats: str, sync: bool, output_sqnr: float, references: dict[str, str]) -> str:
    how = "all layers quantized together" if sync else "each layer quantized alone"
    output, layers = (f" against {r}" if set(references.values()) != {_FLOAT} else "" for r in references.values())
    return f"{formats}: output SQNR {decibel(output_sqnr)}{output}; below, {how}{layers and ','}{layers}"


def _rest(found: list[LayerError], shown: list[LayerError]) -> list[str]:
    left = len(found) - len(shown)
    return [f"... and {left} better ones (--top 0 shows all)"] if left else []
