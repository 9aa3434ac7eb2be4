"""`register_algorithm`: makes a function an entry of `ALGORITHMS` in configs. `apply_algorithms`: runs a config's."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import Field, create_model

from sparsebit.config.config_errors import all_faults
from sparsebit.config.options import check_options
from sparsebit.config.section import Section
from sparsebit.errors import ConfigError
from sparsebit.execution.batches import require_repeatable
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.graph.values.inference_mode import ordinary_tensors
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.records.phases import phase
from sparsebit.registry import ALGORITHMS

log = logging.getLogger(__name__)

AlgorithmFunction = TypeVar("AlgorithmFunction", bound=Callable[..., Any])

# Keywords about how an algorithm runs, not about what it computes: they are set in a call, not in a config.
_RUN_KEYWORDS = ("memory_budget", "resume")


def register_algorithm(
    name: str, *, aliases: tuple[str, ...] = (), replace: bool = False, options: type[Section] | None = None
) -> Callable[[AlgorithmFunction], AlgorithmFunction]:
    """Register a function `(qmodel, data, *, ...)` that improves a calibrated model, as an entry of `ALGORITHMS`.

    Its keyword-only arguments with a default are the options, in upper case: `ALGORITHMS: [{mine: {STEPS: 20}}]` calls
    `mine(qmodel, data, steps=20)`. `memory_budget` and `resume` are not options; they are passed where the function
    takes them. Types and bounds (`steps: Annotated[int, Field(ge=1)] = 20`) are checked in configs and in calls.
    `options`: a `Section` that replaces the one made from the keywords.

    >>> @register_algorithm("halve")
    ... def halve(qmodel, data, *, layers: int = 1):
    ...     "Halve the weights. `layers`: of how many layers."
    >>> ALGORITHMS.options_of("halve")[1]().LAYERS
    1
    """

    def decorate(function: AlgorithmFunction) -> AlgorithmFunction:
        section = options_of_keywords(name, function) if options is None else options
        check_options(section, "algorithm", name)

        @functools.wraps(function)
        def noted(qmodel: QuantModel, *args: Any, **kwargs: Any) -> Any:
            _check_call(function, section, kwargs)
            with phase(name.lower()), ordinary_tensors():
                result = function(qmodel, *args, **kwargs)
            qmodel.applied_algorithms = (*qmodel.applied_algorithms, name.lower())
            return result

        ALGORITHMS.register(name, aliases=aliases, replace=replace, options=section)(noted)
        return noted  # type: ignore[return-value]

    return decorate


def apply_algorithms(
    qmodel: QuantModel,
    data: Iterable[Any],
    *,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> list[tuple[str, Any]]:
    """Run the `ALGORITHMS` of the config on a calibrated model, in place; returns each one's name and result.

    `data`: batches as for calibration. Every algorithm reads them from the start, so it must be a list or a DataLoader,
    not an iterator. `memory_budget`: bytes of activations in memory. `resume`: a folder that keeps finished work; a
    run that was killed continues from there.

    >>> apply_algorithms(qmodel, batches)  # doctest: +SKIP
    [('gptq', {'conv1': LayerRounding(nearest=0.0113, rounded=0.0021), ...})]
    """
    if qmodel.config.ALGORITHMS:  # without any, a generator will do
        require_repeatable(data, f"ALGORITHMS ({', '.join(step.name for step in qmodel.config.ALGORITHMS)})")
    results = []
    for number, step in enumerate(qmodel.config.ALGORITHMS):
        log.info("%s", step.name)
        function: Any = ALGORITHMS.get(step.name)
        folder = None if resume is None else Path(resume) / f"{number}-{step.name}"
        of_the_run, taken = {"memory_budget": memory_budget, "resume": folder}, inspect.signature(function).parameters
        options = {key.lower(): value for key, value in step.options}
        options |= {key: value for key, value in of_the_run.items() if key in taken}  # short algorithms have no resume
        results.append((step.name, function(qmodel, data, **options)))
    return results


def options_of_keywords(name: str, function: Callable[..., Any]) -> type[Section]:
    """A section with a key for each keyword-only argument of the function; its docstring explains them."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints, texts = get_type_hints(function, include_extras=True), _explained(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for keyword in (p for p in keywords if p.name not in _RUN_KEYWORDS):
        if keyword.default is keyword.empty or keyword.name not in hints:
            raise ConfigError(f"algorithm {name!r}: the keyword {keyword.name!r} needs a type and a default")
        field = Field(keyword.default, description=texts.get(keyword.name))
        fields[keyword.name.upper()] = (hints[keyword.name], field)
    return create_model(f"{name.title()}Options", __base__=Section, __module__=function.__module__, **fields)


def _check_call(function: Callable[..., Any], options: type[Section], given: Mapping[str, Any]) -> None:
    """Raise for keywords of a call that the options do not allow; unknown ones are left to Python."""
    values = {key.upper(): value for key, value in given.items() if key.upper() in options.model_fields}
    if faults := all_faults(values, options):
        shown = (f"{'.'.join(fault.key).lower()}{fault.given}: {fault.reason}" for fault in faults)
        raise ConfigError(f"{function.__name__}(): {'; '.join(shown)}")


_MENTION = re.compile(r"(?:^|(?<=\s))`(\w+)`:\s")


def _explained(docstring: str) -> dict[str, str]:
    """By name, the text that follows "`name`: " in a docstring, up to the next name or paragraph."""
    parts = _MENTION.split(docstring)
    texts = (text.split("\n\n")[0] for text in parts[2::2])
    return {key: " ".join(text.split()) for key, text in zip(parts[1::2], texts, strict=True)}
