"""How one tensor is quantized: the keys under `W` and `A`, which `SPECIFIC` may also set for single layers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from sparsebit.backends import Granularity
from sparsebit.config.fields import Allowed, OneOf
from sparsebit.config.options import WithOptions
from sparsebit.config.section import Section
from sparsebit.registry import OBSERVERS, QUANTIZERS, Registry

Kind = Literal["W", "A"]

_SCHEMES = ("per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine")
_GROUP_SCHEMES = ("per-group-symmetric", "per-group-affine")

# 0 means "not given", so that the field is always an int; rules.py raises for 0 if the tensor is quantized.
Bits = Annotated[int, Field(ge=0, le=16), Allowed("a whole number, 1 to 16")]


_UNIFORM: Any = Field("uniform", description="The quantizer; `register_quantizer` adds more.")


class QuantizerConfig(WithOptions):
    registry: ClassVar[Registry[object]] = QUANTIZERS

    TYPE: Annotated[str, OneOf.registered(QUANTIZERS)] = _UNIFORM
    BIT: Bits = Field(0, description="Bits per number. Required, unless DISABLE is true.")
    DISABLE: bool = Field(False, description="Leave these tensors in float.")


class WeightQuantizer(QuantizerConfig):
    target: ClassVar[str] = "weight"

    TYPE: Annotated[str, OneOf.registered(QUANTIZERS, "weight")] = _UNIFORM
    GROUP_SIZE: int = Field(
        128, ge=1, description="How many consecutive weights share a scale, if QSCHEME is per-group."
    )


class ActivationQuantizer(QuantizerConfig):
    target: ClassVar[str] = "activation"

    TYPE: Annotated[str, OneOf.registered(QUANTIZERS, "activation")] = _UNIFORM


class ObserverConfig(WithOptions):
    registry: ClassVar[Registry[object]] = OBSERVERS

    TYPE: Annotated[str, OneOf.registered(OBSERVERS)] = Field(
        "minmax", description="How the range is chosen from the data seen; `register_observer` adds more."
    )


class WeightObserver(ObserverConfig):
    target: ClassVar[str] = "weight"


class ActivationObserver(ObserverConfig):
    target: ClassVar[str] = "activation"

    LAYOUT: Annotated[str, OneOf.fixed("NCHW", "NLC", canonical=str.upper)] = Field(
        "NCHW", description="Where the channels are, for per-channel activations: axis 1, or the last."
    )


class QAdd(Section):
    ENABLE_QUANT: bool = Field(False, description="Quantize the inputs of additions.")


class TensorConfig(Section):
    """How one tensor is quantized; returned by `QuantConfig.resolve`."""

    QSCHEME: str
    QUANTIZER: QuantizerConfig
    OBSERVER: ObserverConfig

    @property
    def granularity(self) -> Granularity:
        return cast("Granularity", self.QSCHEME.split("-")[1])

    @property
    def symmetric(self) -> bool:
        return self.QSCHEME.endswith("-symmetric")


class WeightConfig(TensorConfig):
    QSCHEME: Annotated[str, OneOf.fixed(*_SCHEMES, *_GROUP_SCHEMES)] = Field(
        "per-channel-symmetric",
        description="Which numbers share a scale, and whether zero is in the middle of the range.",
    )
    QUANTIZER: WeightQuantizer = Field(default_factory=WeightQuantizer, description="The number format.")
    OBSERVER: WeightObserver = Field(default_factory=WeightObserver, description="The choice of the range.")


class ActivationConfig(TensorConfig):
    QSCHEME: Annotated[str, OneOf.fixed(*_SCHEMES)] = Field(
        "per-tensor-affine",
        description="Which numbers share a scale, and whether zero is in the middle of the range. "
        "Where the backend has no affine activations (tensorrt) the default is per-tensor-symmetric.",
    )
    QUANTIZER: ActivationQuantizer = Field(default_factory=ActivationQuantizer, description="The number format.")
    OBSERVER: ActivationObserver = Field(default_factory=ActivationObserver, description="The choice of the range.")
    QADD: QAdd = Field(default_factory=QAdd, description="Additions.")
