"""Import paths of the first Sparsebit (2022-2023): each name leads to its present place, or to an error that names it.

`FORMER` is the whole table: former module -> name -> value. A value "module:name" is the present place of the name;
"op:row" is a class for `isinstance`; any other text is the line of code that replaces the name. `add_former_modules`
creates the modules that no longer exist, and adds the lost names to those that do; homes call it at the end of their
`__init__`. Nothing is imported until a former name is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sparsebit.errors import ConfigError

Q, S = "sparsebit.quantization", "sparsebit.sparse"
_SPEC = "a number format is a TensorSpec: quantizer.spec, sparsebit.quantization.TensorSpec"
_FAKE_QUANT = "sparsebit.quantization.fake_quantize(x, scale, zero_point, spec)"
_PASSES = "QuantModel runs the built-in passes; write a pass of your own as a "
_PASSES += "ReplacePatternBase and give it to QuantModel(..., transforms=[...])"
_INPUTS = (
    "the graph keeps this op as a function whose inputs are quantized by QIdentity nodes; find them in qmodel.plan, "
)
_INPUTS += 'and keep one in float by A.SPECIFIC: [{"*add*": [QUANTIZER.DISABLE, true]}] (the name of your op)'
_PLAIN = "the graph keeps this op as it is, without a quantizer; qmodel.coverage lists it"
_OBSERVER = "observers are registered by name: sparsebit.quantization.Observer is the base, OBSERVER.TYPE chooses one"
_QUANTIZER = (
    "quantizers are registered by name: sparsebit.quantization.Quantizer is the base, QUANTIZER.TYPE chooses one"
)
_CONFIG = "a config is frozen: config = config.replace('W.QUANTIZER.BIT', 4)"
_DEFAULTS = "parse_qconfig and parse_sconfig fill in the defaults, and docs/reference/config.md lists them"
_TREE = "torch.utils._pytree.tree_map(lambda t: t.cpu(), x), or t.to(device), t.detach()"

# Former layer classes: today one class QuantOpr wraps the original op, which is its attribute `op`.
_OPS: dict[str, dict[str, str]] = {
    "activations": {
        "QReLU": "relu",
        "QReLU6": "relu6",
        "QLeakyReLU": "leaky_relu",
        "QSigmoid": "sigmoid",
        "QSiLU": "silu",
        "QGELU": "gelu",
        "QMish": "mish",
        "QHardSigmoid": "hardsigmoid",
        "QTanh": "tanh",
    },
    "conv": {"QConv2d": "conv", "QConvTranspose2d": "conv_transpose"},
    "embedding": {"QEmbedding": "embedding"},
    "linear": {"QLinear": "linear"},
    "normalization": {"QBatchNorm2d": "batch_norm", "QBatchNorm1d": "batch_norm", "QLayerNorm": "layer_norm"},
    "pool": {"MaxPool2d": "max_pool", "QAvgPool2d": "avg_pool", "QAdaptiveAvgPool2d": "adaptive_avg_pool"},
    "resize": {"QUpsample": "upsample", "QInterpolate": "upsample"},
    "unary": {"QSoftmax": "softmax"},
    "math": {"QMean": "mean"},
}
_OTHER_OPS: dict[str, dict[str, str]] = {
    "base": {
        "QuantOpr": f"{Q}.ops.quant_opr:QuantOpr",
        "MultipleInputsQuantOpr": f"{Q}.ops.quant_opr:MultipleInputsQuantOpr",
    },
    "math": dict.fromkeys(("QAdd", "QSubtract", "QMul", "QDivide"), _INPUTS) | {"QFloorDiv": _PLAIN},
    "matmul": {"MatMul": _INPUTS},
    "python_builtins": dict.fromkeys(("QGetAttr", "QGetItem", "QEqual"), _PLAIN),
    "shape": {
        **dict.fromkeys(("Flatten", "Size", "Reshape", "Expand", "Expand_as", "Transpose", "Permute", "Split"), _PLAIN),
        "Concat": _INPUTS,
    },
    "torchvision_ops": {"StochasticDepth": _PLAIN},
    "unary": {
        "QIdentity": f"{Q}.ops.quant_opr:QIdentity",
        **dict.fromkeys(("Dropout", "Clone", "Contiguous", "Detach", "Where"), _PLAIN),
    },
}


def _modules() -> dict[str, dict[str, str]]:
    """`sparsebit.quantization.modules` and the files in it; the package has the names of all of them."""
    files: dict[str, dict[str, str]] = {}
    for file, names in _OTHER_OPS.items():
        files.setdefault(file, {}).update(names)
    for file, ops in _OPS.items():
        files.setdefault(file, {}).update({name: f"op:{row}" for name, row in ops.items()})
    package = {name: today for names in files.values() for name, today in names.items()}
    package |= {
        "register_qmodule": f"{Q}.ops.registration:register_qmodule",
        "QMODULE_MAP": "sparsebit.graph.ops.op_table:QMODULE_MAP",
        "PASSTHROUGHT_MODULES": "rows of the kind TRANSPARENT in sparsebit/graph/ops/op_rows.py",
    }
    return {f"{Q}.modules": package} | {f"{Q}.modules.{file}": names for file, names in files.items()}


_PATTERNS = {
    "subgraph_matching": {"SubgraphMatcher": "sparsebit.graph.rewriting.patterns:SubgraphMatcher"},
    "subgraph_matching_node": {
        "MatchingNode": "sparsebit.graph.rewriting.patterns:MatchingNode",
        "InputMatchingType": "MatchingNode(..., unordered=True) accepts the inputs in any order",
    },
    "subgraph_matching_replace_pattern": {"ReplacePatternBase": "sparsebit.graph.rewriting.rewrite:ReplacePatternBase"},
    "subgraph_matching_utils": {
        **dict.fromkeys(
            ("ReplaceStrategyBase", "ReplaceStrategy"), "ReplacePatternBase(until_stable=True), or False for once"
        ),
        "recursive_getattr": "module.get_submodule(path)",
        **dict.fromkeys(
            ("get_operators_type", "get_operators"), "sparsebit.graph.rewriting.patterns.module_of(node, graph_module)"
        ),
        "SubgraphMatchingTimer": "qmodel's log says how long each phase took",
    },
    "bitpartite_graph_matching": {"Hungary": "scipy.optimize.linear_sum_assignment"},
    "disjoint_set_union": {"DSU": "scipy.cluster.hierarchy.DisjointSet"},
    "dominator_tree": {"DominatorTree": "networkx.immediate_dominators"},
}

FORMER: dict[str, dict[str, str]] = {
    f"{Q}.common": {
        "Granularity": f"{Q}:Granularity",
        "QuantTarget": "a quantizer's target is a word: 'weight' or 'activation' (quantizer.target)",
        **dict.fromkeys(("Backend", "get_backend"), "a backend is its name: config.BACKEND == 'onnxruntime'"),
        "get_qscheme": _SPEC,
    },
    f"{Q}.converters": {"simplify": _PASSES, "fuse_operations": _PASSES},
    f"{Q}.converters.fuse_operations": {"fuse_operations": _PASSES},
    f"{Q}.converters.fuse_operations.disable_unnecessary_quant": {"ReplacePatterns": _PASSES},
    f"{Q}.converters.fuse_operations.fuse_bn": {"ReplacePattern": "SCHEDULE.FUSE_BN: true"},
    f"{Q}.converters.fuse_operations.lists": {"lists": _PASSES},
    f"{Q}.converters.prune": {"PruneGraph": "sparsebit.graph.rewriting.rewrite.sweep(graph_module)"},
    f"{Q}.converters.simplifiers": {"simplify": _PASSES},
    **{
        f"{Q}.converters.simplifiers.{file}": {"ReplacePattern": _PASSES}
        for file in ("getattr_to_shape", "remove_identity", "unbind_getitem_to_subtensor")
    },
    f"{Q}.converters.simplifiers.lists": {"lists": _PASSES},
    f"{Q}.converters.utils": {name: today for names in _PATTERNS.values() for name, today in names.items()},
    **{f"{Q}.converters.utils.{file}": names for file, names in _PATTERNS.items()},
    **_modules(),
    f"{Q}.observers": {"OBSERVERS_MAP": "sparsebit.quantization.register_observer files one; a wrong name lists all"},
    f"{Q}.observers.base": {
        "Observer": f"{Q}.observers.observer:Observer",
        "DataCache": "no data is kept: an observer has a statistic (docs/guides/add-an-observer.md)",
    },
    **{
        f"{Q}.observers.{file}": {"Observer": _OBSERVER}
        for file in ("minmax", "moving_average", "percentile", "kl_histogram", "aciq", "mse")
    },
    f"{Q}.observers.utils": {"mse_loss": "torch.nn.functional.mse_loss"},
    f"{Q}.quant_config": {
        "_C": _DEFAULTS,
        **dict.fromkeys(("verify_bits", "verify_backend", "verify_schedule"), "parse_qconfig checks all of it"),
    },
    f"{Q}.quant_tracer": {"QTracer": "sparsebit.quantization.capture(model)"},
    f"{Q}.quantizers": {
        "QUANTIZERS_MAP": "sparsebit.quantization.register_quantizer files one; a wrong name lists all"
    },
    **{f"{Q}.quantizers.{file}": {"Quantizer": _QUANTIZER} for file in ("lsq_plus",)},
    f"{Q}.quantizers.quant_descriptor": {"QuantDescriptor": _SPEC},
    f"{Q}.quantizers.quant_tensor": {
        **dict.fromkeys(
            ("MySTE", "STE", "trt_fake_quant", "ort_fake_quant", "torch_fake_quant", "fake_quant_factory"), _FAKE_QUANT
        ),
        **dict.fromkeys(("trt_dqrange", "ort_dqrange", "fake_qrange_factory"), "quantizer.dequantized_range()"),
    },
    f"{Q}.tools": {},
    f"{Q}.tools.calibration": {
        "CalibrationRunner": "qmodel.prepare_calibration(), forward passes, qmodel.calc_qparams()"
    },
    f"{Q}.tools.errors_profiler": {
        "QuantizationErrorProfiler": "qmodel.get_quantization_error(data, checker=F.mse_loss, is_async=True)"
    },
    f"{Q}.tools.graph_wrapper": {
        "fx_symbolic_trace": "sparsebit.quantization.capture(model)",
        **dict.fromkeys(
            ("SharedData", "GraphVisitor"), "qmodel.visit_blocks(...) (docs/guides/add-a-block-algorithm.md)"
        ),
    },
    f"{Q}.tools.tensor_wrapper": dict.fromkeys(("to_cpu", "to_device", "to_detach"), _TREE),
    f"{Q}.utils": {"fx_symbolic_trace": "sparsebit.quantization.capture(model)"},
    f"{S}.modules": {
        "register_smodule": f"{S}.sparsers:register_smodule",
        "SMODULE_MAP": f"{S}.sparsers:SMODULE_MAP",
        "SparseOpr": f"{S}.sparsers:SparseOpr",
    },
    f"{S}.modules.base": {"SparseOpr": f"{S}.sparsers:SparseOpr"},
    f"{S}.modules.conv": {},
    f"{S}.modules.linear": {},
    f"{S}.modules.normalization": {},
    f"{S}.sparse_config": {"_C": _DEFAULTS},
    f"{S}.sparsers": {
        "SPARSERS_MAP": "sparsebit.sparse.register_sparser files one; a wrong name lists all",
        "build_sparser": "SparseModel(model, config) applies the registered sparser to each weight",
    },
    f"{S}.sparsers.base": {"Sparser": f"{S}.sparsers:Sparser"},
    f"{S}.sparsers.l1norm": {
        "Sparser": "SPARSER.STRATEGY: l1norm; a criterion of your own: sparsebit.sparse.register_criterion"
    },
    "sparsebit.utils": {"update_config": _CONFIG, "check_torch_version": "torch.__version__ >= '2.10'"},
    "sparsebit.utils.common": {"check_torch_version": "torch.__version__ >= '2.10'"},
    "sparsebit.utils.yaml_utils": {
        "update_config": _CONFIG,
        "_parse_config": "sparsebit.quantization.parse_qconfig(path)",
    },
}
_LAYERS = "smodel.model keeps your own layers; their masks are smodel.masks"
for _file, _name in (("conv", "SConv2d"), ("linear", "SLinear"), ("normalization", "SBatchNorm2d")):
    FORMER[f"{S}.modules.{_file}"] = {_name: _LAYERS}
    FORMER[f"{S}.modules"][_name] = _LAYERS
for _file in ("calibration", "errors_profiler", "graph_wrapper", "tensor_wrapper"):
    FORMER[f"{Q}.tools"] |= FORMER[f"{Q}.tools.{_file}"]


def add_former_modules(home: str) -> None:
    """Make the modules below `home` that only the first Sparsebit had; called at the end of a home's `__init__`."""
    for path in sorted(path for path in FORMER if f"{path}.".startswith(f"{home}.")):
        if path in sys.modules:  # still exists: it may have lost names
            vars(sys.modules[path]).setdefault("__getattr__", former_names(path))
            continue
        parent, _, name = path.rpartition(".")
        module = ModuleType(path, f"{path} of the first Sparsebit: its names lead to today's.")
        vars(module).update(__getattr__=former_names(path), __path__=[])
        sys.modules[path] = module
        setattr(sys.modules[parent], name, module)


def former_names(path: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: returns the present object, or raises an ImportError that names the replacement."""

    def attribute(name: str) -> Any:
        today = FORMER[path].get(name)
        if today is None:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        where, _, found = today.partition(":")
        if where == "op":
            doc = f"Layers that were {name} in the first Sparsebit, for isinstance. Today all of them are QuantOpr."
            return _FormerOp(name, (), {"row": found, "__doc__": doc, "__module__": f"{Q}.modules"})
        if found and " " not in today:
            return getattr(importlib.import_module(where), found)
        raise ImportError(f"{path}.{name} is of the first Sparsebit; today: {today} (docs/guides/migration.md)")

    return attribute


# Methods that users' classes overrode, and their replacements.
_OVERRIDDEN = {
    "build_quantizer": "the plan attaches the quantizers; choose their formats in the config (W, A, SPECIFIC)",
    "prepare_input_quantizer": "the plan puts QIdentity in front of each input; name the inputs: "
    "register_qmodule(sources=[...], inputs=('input', 'other'))",
    "make_nodes": "write them as a class attribute: nodes = (MatchingNode(...), ...)",
    "make_joint_checkers": "write them as a class attribute: joint_checkers = (check, ...), each called with "
    "(match, graph_module)",
    "make_matching_strategy": "MyPattern(until_stable=True).apply(graph_module), or until_stable=False for once",
    "get_new_graph": "replace(self, match, graph_module) -> {name of a matched node: the node that takes its place}",
}


def refuse_former_methods(kind: type, *methods: str) -> None:
    """Raise if a user's class overrides a method that the first Sparsebit called and nothing calls now."""
    if found := [name for name in methods if name in vars(kind)]:
        raise ConfigError(f"{kind.__name__}.{found[0]} is of the first Sparsebit; today: {_OVERRIDDEN[found[0]]}")


def former_method(name: str) -> Callable[..., Any]:
    """A method that raises an error with the line that replaces it."""

    def method(self: object, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"{type(self).__name__}.{name} is of the first Sparsebit; today: {_OVERRIDDEN[name]}")

    return method


class _FormerOp(type):
    """`isinstance(layer, QUpsample)`: whether the layer is a QuantOpr around such an op."""

    def __instancecheck__(cls, layer: object) -> bool:
        kind = importlib.import_module(f"{Q}.ops.quant_opr").QuantOpr
        return issubclass(type(layer), kind) and _is_former_op(layer, cls.__name__, vars(cls)["row"])


def _is_former_op(layer: Any, name: str, row: str) -> bool:
    op, table = layer.op, importlib.import_module("sparsebit.graph.ops.op_table")
    found = table.row_of_module(op) if hasattr(op, "forward") else table.QMODULE_MAP.get(op)
    is_sized = name[-2:] in ("1d", "2d") and hasattr(op, "forward")
    return found is not None and found.name == row and (not is_sized or name[-2:] in type(op).__name__)
