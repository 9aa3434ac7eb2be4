"""`sparsebit profile --gains N`: the accuracy that is regained when each of the worst layers is float."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer
from rich.table import Table
from torch import nn

from sparsebit.cli.inputs.accuracy import unknown_classes
from sparsebit.cli.inputs.data import Data, Inputs, load_data
from sparsebit.cli.inputs.first_batch import FirstBatch
from sparsebit.cli.inputs.loading import LoadingError, resolve, users_code
from sparsebit.cli.option_groups import NUM_TEST_SAMPLES, typed
from sparsebit.cli.outputs.output import decibel, table
from sparsebit.cli.verb_options import ProfileOptions
from sparsebit.quantization import QuantModel
from sparsebit.records import AccuracyGains


def load_gain_data(asked: ProfileOptions, model: nn.Module, first_batch: FirstBatch) -> Data | None:
    """The data, with labels if the metric needs them; None if no gains are measured."""
    scored = asked.scored
    if asked.gains is None:
        if given := typed(scored):
            raise typer.BadParameter(f"{', '.join(given)}: say for how many layers, as --gains 5")
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


def gains_title(gains: AccuracyGains, data: Data) -> str:
    where = f"; {data.description}" if gains.num_samples else ""
    return f"{gains.title}{where}. Below, one layer in float at a time:"


def gains_table(gains: AccuracyGains) -> Table:
    """A row per layer, the largest gain first, and one for all of them together."""
    rows = [[row.layer, f"{row.score:.4f}", f"{row.gain:+.4f}", decibel(row.sqnr_db)] for row in gains.layers]
    together = gains.together - gains.quantized_score
    last = [f"these {len(gains.layers)} together", f"{gains.together:.4f}", f"{together:+.4f}", ""]
    columns = ("in float", "score", "gain", "SQNR alone")
    return table(columns, [*rows, last], numbers=columns[1:])
