"""What each runtime executes in integers, as data; read when the quantizers are placed, so that simulation and file are one arithmetic.

Op names are those of the op table. A profile is a default: a key that the user wrote wins, and `costs` says what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from collections.abc import Mapping


@dataclass(frozen=True)
class RuntimeProfile:
    """`inputs`: ops whose tensor inputs are quantized (None: every known op). `conv_fed`: those of them that are worth it only
    where a convolution feeds one of their inputs (residual adds of CNNs, not of transformers). `outputs`: ops whose result is
    quantized behind the activation that they absorb (`absorbs`). `folds_batchnorm`: BN folding unless the user says no."""

    name: str
    inputs: frozenset[str] | None
    conv_fed: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    absorbs: frozenset[str] = frozenset()
    folds_batchnorm: bool = False
    activation_scheme: str = "per-tensor-affine"
    weight_scheme: str = "per-channel-symmetric"
    costs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def recommended(self) -> dict[str, object]:
        """The config to start from when the user names only the backend."""
        return {
            "BACKEND": self.name,
            "SCHEDULE": {"FUSE_BN": True},
            "W": {"QSCHEME": self.weight_scheme, "QUANTIZER": {"BIT": 8}},
            "A": {"QSCHEME": self.activation_scheme, "QUANTIZER": {"BIT": 8}},
        }


_FLOAT_ADDS = "residual adds stay in float, and so does the convolution before each of them (ResNet-18: 8 of 20 convolutions in integers)"
_UNFUSED_NORM = "batch norms stay separate float ops, and no convolution in front of one can run in integers"
_BROKEN_CHAINS = "a quantizer between a convolution and its activation keeps the two from being fused"

PROFILES: dict[str, RuntimeProfile] = {
    profile.name: profile
    for profile in (
        RuntimeProfile("virtual", inputs=None),
        RuntimeProfile(
            "onnxruntime",
            inputs=frozenset({"conv", "linear", "add", "cat", "avg_pool", "adaptive_avg_pool", "max_pool", "embedding"}),
            conv_fed=frozenset({"add", "cat", "avg_pool", "adaptive_avg_pool", "max_pool"}),
            outputs=frozenset({"conv", "add"}),
            absorbs=frozenset({"relu", "relu6", "hardtanh"}),
            folds_batchnorm=True,
            costs=MappingProxyType(
                {
                    "A.QADD.ENABLE_QUANT=False": _FLOAT_ADDS,
                    "A.QADD.ENABLE_QUANT=True": "adds of transformers become integer ops with conversions around them: slower, and less exact",
                    "A.QSCHEME=per-tensor-symmetric": "int8 activations run slower than float on x86 (ResNet-18: 1.10 of float; uint8: 0.38)",
                    "W.QSCHEME=per-tensor-symmetric": "one scale per weight tensor is less exact and no faster than one per channel",
                    "W.QSCHEME=per-channel-affine": "weights with zero points do not run as integer convolutions",
                    "W.QSCHEME=per-tensor-affine": "one scale per weight tensor is less exact and no faster than one per channel",
                    "SCHEDULE.FUSE_BN=False": _UNFUSED_NORM,
                    "SCHEDULE.DISABLE_UNNECESSARY_QUANT=False": _BROKEN_CHAINS,
                }
            ),
        ),
        RuntimeProfile(
            "openvino",
            inputs=frozenset({"conv", "conv_transpose", "linear", "add", "cat", "avg_pool", "adaptive_avg_pool", "max_pool", "embedding"}),
            conv_fed=frozenset({"add", "cat", "avg_pool", "adaptive_avg_pool", "max_pool"}),
            outputs=frozenset({"conv", "add"}),
            absorbs=frozenset({"relu", "relu6", "hardtanh"}),
            folds_batchnorm=True,
            costs=MappingProxyType(
                {
                    "A.QADD.ENABLE_QUANT=False": _FLOAT_ADDS,
                    "SCHEDULE.FUSE_BN=False": _UNFUSED_NORM,
                    "SCHEDULE.DISABLE_UNNECESSARY_QUANT=False": _BROKEN_CHAINS,
                }
            ),
        ),
        RuntimeProfile(
            "tensorrt",
            inputs=frozenset({"conv", "conv_transpose", "linear", "add", "avg_pool", "adaptive_avg_pool", "max_pool", "embedding"}),
            conv_fed=frozenset({"add", "avg_pool", "adaptive_avg_pool", "max_pool"}),
            absorbs=frozenset({"relu", "relu6", "hardtanh", "sigmoid", "silu", "gelu", "tanh", "leaky_relu", "elu", "softplus", "hardsigmoid", "hardswish", "mish"}),
            folds_batchnorm=True,
            activation_scheme="per-tensor-symmetric",
            costs=MappingProxyType(
                {
                    "A.QADD.ENABLE_QUANT=False": "residual adds run in float between two int8 convolutions: two conversions each",
                    "SCHEDULE.FUSE_BN=False": _UNFUSED_NORM,
                    "SCHEDULE.DISABLE_UNNECESSARY_QUANT=False": _BROKEN_CHAINS,
                }
            ),
        ),
    )
}  # fmt: skip
