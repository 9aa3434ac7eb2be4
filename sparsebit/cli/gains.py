"""`sparsebit profile --gains N`: the accuracy that comes back when each of the worst layers is float."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli.option_groups import DataOptions
from sparsebit.cli.output import decibel

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from sparsebit.cli.data import Data
    from sparsebit.cli.first_batch import FirstBatch
    from sparsebit.quantization import QuantModel
    from sparsebit.records import AccuracyGains

_GAINS = "Accuracy"
_NUM_SAMPLES = 1000


@dataclass(frozen=True)
class GainOptions:
    """What is measured with layers in float; None: not said."""

    gains: Annotated[
        int | None,
        typer.Option(
            "--gains",
            metavar="N",
            min=1,
            help="Also measure what comes back when each of the N worst layers is float.",
            rich_help_panel=_GAINS,
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="accuracy|agreement|MODULE:FUNCTION",
            help="What is measured: accuracy (labels needed; the default), agreement with the float model (no labels), "
            "or a function that gets the model and gives a score.",
            rich_help_panel=_GAINS,
        ),
    ] = None
    test_data: Annotated[
        str | None,
        typer.Option(
            "--test-data",
            metavar="SOURCE",
            help="What it is measured on, read like --data, which is used where this is not given: an image folder "
            "with a folder for each class, a .npz file with labels, or MODULE:FACTORY of (inputs, labels).",
            rich_help_panel=_GAINS,
        ),
    ] = None
    test_samples: Annotated[
        int | None,
        typer.Option(
            "--test-samples",
            metavar="N",
            min=1,
            help=f"Samples of it, evenly spread ({_NUM_SAMPLES}).",
            rich_help_panel=_GAINS,
        ),
    ] = None

    def check(self) -> None:
        """Refuse options that would do nothing."""
        others = {"--metric": self.metric, "--test-data": self.test_data, "--test-samples": self.test_samples}
        if self.gains is None and (given := [name for name, value in others.items() if value is not None]):
            raise typer.BadParameter(f"{', '.join(given)}: say for how many layers, as --gains 5")

    def load(self, model: nn.Module, calibration: str, how: DataOptions, first_batch: FirstBatch) -> Data | None:
        """The data, with labels where they are needed; None where nothing is to be measured."""
        if self.gains is None:
            return None
        from sparsebit.cli.data import Inputs, load_data
        from sparsebit.cli.loading import LoadingError

        wanted = replace(how, num_samples=self.test_samples or _NUM_SAMPLES)
        data = load_data(
            self.test_data or calibration, wanted, Inputs.of(model), labelled=(self.metric or "accuracy") == "accuracy"
        )
        scores = first_batch.outputs[0].shape[1] if first_batch.outputs and first_batch.outputs[0].dim() > 1 else None
        if data.num_classes is not None and data.num_classes != scores:
            raise LoadingError(
                f"{self.test_data or calibration}: {data.num_classes} folders, and the model has scores of {scores} "
                "classes: which is which is not known; name the folders by the numbers of the classes, or give "
                "--metric agreement, which needs no labels"
            )
        return data

    def measure(self, qmodel: QuantModel, data: Data) -> AccuracyGains:
        from sparsebit.cli.loading import resolve, users_code

        metric: Any = self.metric or "accuracy"
        if ":" in metric:
            function = resolve(metric, "--metric")

            def metric(model: Any) -> float:
                with users_code(f"--metric {self.metric} failed"):
                    return float(function(model))

            metric.__name__ = str(self.metric)
        return qmodel.accuracy_gains(data, metric, num_layers=self.gains or 0)


def gains_record(gains: AccuracyGains) -> dict[str, Any]:
    """The values for `--json`."""
    return asdict(gains)


def gains_title(gains: AccuracyGains, data: Data) -> str:
    where = f"; {data.description}" if gains.num_samples else ""
    return f"{gains.title}{where}. Below, one layer in float at a time:"


def gains_table(gains: AccuracyGains) -> Table:
    """A row per layer, the largest gain first, and one for all of them together."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("in float", overflow="fold")
    for name in ("score", "gain", "SQNR alone"):
        table.add_column(name, justify="right")
    for row in gains.layers:
        table.add_row(Text(row.layer), f"{row.score:.4f}", f"{row.gain:+.4f}", decibel(row.sqnr_db))
    together = gains.together - gains.quantized_score
    table.add_row(f"these {len(gains.layers)} together", f"{gains.together:.4f}", f"{together:+.4f}", "")
    return table
