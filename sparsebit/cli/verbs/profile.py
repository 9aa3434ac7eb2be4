"""`sparsebit profile`: which layers have the largest quantization errors, as a table.

The errors of layers are relative to a reference, which must be named (`_own_reference`): the float model, or, after
algorithms such as GPTQ, the weights that they left. With `--gains`, the accuracy with each of the worst layers in float
is measured too.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import nn

from sparsebit.cli.inputs.accuracy import unknown_classes
from sparsebit.cli.inputs.calibrated_model import Subject, calibrated, formats, load_saved, load_subject, read_config
from sparsebit.cli.inputs.data import Data, Inputs, load_data
from sparsebit.cli.inputs.first_batch import FirstBatch
from sparsebit.cli.inputs.loading import LoadingError, resolve, users_code
from sparsebit.cli.option_groups import NUM_TEST_SAMPLES, typed
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.output import Output, decibel, table
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import NUM_ROWS, ProfileOptions
from sparsebit.quantization import QuantModel
from sparsebit.quantization.calibrating.model_state import switched
from sparsebit.quantization.recording import record as record_of
from sparsebit.records import AccuracyGains, Coverage, LayerError, OutputError

_FLOAT = "the float model"


def profile(asked: ProfileOptions, out: Output, recorded: Recording) -> None:
    """Calibrate or load, measure the error of every layer, and report."""
    net, quantized = asked.net, asked.quantized
    has_config = quantized is not None and (asked.config or asked.asym or asked.device)
    refuse({"a saved model has its config: leave --config, --asym and --device out": has_config}, "--quantized")
    qconfig = None
    if quantized is None:
        qconfig = read_config(asked.config or "onnxruntime", asked.device, model=net.model)
    subject = load_subject(net, asked.data, asked.how, saved=quantized)
    recorded.expect(subject.model, net.model)
    if qconfig is None:
        assert quantized is not None
        qmodel, first_batch, output_reference = _saved(quantized, subject, has_weights=net.weights is not None)
        recorded.expect_numbers(qmodel, net.model)
    else:
        out.remark(f"calibrating {net.model} ({formats(qconfig)}) on {subject.data.description}")
        qmodel, first_batch = calibrated(subject, qconfig, asym=asked.asym).qmodel, subject.first_batch
        output_reference = _FLOAT
    references = {"output": output_reference, "layers": _own_reference(qmodel)}
    sqnr = first_batch.sqnr_db(qmodel, qmodel.config.DEVICE)
    test = load_gain_data(asked, subject.model, first_batch)
    errors = qmodel.profile(subject.data, sync=asked.sync, histograms=bool(recorded))
    found_gains = None if test is None else measure_gains(asked, qmodel, test)
    if recorded:
        words, output = subject.data.description, OutputError(sqnr, first_batch.num_samples)
        errors = replace(errors, gains=found_gains, data=words)
        made = record_of(qmodel, output, errors, name=net.model, run=recorded.run, warnings=recorded.warnings)
        recorded.write(made.replace(calibration=made.calibration and replace(made.calibration, data=words)))
    found = list(errors.layers)
    wanted = asked.top if asked.top is not None else (0 if asked.said.json else NUM_ROWS)
    shown = found[:wanted] if wanted else found
    record = {
        "model": net.model,
        "backend": qmodel.config.BACKEND,
        "sync": asked.sync,
        "compared_with": references,
        "output_sqnr_db": sqnr,
        "num_layers": len(found),
        "layers": [as_record(error) for error in shown],
        **({} if found_gains is None else {"gains": asdict(found_gains)}),
        **recorded.values(),
    }
    title = _title(formats(qmodel.config), asked.sync, sqnr, references)
    rest = [f"... and {len(found) - len(shown)} better ones (--top 0 shows all)"] if len(shown) < len(found) else []
    gains: list[Any] = []
    if found_gains is not None and test is not None:
        where = f"; {test.description}" if found_gains.num_samples else ""
        gains = [f"{found_gains.title}{where}. Below, one layer in float at a time:", gains_table(found_gains)]
    out.result(record, title, error_table(shown, qmodel.coverage), *rest, *gains)
    if found_gains is None:
        out.next_steps("repeat with --gains 5 --test-data SOURCE   # the accuracy that the worst layers cost")


def _own_reference(qmodel: QuantModel) -> str:
    """Describes the model with its quantizers off."""
    if not qmodel.float_values_are_lost and not len(qmodel.float_parameters):
        return _FLOAT
    return f"the weights that {', '.join(qmodel.applied_algorithms) or 'algorithms'} left"


def _saved(folder: Path, subject: Subject, *, has_weights: bool) -> tuple[QuantModel, FirstBatch, str]:
    """A saved model, the first batch through its reference model, and that model's name.

    The reference is the saved model with its own weights unquantized: the weights of the given model do not matter. If
    algorithms changed them and the float model got its weights by name (`has_weights`), outputs are compared with that.
    """
    qmodel = load_saved(folder, subject.model)
    reference = _own_reference(qmodel)
    if reference != _FLOAT and has_weights:
        return qmodel, subject.first_batch, _FLOAT
    with switched(qmodel.quantizers(), to=False):
        first_batch = subject.first_batch.again(qmodel, qmodel.config.DEVICE)
    return qmodel, first_batch, reference


def as_record(error: LayerError) -> dict[str, object]:
    """The values of one layer for `--json`."""
    return {"layer": error.layer, "mse": error.error, "sqnr_db": error.sqnr_db}


def error_table(errors: list[LayerError], coverage: Coverage) -> Table:
    """A row per layer: its number formats, its errors, and a bar of its noise."""
    dtypes = {f"{layer.name}.{role}": dtype for layer in coverage.quantized for role, dtype in layer.sites.items()}
    most = max((_noise(error.sqnr_db) for error in errors), default=0.0)
    rows: list[list[str | Text]] = []
    for error in errors:
        name = error.layer
        # A layer quantizes its inputs; a site between layers (`conv.output`) has a separate row.
        ours = (f"{name}.input", f"{name}.shared")
        own = [dtype for site, dtype in dtypes.items() if site == name or site.startswith(ours)]
        bar = Text("█" * max(1, round(16 * _noise(error.sqnr_db) / most)) if most else "", style=_colour(error.sqnr_db))
        activation = ", ".join(dict.fromkeys(own)) or "-"
        cells = name, dtypes.get(f"{name}.weight", "-"), activation, f"{error.error:.3g}", decibel(error.sqnr_db)
        rows.append([*cells, bar])
    columns = ("layer", "weight", "activation", "MSE", "SQNR", "noise / signal")
    return table(columns, rows, numbers=("MSE", "SQNR"), narrow="noise / signal")


def _noise(sqnr_db: float) -> float:
    """Amplitude of the noise relative to the signal; silence counts as all noise."""
    return float(10 ** (-max(sqnr_db, 0.0) / 20))


def _colour(sqnr_db: float) -> str:
    return "red" if sqnr_db < 15 else "yellow" if sqnr_db < 25 else "green"


def _title(formats: str, sync: bool, output_sqnr: float, references: dict[str, str]) -> str:
    how = "all layers quantized together" if sync else "each layer quantized alone"
    output, layers = (f" against {r}" if set(references.values()) != {_FLOAT} else "" for r in references.values())
    return f"{formats}: output SQNR {decibel(output_sqnr)}{output}; below, {how}{layers and ','}{layers}"


# --- `--gains N`: the accuracy that comes back when each of the worst layers is float


def load_gain_data(asked: ProfileOptions, model: nn.Module, first_batch: FirstBatch) -> Data | None:
    """The data, with labels if the metric needs them; None if no gains are measured."""
    scored = asked.scored
    if asked.gains is None:
        given = ", ".join(typed(scored))
        refuse({f"{given}: say for how many layers, as --gains 5": given})
        return None
    wanted = replace(asked.how, num_samples=scored.test_samples or NUM_TEST_SAMPLES)
    named = scored.test_data or asked.data
    data = load_data(named, wanted, Inputs.of(model), labelled=scored.is_labelled)
    scores = first_batch.outputs[0].shape[1] if first_batch.outputs and first_batch.outputs[0].dim() > 1 else None
    if data.num_classes is not None and data.num_classes != scores:
        raise LoadingError(unknown_classes(named, data.num_classes, scores))
    return data


def measure_gains(asked: ProfileOptions, qmodel: QuantModel, data: Data) -> AccuracyGains:
    """The accuracy with each of the worst layers in float."""
    metric: Any = asked.scored.metric or "accuracy"
    if ":" in metric:
        function = resolve(metric, "--metric")

        def metric(model: Any) -> float:
            with users_code(f"--metric {asked.scored.metric} failed"):
                return float(function(model))

        metric.__name__ = str(asked.scored.metric)
    return qmodel.accuracy_gains(data, metric, num_layers=asked.gains or 0)


def gains_table(gains: AccuracyGains) -> Table:
    """A row per layer, the largest gain first, and one for all of them together."""
    rows = [[row.layer, f"{row.score:.4f}", f"{row.gain:+.4f}", decibel(row.sqnr_db)] for row in gains.layers]
    together = gains.together - gains.quantized_score
    last = [f"these {len(gains.layers)} together", f"{gains.together:.4f}", f"{together:+.4f}", ""]
    columns = ("in float", "score", "gain", "SQNR alone")
    return table(columns, [*rows, last], numbers=columns[1:])
