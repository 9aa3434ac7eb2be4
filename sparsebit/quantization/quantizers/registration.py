"""Quantizers by name: the `QUANTIZER.TYPE` of configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sparsebit.errors import BackendError, ConfigError
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.quantizers.base import Quantizer, Target
from sparsebit.registry import QUANTIZERS

QuantizerClass = TypeVar("QuantizerClass", bound=type[Quantizer])


def register_quantizer(
    name: str, *, aliases: tuple[str, ...] = (), replace: bool = False
) -> Callable[[QuantizerClass], QuantizerClass]:
    """File a `Quantizer` subclass under `name`, the `QUANTIZER.TYPE` of configs.

    >>> import torch
    >>> @register_quantizer("stochastic")
    ... class Stochastic(Quantizer):
    ...     def transform(self, x):
    ...         return x + (torch.rand_like(x) - 0.5) * self.scale if self.training else x
    """

    def file(kind: QuantizerClass) -> QuantizerClass:
        if not (isinstance(kind, type) and issubclass(kind, Quantizer)):
            raise ConfigError(f"quantizer {name!r}: {kind!r} is no subclass of Quantizer")
        kind.TYPE = name.lower()
        QUANTIZERS.register(name, aliases=aliases, replace=replace)(kind)
        return kind

    return file


def build_quantizer(kind: str, spec: TensorSpec, target: Target, **settings: Any) -> Quantizer:
    """The registered quantizer `kind` for one tensor; a kind that is not made for this target is refused."""
    quantizer_class = QUANTIZERS.get(kind)
    assert isinstance(quantizer_class, type) and issubclass(quantizer_class, Quantizer)
    if target not in quantizer_class.TARGETS:
        raise BackendError(
            f"{settings.get('name', '')}: quantizer {kind!r} is for {' and '.join(quantizer_class.TARGETS)} tensors, "
            f"not for a {target}; set another QUANTIZER.TYPE there"
        )
    return quantizer_class(spec, target, **settings)
