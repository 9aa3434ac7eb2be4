"""The runtimes that run a file, one small adapter each: a model in memory and its inputs in, arrays by name out."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import onnx

from sparsebit.deploy.sessions.runtime_sessions import EXACT, open_session

Arrays = Mapping[str, Any]
# A judge takes a model and its inputs, and returns the outputs.
Judge = Callable[[Any, Arrays], dict[str, Any]]


def available() -> dict[str, Judge]:
    """Those whose packages are installed, the fast ones first."""
    return {name: judge for name, (package, judge) in _JUDGES.items() if _is_installed(package)}


def with_outputs(model: Any, names: list[str], *, alone: bool = False) -> Any:
    """The model, with values inside it as further outputs, or `alone`."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    if alone:
        del copied.graph.output[:]
    known = {value.name for value in copied.graph.output}
    types = {value.name: value for value in copied.graph.value_info}
    for name in names:
        if name not in known:
            copied.graph.output.append(types.get(name) or onnx.helper.make_empty_tensor_value_info(name))
    return copied


def _onnxruntime(model: Any, feeds: Arrays, *, optimize: bool) -> dict[str, Any]:
    options = EXACT["onnxruntime"] if optimize else None
    session = open_session(model.SerializeToString(), num_threads=1, optimize=optimize, options=options)
    return dict(zip(session.outputs, session.run(feeds), strict=True))


def _openvino(model: Any, feeds: Arrays) -> dict[str, Any]:
    options = EXACT["openvino"]
    session = open_session(model.SerializeToString(), "openvino", num_threads=1, options=options)
    return dict(zip(session.outputs, session.run(feeds), strict=True))


def _reference(model: Any, feeds: Arrays) -> dict[str, Any]:
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        runner = ReferenceEvaluator(model)
        return dict(zip(runner.output_names, runner.run(None, dict(feeds)), strict=True))


def _tvm(model: Any, feeds: Arrays) -> dict[str, Any]:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = from_onnx(model, keep_params_in_input=False)
        machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
        found = machine["main"](*(tvm.runtime.tensor(numpy.ascontiguousarray(value)) for value in feeds.values()))
    values = [found] if hasattr(found, "numpy") else list(found)
    return {output.name: value.numpy() for output, value in zip(model.graph.output, values, strict=True)}


def _iree(model: Any, feeds: Arrays) -> dict[str, Any]:
    from iree import compiler, runtime
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    model = onnx.shape_inference.infer_shapes(model)
    info = onnx_importer.ModelInfo(model)
    module = info.create_module(context=ir.Context()).operation
    onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
    flags = ["--iree-llvmcpu-target-cpu=host"]
    code = compiler.compile_str(str(module), target_backends=["llvm-cpu"], input_type="onnx", extra_args=flags)
    context = runtime.SystemContext(config=runtime.Config("local-sync"))
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, code))
    found = context.modules.module[model.graph.name](*feeds.values())
    values = list(found) if isinstance(found, tuple | list) else [found]
    return {output.name: value.to_host() for output, value in zip(model.graph.output, values, strict=True)}


@functools.cache
def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


_JUDGES: dict[str, tuple[str, Judge]] = {
    "onnxruntime": ("onnxruntime", functools.partial(_onnxruntime, optimize=True)),
    "onnxruntime plain": ("onnxruntime", functools.partial(_onnxruntime, optimize=False)),
    "reference": ("onnx", _reference),
    "openvino": ("openvino", _openvino),
    "iree": ("iree.compiler", _iree),
    "tvm": ("tvm", _tvm),
}
FAST = ("onnxruntime", "onnxruntime plain", "reference", "openvino")
FUSING = ("onnxruntime", "openvino")  # whose fused kernels further outputs could change
