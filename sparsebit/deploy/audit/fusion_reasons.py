"""Why a layer runs in float and what to do about it: a table of patterns around the layer, in order of priority.

`ROWS` is the table; the first row that applies is the reason, so a general row must come after the special ones. The
patterns are those of ONNX Runtime's QDQ selectors (`qdq_selectors.cc`) and of OpenVINO's low-precision passes; the
tests trigger every row of ONNX Runtime with a real file in the real runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsebit.deploy.onnx_graph.fusion_site import FusionSite, label
from sparsebit.deploy.onnx_graph.qdq_graph import MOVES, QUANTIZE, Quantization
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions.cpu import is_arm

_ORT, _OPENVINO, _QNN = "onnxruntime", "openvino", "qnn"
_BYTES = frozenset({"int8", "uint8"})

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "attention"})  # of the op table

# Ops of the file for which the runtimes have kernels on quantized numbers.
INTEGER_KERNELS = {
    _ORT: frozenset(
        {"Conv", "Gemm", "MatMul", "Add", "Mul", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize"}
    ),
    _OPENVINO: frozenset(
        {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sum", "Mul", "Concat", "MaxPool", "AveragePool",
         "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "Resize", "LSTM", "GRU"}
    ),
    _QNN: frozenset(
        {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "Concat", "MaxPool", "AveragePool",
         "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "Resize", "Softmax", "LogSoftmax", "Sigmoid", "Tanh",
         "Gelu", "HardSwish", "HardSigmoid", "Elu", "Softplus", "LeakyRelu", "PRelu", "LayerNormalization",
         "InstanceNormalization", "Gather"}
    ),
}  # fmt: skip

_BACKEND = "BACKEND: {runtime} quantizes what this runtime needs"
_LEAVE_OUT = (
    "leave it in float, which saves the conversions around it (A.SPECIFIC: [{name: [QUANTIZER.DISABLE, true]}])"
)
_NO_KERNEL = {
    "ReduceMean": "pool with GlobalAveragePool or AveragePool, which have integer kernels",
    "ConvTranspose": f"upsample with Resize and Conv, or run it in OpenVINO; else {_LEAVE_OUT}",
}


@dataclass(frozen=True)
class Reason:
    """`cause` groups layers and completes "because …"; `detail` is about this one; `remedy` says what to do.

    `on_purpose`: the layer is float by design or by the config.
    """

    cause: str
    remedy: str
    detail: str = ""
    on_purpose: bool = False


@dataclass(frozen=True)
class Row:
    """`applies`: whether the row holds; a returned text adds a detail."""

    cause: str
    remedy: str
    applies: Callable[[FusionSite], str | bool]
    runtimes: tuple[str, ...] = (_ORT, _OPENVINO, _QNN)
    on_purpose: bool = False


def reason_for(site: FusionSite, runtime: str) -> Reason:
    """The first row that holds for a layer that `runtime` executes in float."""
    has_kernel = site.op in INTEGER_KERNELS[runtime]
    for row in ROWS:
        if runtime not in row.runtimes or not (has_kernel or row.on_purpose):
            continue
        if found := row.applies(site):
            remedy = row.remedy
            if site.graph.backend == runtime:  # it was exported for this runtime: do not advise that
                for words in (f"; {_BACKEND}", f"{_BACKEND}; ", ", or BACKEND: {runtime}"):
                    remedy = remedy.replace(words, "")
            return Reason(
                row.cause, remedy.format(runtime=runtime), found if isinstance(found, str) else "", row.on_purpose
            )
    if not has_kernel:
        remedy = _NO_KERNEL.get(site.op, _LEAVE_OUT) if any(site.quantizations) else ""
        return Reason(f"{runtime} has no integer kernel for {site.op}", remedy)
    compare = "compare its surroundings with those of a fused layer"
    return Reason("the runtime left it in float for an unknown reason", compare)


def _product_by_design(site: FusionSite) -> bool:
    is_product = site.op in ("MatMul", "Einsum", "Attention") and not site.has_weight
    return is_product and site.profile is not None and not _PRODUCTS.intersection(site.profile.inputs or ())


def _add_by_design(site: FusionSite) -> bool:
    """Whether the add is float by design: profiles only quantize adds that a convolution feeds."""
    makers = [site.graph.producer.get(name) for name in site.operands]
    is_fed = any(maker is not None and maker.op_type == "Conv" for maker in makers)
    return site.op == "Add" and site.profile is not None and not is_fed and not any(site.quantizations)


def _floats(site: FusionSite) -> list[str]:
    return [name for name, found in zip(site.operands, site.quantizations, strict=True) if found is None]


def _dequantized_weight(site: FusionSite) -> str:
    weight = site.weight
    if weight is None or not site.has_weight or site.data is not None or site.op not in ("MatMul", "Gemm"):
        return ""
    return f"{weight.dtype} weight" + (f" in blocks of {weight.block}" if weight.block else "")


def _float_input(site: FusionSite) -> str:
    if site.has_weight:
        return _floats(site)[0] if site.data is None else ""
    return ", ".join(_floats(site))


def _flattened(site: FusionSite) -> str:
    """Quantization is moved through Reshape, Transpose, Squeeze and Unsqueeze, but not through Flatten."""
    node = site.graph.producer.get(site.operands[0]) if site.data is not None else None
    while node is not None and node.op_type in MOVES:
        if node.op_type == "Flatten":
            return f"Flatten {label(node)}"
        node = site.graph.producer.get(node.input[0])
    return ""


def _float8(site: FusionSite) -> str:
    return site.weight.dtype if site.weight is not None and site.weight.dtype.startswith("float8") else ""


def _wide(found: Quantization | None) -> str:
    return found.dtype if found is not None and found.dtype not in _BYTES else ""


def _activation_scales(site: FusionSite) -> str:
    operands = [site.data] if site.has_weight else site.quantizations
    scales = [found for found in operands if found is not None and not found.per_tensor]
    return f"{scales[0].scale.size} scales" if scales else ""


def _bias_of_another_backend(site: FusionSite) -> bool:
    """Whether Sparsebit exported the file for a backend with float biases."""
    profile = PROFILES.get(site.graph.backend)
    return profile is not None and profile.bias == "float" and _float_bias(site)


def _float_bias(site: FusionSite) -> bool:
    if site.op not in ("Gemm", "MatMul") or not site.has_float_bias:
        return False
    behind = site.graph.behind(site.bias_add.output[0]) if site.bias_add is not None else site.readers
    return not any(node.op_type == QUANTIZE for node in behind)


def _several_quantizers(site: FusionSite) -> str:
    number = len(site.quantizers)
    return f"{number} QuantizeLinear nodes read it" if number > 1 and not site.float_readers else ""


def _also_float(site: FusionSite) -> str:
    readers = [label(node) for node in site.float_readers] + (["the model's output"] if site.is_model_output else [])
    return ", ".join(readers) if site.quantizers else ""


def _read_by(*ops: str) -> Callable[[FusionSite], str]:
    def applies(site: FusionSite) -> str:
        if site.quantizers or site.op == "MatMul":  # a product of integers may return floats
            return ""
        blocking = [node for node in site.float_readers if not ops or node.op_type in ops]
        return ", ".join(f"{node.op_type} {label(node)}" for node in blocking)

    return applies


def _unabsorbed(site: FusionSite) -> str:
    """Relu and Clip only disappear if the integers cannot leave their range anyway."""
    found = site.quantizers[0] if site.activation is not None and site.quantizers else None
    if found is None or not found.per_tensor or found.dtype not in _BYTES:
        return ""
    low, high = _limits(site)
    zero = 0 if found.zero_point is None else int(found.zero_point.ravel()[0])
    first, scale = (-128 if found.dtype == "int8" else 0) - zero, float(found.scale.ravel()[0])
    bottom, top = first * scale, (first + 255) * scale
    if bottom >= low - 1e-6 and top <= high + 1e-6 * abs(high):
        return ""
    words = f"{found.dtype} with zero point {zero} spans {bottom:.3g} to {top:.3g}"
    return f"{site.activation.op_type} {label(site.activation)}: {words}"


def _limits(site: FusionSite) -> tuple[float, float]:
    if site.activation.op_type == "Relu":
        return 0.0, float("inf")
    names = [*site.activation.input[1:], "", ""][:2]
    low, high = (site.graph.constant(name) if name else None for name in names)
    return (float("-inf") if low is None else float(low), float("inf") if high is None else float(high))


def _type_change(site: FusionSite) -> str:
    operands = [*site.quantizations[: 1 if site.has_weight else None], *site.quantizers[:1]]
    types = dict.fromkeys(found.dtype for found in operands if found)
    return " and ".join(types) if len(types) > 1 else ""


def _other_grid(site: FusionSite) -> bool:
    is_copied = site.op in ("MaxPool", "Resize") and site.data is not None and bool(site.quantizers)
    return is_copied and site.data is not None and not site.data.same_grid(site.quantizers[0])


_SMOOTH = (
    "Sigmoid", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Elu", "Celu", "Selu", "Gelu", "Erf", "Tanh",
    "Softplus", "Mish", "Swish", "Mul",
)  # fmt: skip
_QUANTIZE_ADDS = "quantize the residual adds (A.QADD.ENABLE_QUANT: true, or BACKEND: {runtime})"
_NBITS = "store it as [K, N] with blocks of 16, 32, 64 … along K before a MatMul, for MatMulNBits"
_CONVERSIONS_COST = "the conversions around it would cost more than integers save"
_WEIGHTS_ONLY = "or weights only (A.QUANTIZER.DISABLE: true)"

ROWS: tuple[Row, ...] = (
    Row("it was switched off by the config", "remove the key from the config, if it should run in integers",
        lambda site: site.switched_off, on_purpose=True),
    Row("the file keeps it in float, as it was simulated", "remove QUANTIZER.DISABLE from the config, if it is there",
        lambda site: not site.heavy and site.op != "Add" and site.is_meant_float, on_purpose=True),
    Row("products of two activations stay in float by design", f"nothing: {_CONVERSIONS_COST}", _product_by_design,
        on_purpose=True),
    Row("adds that no convolution feeds stay in float by design", f"nothing: {_CONVERSIONS_COST}", _add_by_design,
        on_purpose=True),
    Row("it adds tensors in float", _QUANTIZE_ADDS,
        lambda site: site.op in ("Add", "Sum") and ", ".join(_floats(site))),
    Row("it is not quantized", f"{_BACKEND}; A.SPECIFIC or W.SPECIFIC may have switched it off",
        lambda site: not any(site.quantizations)),
    Row("its fp8 weight is dequantized to float on every call",
        "W.QUANTIZER.TYPE: uniform for integers; to keep fp8 for its size, open the session with "
        "session.disable_quant_qdq=1, which dequantizes once", _float8, (_ORT,)),
    Row("its weight is fp8, which is computed in float", "W.QUANTIZER.TYPE: uniform for integers",
        _float8, (_OPENVINO,)),
    Row("its stored weight is dequantized to float on every call",
        f"{_NBITS}; or quantize the activations too (A.QUANTIZER.BIT: 8)", _dequantized_weight, (_ORT, _OPENVINO)),
    Row("an input of it is in float", f"quantize that input: A.QUANTIZER.DISABLE: false; {_BACKEND}", _float_input),
    Row("its weight is in float", "quantize it: W.QUANTIZER.DISABLE: false",
        lambda site: site.has_float_weight),
    Row("its activations are not of 8 bits", "A.QUANTIZER.BIT: 8", lambda site: _wide(site.data), (_ORT, _OPENVINO)),
    Row("a Flatten is between its quantized input and it", "quantize after it, or write it as a Reshape",
        _flattened, (_ORT,)),
    Row("its scales are computed at run time", "calibrate the activations: constant scales",
        lambda site: any(found is not None and found.scale is None for found in site.quantizations)),
    Row("its activations have a scale per channel", "A.QSCHEME: per-tensor-affine", _activation_scales),
    Row("its weights are not of 8 bits", f"W.QUANTIZER.BIT: 8, {_WEIGHTS_ONLY}",
        lambda site: _wide(site.weight), (_ORT, _OPENVINO)),
    Row("its weights have scales in blocks", f"W.QSCHEME: per-channel-symmetric, {_WEIGHTS_ONLY}",
        lambda site: f"blocks of {site.weight.block}" if site.weight is not None and site.weight.block else ""),
    Row("its activations are int8 and its weights uint8", "W.QSCHEME: per-channel-symmetric, for int8 weights",
        lambda site: [q and q.dtype for q in (site.data, site.weight)] == ["int8", "uint8"], (_ORT,)),
    Row("its bias is computed while the model runs", "add it after the layer, or make it a constant",
        lambda site: site.has_computed_bias, (_ORT,)),
    Row("its bias is in float", "export with BACKEND: {runtime}, whose biases are int32", _bias_of_another_backend,
        (_ORT,)),
    Row("its bias is in float", "store it as int32 with the scale of the input times the weight's, as export_onnx does",
        _float_bias, (_ORT,)),
    Row("a batch norm follows it", "SCHEDULE.FUSE_BN: true", _read_by("BatchNormalization"), (_ORT,)),
    Row("its output is read by a float add", _QUANTIZE_ADDS, _read_by("Add", "Sum"), (_ORT,)),
    Row("its output runs into an activation that is computed in float",
        f"quantize its output before the activation, or take a ReLU, which is absorbed; {_BACKEND}",
        _read_by(*_SMOOTH), (_ORT,)),
    Row("its output is quantized for one reader and float for another",
        "quantize every reader of it, residual adds too (A.QADD.ENABLE_QUANT: true, or BACKEND: {runtime})",
        _also_float, (_ORT,)),
    Row("its output is quantized twice", "one quantizer for all readers of a value",
        _several_quantizers, (_ORT,)),
    Row("its activation is not absorbed, because the numbers after it are signed or reach further",
        "unsigned activations with the zero point at the bottom: A.QSCHEME: per-tensor-affine", _unabsorbed, (_ORT,)),
    Row("its input and output are of different integer types", "one A.QSCHEME for the whole model",
        _type_change, (_ORT,)),
    Row("its input and output have different scales", f"one quantizer before and after it; {_BACKEND}",
        _other_grid, (_ORT,)),
    Row("its output is read in float", f"quantize what reads it; {_BACKEND}", _read_by(), (_ORT,)),
    Row("its output is the model's output and stays float", "accept it for the last layer, or quantize its output too",
        lambda site: not site.quantizers and site.is_model_output and site.op not in ("MatMul", "Gemm"), (_ORT,)),
    Row("OpenVINO has few integer kernels on ARM", "run it in ONNX Runtime, or on x86",
        lambda site: is_arm() and site.op, (_OPENVINO,)),
)  # fmt: skip
