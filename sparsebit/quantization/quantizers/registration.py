"""Quantizers by name: the `QUANTIZER.TYPE` of configs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import Tensor

from sparsebit.config.options import check_options
from sparsebit.config.section import Section
from sparsebit.config.targets import Target, is_for, mismatch
from sparsebit.config.tensor_config import ActivationQuantizer, WeightQuantizer
from sparsebit.errors import BackendError, ConfigError
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.registry import QUANTIZERS, own_type

QuantizerClass = TypeVar("QuantizerClass", bound=type[Quantizer])


@overload
def register_quantizer(
    name: QuantizerClass, *, aliases: tuple[str, ...] = (), replace: bool = False, options: type[Section] | None = None
) -> QuantizerClass: ...
@overload
def register_quantizer(
    name: str, *, aliases: tuple[str, ...] = (), replace: bool = False, options: type[Section] | None = None
) -> Callable[[QuantizerClass], QuantizerClass]: ...
def register_quantizer(
    name: str | QuantizerClass, *, aliases: tuple[str, ...] = (), replace: bool = False, options: Any = None
) -> Any:
    """Register a `Quantizer` subclass under `name`, the `QUANTIZER.TYPE` of configs.

    Without a name (`@register_quantizer`) it is registered under the `TYPE` of the class. A method `_forward(x)` or
    `_forward(x, scale, zero_point)` is used as `fake_quantize`.

    `options`: a `Section` whose keys configs may set as `QUANTIZER: {NAME: {...}}`; the quantizer has them as
    `self.options`. A quantizer that is registered without options inherits those of the registered class that it
    extends, under that class's name.

    >>> import torch
    >>> from pydantic import Field
    >>> class StochasticOptions(Section):
    ...     NOISE: float = Field(1.0, ge=0, description="Width of the noise, in steps.")
    >>> @register_quantizer("stochastic", options=StochasticOptions)
    ... class Stochastic(Quantizer):
    ...     options: StochasticOptions
    ...     def transform(self, x):
    ...         noise = self.options.NOISE * (torch.rand_like(x) - 0.5)
    ...         return x + noise * self.scale if self.training else x
    """
    if not isinstance(name, str):
        return register_quantizer(own_type(name), aliases=aliases, replace=replace, options=options)(name)

    def decorate(kind: QuantizerClass) -> QuantizerClass:
        if not _can_be_built(kind):
            shown = f"{kind.__name__}{inspect.signature(kind)}" if isinstance(kind, type) else repr(kind)
            raise ConfigError(
                f"quantizer {name!r}: {shown} cannot be built; write `def __init__(self, spec, target, **settings)` "
                "and pass all of them on, or set up in make_parameters(), in a subclass of Quantizer"
            )
        if "_forward" in vars(kind) and "fake_quantize" not in vars(kind):
            kind.fake_quantize = _as_fake_quantize(vars(kind)["_forward"])  # type: ignore[assignment, method-assign]
        if options is not None:
            check_options(options, "quantizer", name, WeightQuantizer, ActivationQuantizer)
        QUANTIZERS.register(name, aliases=aliases, replace=replace, options=options)(kind)
        kind.TYPE = name.lower()
        if options is not None:
            kind.OPTIONS = options
        return kind

    return decorate


def _can_be_built(kind: Any) -> bool:
    try:
        inspect.signature(kind).bind(None, None, name="")
    except TypeError:
        return False
    return isinstance(kind, type) and issubclass(kind, Quantizer)


def _as_fake_quantize(forward: Callable[..., Tensor]) -> Callable[[Quantizer, Tensor], Tensor]:
    takes_numbers = len(inspect.signature(forward).parameters) > 2

    def fake_quantize(self: Quantizer, x: Tensor) -> Tensor:
        return forward(self, x, *self.qparams()) if takes_numbers else forward(self, x)

    return fake_quantize


def build_quantizer(kind: str, spec: TensorSpec, target: Target, **settings: Any) -> Quantizer:
    """The registered quantizer `kind` for one tensor; a kind that is not made for this target raises an error."""
    quantizer_class = QUANTIZERS.get(kind)
    assert isinstance(quantizer_class, type) and issubclass(quantizer_class, Quantizer)
    if not is_for(quantizer_class, target):
        raise BackendError(
            f"{settings.get('name', '')}: quantizer {kind!r} {mismatch(quantizer_class, target)}; "
            "set another QUANTIZER.TYPE there"
        )
    return quantizer_class(spec, target, **settings)
