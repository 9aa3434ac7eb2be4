"""The ops that each runtime executes in integers, as data for the placement of quantizers: simulation and file agree.

Op names are those of the op table. A profile is a default: a key that the user wrote wins, and `costs` describes the
consequence. The figures are int8 against float32 time on one x86 core with VNNI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsebit.backends import Format


@dataclass(frozen=True)
class RuntimeProfile:
    """The ops that a runtime executes in integers, and how its files are written.

    `inputs`: ops whose tensor inputs are quantized (None: every known op). `conv_fed`: those of them that only pay off
    if a convolution feeds one of their inputs (residual adds of CNNs, not of transformers). `outputs`: ops
    whose result is quantized, after the activation that they absorb (`absorbs`). `gates`: activations `x * sigmoid(x)`
    or `x * hardsigmoid(x)` that run as two integer ops, with the sigmoid quantized in between. `folds_batchnorm`:
    the default, which the user may change. `bias`: added in integers, on the grid of the accumulator, or in float.
    `weight_widths`: the integer types, by bits, in which its files store weights. `narrow_weights`: int8 weights never
    use the code -128 (ONNX Runtime's depthwise kernel for Arm adds two products in 16 bits, and two of -128 * -128
    overflow). `apart`: formats of weights whose layers may not read quantized activations (ONNX Runtime fuses them into
    integer kernels that then reject the weight). `opset`: that of a file, unless the user or a type requires another.
    `ending`: that of a file: programs of `torch.export` are written for runtimes whose files are not `.onnx`.
    `executes`: the runtime here that runs the file as it will run in production; None: there is none, and the file's
    nodes are executed one by one as defined. `simulated`: that runtime simulates the device: its time does not count.
    `open_sizes`: its files may have free dimensions. `costs`: `KEY=value` -> the consequence of setting it so.
    """

    name: str
    inputs: frozenset[str] | None
    conv_fed: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    absorbs: frozenset[str] = frozenset()
    gates: frozenset[str] = frozenset()
    folds_batchnorm: bool = False
    activation_scheme: str = "per-tensor-affine"
    weight_scheme: str = "per-channel-symmetric"
    bias: Literal["int32", "float"] = "float"
    weight_widths: frozenset[int] = frozenset({4, 8, 16})
    narrow_weights: bool = False
    apart: frozenset[Format] = frozenset()
    opset: int = 21
    ending: str = ".onnx"
    executes: Literal["onnxruntime", "openvino", "executorch", "aot_inductor", "qnn", "litert"] | None = None
    simulated: bool = False
    open_sizes: bool = True
    costs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def timed_in(self) -> str | None:
        """The runtime here whose time counts; None: there is none."""
        return None if self.simulated else self.executes

    def recommended(self) -> dict[str, Any]:
        """The config to start from when the user names only the backend."""
        return {
            "BACKEND": self.name,
            "SCHEDULE": {"FUSE_BN": True},
            "W": {"QSCHEME": self.weight_scheme, "QUANTIZER": {"BIT": 8}},
            "A": {"QSCHEME": self.activation_scheme, "QUANTIZER": {"BIT": 8}},
        }


_LINEARS = frozenset({"linear", "addmm", "embedding"})
_POOLS = frozenset({"avg_pool", "adaptive_avg_pool", "max_pool"})
_RELUS = frozenset({"relu", "relu6", "hardtanh"})
_GATES = frozenset({"silu", "hardswish"})
_SMOOTH = frozenset(
    {"sigmoid", "silu", "gelu", "tanh", "leaky_relu", "elu", "softplus", "hardsigmoid", "hardswish", "mish"}
)

# What the integer kernels of ExecuTorch, LiteRT and Core ML have in common: layers, and the cheap ops between them.
_PROGRAM_LAYERS = frozenset({"linear", "addmm", "conv", "conv_transpose"})
_PROGRAM_LIGHT = frozenset({"add", "mul", "max_pool", "adaptive_avg_pool"})
# The ops that Hexagon's tensor processor (HTP) computes in integers from a quantize op to the next.
_HTP = (
    _LINEARS
    | _POOLS
    | _RELUS
    | (_SMOOTH - {"mish"})
    | {"conv", "conv_transpose", "add", "sub", "mul", "cat", "stack", "mean", "matmul", "bmm"}
    | {"adaptive_max_pool", "upsample", "prelu", "softmax", "log_softmax", "layer_norm", "instance_norm"}
)

_FLOAT_ADDS = (
    "residual adds run in float between integer convolutions, with conversions around each "
    "(ResNet-18: 22 conversions instead of 1; all 20 convolutions stay in integers)"
)
_TRANSFORMER_ADDS = "adds of transformers become integer ops with conversions around them: slower, and less exact"
_SCHEDULE_COSTS = {
    "SCHEDULE.FUSE_BN=False": "batch norms stay separate float ops, and no convolution before one can run in integers",
    "SCHEDULE.DISABLE_UNNECESSARY_QUANT=False": (
        "a quantizer between a convolution and its activation keeps the two from being fused"
    ),
}
_CONVERTED_COSTS = {
    "A.QADD.ENABLE_QUANT=False": "residual adds run in float between two int8 convolutions: two conversions each",
    "A.QADD.ENABLE_QUANT=True": _TRANSFORMER_ADDS,
    **_SCHEDULE_COSTS,
}
_COARSE_WEIGHTS = "one scale per weight tensor is less exact and no faster than one per channel"

PROFILES: dict[str, RuntimeProfile] = {
    profile.name: profile
    for profile in (
        RuntimeProfile("virtual", inputs=None, weight_widths=frozenset({2, 4, 8, 16})),
        RuntimeProfile(
            "onnxruntime",
            inputs=_LINEARS | _POOLS | _GATES | {"conv", "add", "mul", "cat"},
            conv_fed=_POOLS | _GATES | {"add", "mul", "cat"},
            outputs=_GATES | {"conv", "add", "mul", "avg_pool", "adaptive_avg_pool"},
            absorbs=_RELUS,
            gates=_GATES,
            folds_batchnorm=True,
            bias="int32",
            weight_widths=frozenset({2, 4, 8, 16}),
            narrow_weights=True,
            apart=frozenset({"float8"}),
            executes="onnxruntime",
            costs=MappingProxyType(
                {
                    "A.QADD.ENABLE_QUANT=False": _FLOAT_ADDS,
                    "A.QADD.ENABLE_QUANT=True": _TRANSFORMER_ADDS,
                    "A.QSCHEME=per-tensor-symmetric": (
                        "int8 activations run slower than float on x86 (ResNet-18: 1.10 of float; uint8: 0.38)"
                    ),
                    "W.QSCHEME=per-tensor-symmetric": _COARSE_WEIGHTS,
                    "W.QSCHEME=per-channel-affine": "weights with zero points do not run as integer convolutions",
                    "W.QSCHEME=per-tensor-affine": _COARSE_WEIGHTS,
                    **_SCHEDULE_COSTS,
                }
            ),
        ),
        RuntimeProfile(
            "openvino",
            inputs=_LINEARS | _POOLS | {"conv", "conv_transpose", "add", "cat"},
            conv_fed=_POOLS | {"add", "cat"},
            outputs=frozenset({"conv", "add"}),
            absorbs=_RELUS | _SMOOTH,
            folds_batchnorm=True,
            bias="int32",
            narrow_weights=True,
            executes="openvino",
            costs=MappingProxyType(_CONVERTED_COSTS),
        ),
        RuntimeProfile(
            "tensorrt",
            inputs=_LINEARS | _POOLS | {"conv", "conv_transpose", "add"},
            conv_fed=_POOLS | {"add"},
            absorbs=_RELUS | _SMOOTH,
            folds_batchnorm=True,
            activation_scheme="per-tensor-symmetric",
            weight_widths=frozenset({4, 8}),
            opset=20,  # int8 linears of a newer opset do not load in ONNX Runtime, where the file is checked
            costs=MappingProxyType(_CONVERTED_COSTS),
        ),
        RuntimeProfile(
            "qnn",
            inputs=_HTP,
            outputs=_HTP,
            absorbs=_RELUS,
            folds_batchnorm=True,
            bias="int32",
            weight_widths=frozenset({4, 8}),
            executes="qnn",
            simulated=True,
            open_sizes=False,
            costs=MappingProxyType(_SCHEDULE_COSTS),
        ),
        RuntimeProfile(
            "executorch",
            inputs=_PROGRAM_LAYERS | _PROGRAM_LIGHT | {"cat"},
            conv_fed=_PROGRAM_LIGHT | {"cat"},
            # XNNPACK's integer layers write integers: one whose result stays float would run in float.
            outputs=(_PROGRAM_LAYERS | _PROGRAM_LIGHT) - {"max_pool"},
            absorbs=_RELUS,
            folds_batchnorm=True,
            bias="int32",
            weight_widths=frozenset({8}),
            narrow_weights=True,
            ending=".pte",
            executes="executorch",
            costs=MappingProxyType(_CONVERTED_COSTS),
        ),
        RuntimeProfile(
            "litert",
            # Without cat: its converter takes all inputs to be on one grid.
            inputs=_PROGRAM_LAYERS | _PROGRAM_LIGHT,
            conv_fed=_PROGRAM_LIGHT,
            outputs=(_PROGRAM_LAYERS | _PROGRAM_LIGHT) - {"max_pool"},
            absorbs=_RELUS,
            folds_batchnorm=True,
            bias="int32",
            weight_widths=frozenset({8}),
            narrow_weights=True,
            ending=".tflite",
            executes="litert",
            open_sizes=False,
            costs=MappingProxyType(_CONVERTED_COSTS),
        ),
        RuntimeProfile(
            "coreml",
            inputs=_PROGRAM_LAYERS | _PROGRAM_LIGHT | {"cat"},
            conv_fed=_PROGRAM_LIGHT | {"cat"},
            outputs=(_PROGRAM_LAYERS | _PROGRAM_LIGHT) - {"max_pool"},
            absorbs=_RELUS,
            folds_batchnorm=True,
            weight_widths=frozenset({8}),
            narrow_weights=True,
            ending=".mlpackage",
            open_sizes=False,
            costs=MappingProxyType(_CONVERTED_COSTS),
        ),
        RuntimeProfile(
            "aot_inductor",
            inputs=frozenset({"linear"}),
            folds_batchnorm=True,
            weight_widths=frozenset({8}),
            ending=".pt2",
            executes="aot_inductor",
            costs=MappingProxyType(
                {"SCHEDULE.FUSE_BN=False": "batch norms stay separate float ops"},
            ),
        ),
    )
}


def owner_of(path: Path) -> str | None:
    """The backend whose programs end like this file; None for an ONNX file, or an ending that none has."""
    name = path.name.lower()
    return next((key for key, one in PROFILES.items() if one.ending != ".onnx" and name.endswith(one.ending)), None)
