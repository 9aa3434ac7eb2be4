"""`--test-data`, `--test-samples`, `--metric`: the data on which a verb scores its models, and how."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sparsebit.cli.inputs.accuracy import Accuracy, NoScores, Predictor, Scores, measure
from sparsebit.cli.inputs.data import Data, Inputs, fitting, load_data
from sparsebit.cli.inputs.loading import LoadingError, resolve, users_code
from sparsebit.cli.option_groups import NUM_TEST_SAMPLES, DataOptions, ScoreOptions
from sparsebit.cli.options import refuse
from sparsebit.quantization.inspecting.accuracy_gains import score_of

CALIBRATION = "These are the calibration samples; --test-data SOURCE measures on others."

log = logging.getLogger(__name__)


def load_test(
    scored: ScoreOptions, model: nn.Module, source: nn.Module | int, inputs: Inputs, data: str | None, how: DataOptions
) -> Test | None:
    """The test; None if there is nothing to measure. A requested test runs on one batch before the long work.

    `source`: the model for whose inputs batches are split, or the number of inputs. `data`: used if no --test-data is
    given and it has labels.
    """
    if scored.metric is not None and ":" in scored.metric:
        return Test(scored, None, source)
    named, is_known = scored.test_data or data, scored.metric in (None, "accuracy", "agreement")
    refuse(
        {
            f"{scored.metric!r}: write accuracy, agreement or MODULE:FUNCTION": not is_known,
            f"{scored.metric} is measured on data; give --test-data": scored.metric is not None and named is None,
        },
        "--metric",
    )
    is_given = scored.test_data is not None
    refuse({"needs --test-data": scored.test_samples is not None and not is_given}, "--test-samples")
    if named is None:
        return None
    is_implied, labelled, wanted = not is_given and scored.metric is None, scored.is_labelled, how
    if is_given:
        wanted = replace(fitting(how, named, data), num_samples=scored.test_samples or NUM_TEST_SAMPLES)
    try:
        found = load_data(named, wanted, inputs, labelled=labelled)
    except LoadingError:
        if is_implied:
            return None
        raise
    if not is_implied:
        measure({"model": (model, "cpu")}, itertools.islice(found, 1), source, data=found, labelled=labelled)
    return Test(scored, found, source, is_implied)


@dataclass(frozen=True)
class Test:
    """A metric with its data; None: the metric has its own data. `is_implied`: not requested by an option."""

    options: ScoreOptions
    data: Data | None
    source: nn.Module | int
    is_implied: bool = False

    __test__ = False  # not a test class of pytest

    def run(self, models: Mapping[str, tuple[Predictor, str]], *, calibrated: bool = False) -> Accuracy | Scores | None:
        """Every model, called with tensors on its device. `calibrated`: --data holds the calibration samples.

        None if accuracy was not requested and the data has no labels, or labels that do not fit.
        """
        if self.data is None:
            name = str(self.options.metric)
            function: Any = resolve(name, "--metric")
            with users_code(f"--metric {name} failed", theirs_alone=False):
                found = {key: score_of(function, model, f"--metric {name}") for key, (model, _) in models.items()}
            return Scores(found, name)
        note = CALIBRATION if calibrated and self.options.test_data is None else ""
        try:
            how: dict[str, Any] = {"data": self.data, "note": note, "labelled": self.options.is_labelled}
            return measure(models, self.data.tracked("accuracy"), self.source, **how)
        except NoScores as error:
            if not self.is_implied:
                raise
            if error.has_labels:
                log.info("no accuracy: %s", error)
            return None
