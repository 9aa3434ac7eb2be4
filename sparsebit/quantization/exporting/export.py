"""`export_onnx`: writes a calibrated model as an ONNX file of integers that computes the same as the simulation.

The steps: checks; quantizers are replaced by constants (`export_constants.py`); torch exports a graph in which each
quantizer is one node (`trace_onnx`); `lower_onnx` makes QuantizeLinear and DequantizeLinear of these and rearranges
the graph for the runtime's kernels (`deploy/layouts`); the file is written to a temporary path, checked
(`export_checks.py`), and only then takes its name.

The placement search uses `trace_onnx` and `lower_onnx` alone, to write many variants of one traced graph.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparsebit.backends import BACKENDS
from sparsebit.deploy.comparing.parity import Parity, Tolerance
from sparsebit.deploy.exporting.node_names import describe_sites, note_switched_off, tidy
from sparsebit.deploy.exporting.opset_downgrade import LOWEST_WRITTEN, to_older_opset
from sparsebit.deploy.exporting.qdq import ExportedSite, lower, required_opset
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, in_order, to_onnx
from sparsebit.deploy.layouts.channel_layout import lay_out_channels
from sparsebit.deploy.layouts.embedding_layout import lay_out_embeddings
from sparsebit.deploy.layouts.float_layers import keep_float_biases, keep_floats, keep_softmaxes
from sparsebit.deploy.layouts.hard_sigmoid_layout import lay_out_hard_sigmoids
from sparsebit.deploy.layouts.htp_layout import lay_out_for_htp
from sparsebit.deploy.layouts.linear_layout import lay_out_linears
from sparsebit.deploy.layouts.openvino_layout import lay_out_for_openvino
from sparsebit.deploy.layouts.pad_layout import lay_out_pads
from sparsebit.deploy.layouts.pool_layout import lay_out_pools
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes
from sparsebit.deploy.onnx_graph.model_file import checked_path, staged, write
from sparsebit.deploy.onnx_graph.number_types import FLOAT8
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile
from sparsebit.deploy.sessions.runtime_sessions import require_runtime
from sparsebit.errors import DeploymentError, users_level
from sparsebit.execution.batches import Call, as_call, input_rows, to_device
from sparsebit.graph.checking.outcome import Notes, Randomness, buffers_of, cloned, state_kept, undisturbed_randomness
from sparsebit.graph.state.modes import evaluating
from sparsebit.graph.state.outer_state import OuterState
from sparsebit.graph.values.comparison import difference
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.quantization.calibrating.model_state import check_ready, require_whole, switched_on
from sparsebit.quantization.exporting.export_checks import check_loads, check_parity, check_rules
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.faithful.carried_state import BuiltState
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.planning.float_reasons import SWITCHED_OFF
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.records.phases import EXPORT, phase

if TYPE_CHECKING:
    import onnx_ir as ir

log = logging.getLogger(__name__)

_DEFAULTS = OnnxOptions()
# ONNX Runtime's optimizer inserts a QuantizeLinear of int8 with the attribute `output_dtype` of opset 21 before some
# linear layers, then changes its zero point to uint8, and does not load its own graph (1.31).
_SIGNED_OPSET = 20


def export_onnx(
    qmodel: SimulatedModel,
    dummy_data: Any,
    name: str | os.PathLike[str],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: DynamicAxes | None = None,
    opset_version: int | None = None,
    verbose: bool = False,
    extra_info: bool = False,
    *,
    check: Any = None,
    tolerance: Tolerance | None = None,
) -> Parity | None:
    """Write a QDQ-ONNX file that computes the same as the simulation, with weights and biases as integers.

    `dummy_data`: one batch in any form that calibration accepts; the file has its shapes except for `dynamic_axes`
    (`{"x": {0: "batch"}}`). Inputs are named after forward's parameters unless `input_names` is given.
    `opset_version`: by default the lowest that has all the number formats, 21 or more (tensorrt: 20). `verbose`:
    torch logs its steps. `extra_info`: also write `<name>_extra.onnx`, with bits, format and observer of every
    site in its metadata.

    `check`: data (batches as for calibration) on which the file is run in its runtime and compared with the
    simulation; a difference beyond `tolerance` is an error that names the first site that differs. Returns the
    comparison. An older file of that name stays until the new one is complete and has passed. A calibrated model
    whose quantization is off is exported quantized, and afterwards switched off again.
    """
    require_whole(qmodel, "export_onnx")
    check_ready(qmodel, "export_onnx")
    require_onnx(qmodel.config.BACKEND)
    target = checked_path(name)
    if check is not None:
        require_runtime(PROFILES[qmodel.config.BACKEND].executes or "onnxruntime")
    extra = checked_path(target.with_name(f"{target.stem}_extra.onnx")) if extra_info else None
    with switched_on(qmodel):
        options = OnnxOptions(input_names, output_names, dynamic_axes, opset_version, verbose)
        model, sites = build_onnx(qmodel, dummy_data, options)
        parity = None
        with staged(target) as path:  # an error inside leaves an older file of that name as it was
            write(model, path)
            if qmodel.config.BACKEND == "tensorrt":
                check_rules(path, str(target))
            check_loads(qmodel, path, str(target))
            if check is not None:
                parity = check_parity(qmodel, path, check, tolerance=tolerance, name=str(target))
        if extra is not None:
            describe_sites(model, sites, {q.name: q.describe() for q in qmodel.quantizers() if q.is_enable})
            with staged(extra) as path:
                write(model, path)
    return parity


def require_onnx(backend: str) -> None:
    """Raise for a backend whose files are programs."""
    if (ending := PROFILES[backend].ending) != ".onnx":
        raise DeploymentError(
            f'BACKEND: {backend} has {ending} files: write it with qmodel.export("model{ending}", batch), or quantize '
            "with a BACKEND of ONNX files"
        )


@phase(EXPORT)
def build_onnx(
    qmodel: SimulatedModel, dummy_data: Any, options: OnnxOptions = _DEFAULTS
) -> tuple[ir.Model, list[ExportedSite]]:
    """The model in memory, and its sites in graph order."""
    model, opset = trace_onnx(qmodel, dummy_data, options)
    off = {layer: reason for layer, reason in qmodel.plan.floats.items() if reason in SWITCHED_OFF}
    note_switched_off(model, off)
    pads_channels = qmodel.config.SCHEDULE.PAD_CHANNELS
    sites = lower_onnx(model, PROFILES[qmodel.config.BACKEND], opset, pads_channels=pads_channels)
    tidy(model, {"backend": qmodel.config.BACKEND}, off)
    return model, sites


def trace_onnx(qmodel: SimulatedModel, dummy_data: Any, options: OnnxOptions = _DEFAULTS) -> tuple[ir.Model, int]:
    """The exported model with one node for each quantizer, ready for `lower_onnx`, and the opset for that."""
    profile = PROFILES[qmodel.config.BACKEND]
    if options.dynamic_axes and not profile.open_sizes:
        given = ", ".join(options.dynamic_axes)
        raise DeploymentError(
            f"export_onnx: dynamic_axes of {given}: files for {profile.name} have fixed sizes; leave dynamic_axes out "
            "(--dynamic-batch) and give an example of the size in use"
        )
    args, kwargs = export_call(qmodel, dummy_data)
    _require_exportable(qmodel, profile)
    warn_of_differences(qmodel, (args, kwargs), "export_onnx")
    opset = _opset(qmodel, options.opset_version, profile)
    with evaluating(qmodel), quantizers_as_constants(qmodel):
        options = replace(options, opset_version=max(opset, LOWEST_WRITTEN))
        model = to_onnx(qmodel, args, kwargs, options, signature=inspect.signature(qmodel.original.forward))
    if model.opset_imports.get("") != max(opset, LOWEST_WRITTEN):
        raise DeploymentError(f"opset_version={opset}: torch does not write it; leave it out, or give {profile.opset}")
    return model, opset


def lower_onnx(model: ir.Model, profile: RuntimeProfile, opset: int, *, pads_channels: bool) -> list[ExportedSite]:
    """Lower to standard ONNX in the runtime's layout, in place; returns the sites in graph order."""
    sites = lower(model, profile.weight_widths, whole_groups=BACKENDS[profile.name].whole_groups)
    lay_out_linears(model)
    lay_out_pools(model)
    lay_out_pads(model)
    if profile.name == "qnn":
        lay_out_for_htp(model)
    elif profile.executes is not None:
        lay_out_embeddings(model)
    if profile.executes == "onnxruntime":
        keep_floats(model)
        lay_out_hard_sigmoids(model)
        if pads_channels:
            lay_out_channels(model)
    if profile.executes == "openvino":
        lay_out_for_openvino(model)
    if profile.bias == "float" or profile.executes == "onnxruntime":
        keep_float_biases(model)
        keep_softmaxes(model)
    if opset < LOWEST_WRITTEN:
        to_older_opset(model, opset)
    return sites


def export_call(qmodel: SimulatedModel, dummy_data: Any) -> Call:
    """The example call: a tensor, positional arguments (a last dict may hold keywords), or a mapping of keywords."""
    model = qmodel.original
    signature = inspect.signature(model.forward)
    args, kwargs = as_call(dummy_data, model)  # for (images, labels), the images
    if isinstance(dummy_data, (tuple, list)):
        *first, last = dummy_data
        forms: list[Call] = [(tuple(dummy_data), {})]
        if first and isinstance(last, dict) and set(last) <= set(list(signature.parameters)[len(first) :]):
            forms.insert(0, (tuple(first), last))
        args, kwargs = next((form for form in forms if _binds(signature, *form)), (args, kwargs))
    if input_rows((args, kwargs)) == {0}:
        raise DeploymentError(
            "the export's example batch holds no samples: the file would accept none; give at least one"
        )
    kwargs = in_order(kwargs, signature)
    return to_device(args, qmodel.device), to_device(kwargs, qmodel.device)


def _require_exportable(qmodel: SimulatedModel, profile: RuntimeProfile) -> None:
    """Raise for dtypes without kernels in the runtime, and for LSTMs with projections, which ONNX does not have."""
    lacks, fault = {torch.bfloat16: "no kernels", torch.float64: "no integer kernels"}, ""
    dtype = next((p.dtype for p in qmodel.parameters() if p.dtype in lacks), None)
    if profile.name != "virtual" and dtype is not None:
        # ONNX convolutions in TensorRT's opset do not support bfloat16 either.
        runtime = profile.executes or f"ONNX Runtime, where files for {profile.name} are checked,"
        kind = f"the model computes in {str(dtype).removeprefix('torch.')}, for which {runtime} has {lacks[dtype]}"
        fault = f"{kind} on a CPU; call qmodel.float() first, and give float32 inputs"
    for name, module in qmodel.original.named_modules():
        if isinstance(module, torch.nn.LSTM) and module.proj_size and not fault:
            kind = f"{name or 'the model'} is an LSTM with proj_size={module.proj_size}"
            fault = f"{kind}, and ONNX's has no projection; use proj_size=0 and a Linear layer after it"
    if fault:
        raise DeploymentError(f"export_onnx: {fault}")


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _opset(qmodel: SimulatedModel, given: int | None, profile: RuntimeProfile) -> int:
    needs = {q: _opset_of(q, profile.weight_widths) for q in qmodel.quantizers() if q.is_enable}
    has_signed = any(q.target == "activation" and q.spec.qmin < 0 for q in needs)
    usual = min(profile.opset, _SIGNED_OPSET) if has_signed else profile.opset
    needed = max(needs.values(), default=usual)
    if given is None:
        return max(usual, needed)
    if given < needed:
        first = next(quantizer for quantizer, opset in needs.items() if opset > given)
        kind = f"{first.name} ({first.spec.dtype_name}, per {first.spec.granularity.kind})"
        raise DeploymentError(f"opset_version={given}: {kind} needs {needed}; leave it out, or give {needed} or more")
    return given


def _opset_of(quantizer: Quantizer, weight_widths: frozenset[int]) -> int:
    spec = quantizer.spec
    if spec.format == "float8":
        return FLOAT8.opset
    return required_opset([(spec.qmin, spec.qmax, spec.granularity.size, quantizer.target == "weight")], weight_widths)


# --- a state between calls, for which a file has no place


def warn_of_differences(qmodel: SimulatedModel, call: Call, verb: str) -> None:
    """Warn of a state between calls, and of algorithms that the config names and that were not run."""
    if state := state_between_calls(qmodel, call):
        warnings.warn(
            f"{verb}: every call changes {', '.join(state)}, and the next one depends on that; a file keeps "
            "nothing between calls: it computes each of them from the state that the model has now",
            stacklevel=users_level(),
        )
    if missing := [step.name for step in qmodel.config.ALGORITHMS if step.name not in qmodel.applied_algorithms]:
        text = f"{verb}: ALGORITHMS were not run on this model ({', '.join(missing)}); call apply_algorithms() before"
        warnings.warn(text, stacklevel=users_level())


def state_between_calls(qmodel: SimulatedModel, call: Call) -> list[str]:
    """The names of attributes, buffers and globals that `call` changes, if a second identical call has another output.

    All changes are undone. Changes without an effect on the output (a call counter, a kept attention map) do not
    count.
    """
    source = qmodel.source
    outside = OuterState(source.modules(), {})
    with contextlib.ExitStack() as stack:
        stack.callback(outside.restore)
        for context in (torch.no_grad(), full_float32(), undisturbed_randomness(), state_kept(qmodel.model, source)):
            stack.enter_context(context)
        stack.enter_context(evaluating(qmodel))
        state, notes = BuiltState(qmodel.original, source), Notes(call, buffers_of(source, qmodel.original))
        randomness = Randomness.now()
        try:
            args, kwargs = cloned(call)
            first = qmodel(*args, **kwargs)
            attributes = [f"{path}.{name}".lstrip(".") for path, name in state.changes()]
            changed = [*attributes, *notes.outcome(None).buffers, *filter(None, [outside.changed()])]
            if not changed:
                return []
            randomness.restore()
            args, kwargs = cloned(call)
            second = qmodel(*args, **kwargs)
        except Exception as error:  # the export reports it
            log.debug("the model does not run on the export's inputs: %s: %s", type(error).__name__, error)
            return []
        return changed if difference(second, first) is not None else []
