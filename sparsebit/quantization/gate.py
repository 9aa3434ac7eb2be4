"""The parity gate: an exported file runs in its runtime on real inputs, beside the simulation that it came from."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.deploy.divergence import SiteDifference, first_divergence, kernel_fault, site_differences
from sparsebit.deploy.parity import Comparison, Parity, Tolerance
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions import EXACT, Session, open_session
from sparsebit.deploy.tensorrt_rules import violations
from sparsebit.deploy.to_onnx import flat_inputs, flat_outputs, in_order
from sparsebit.errors import DeploymentError
from sparsebit.execution.batches import Call, calls
from sparsebit.graph.nested import map_nested
from sparsebit.quantization.frozen import evaluating
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.simulation import SimulatedModel

NUM_SAMPLES = 64
_NUM_SHOWN = 5


def check_parity(
    qmodel: SimulatedModel,
    file: Path,
    data: Any,
    *,
    tolerance: Tolerance | None = None,
    num_samples: int = NUM_SAMPLES,
    name: str | None = None,
) -> Parity:
    """Compare on the first `num_samples` of `data`; beyond the tolerance a DeploymentError names the first bad site.

    `name`: what messages call the file.
    """
    profile = PROFILES[qmodel.config.BACKEND]
    runtime = profile.executes or "onnxruntime"
    optimize = profile.executes is not None
    tolerance, name = tolerance or Tolerance(), name or str(file)
    try:
        session = open_session(file, runtime, optimize=optimize, options=EXACT[runtime])
    except DeploymentError as error:  # in the user's words, not with the place where it is staged
        raise DeploymentError(str(error).replace(str(file), name)) from error
    shown = runtime if optimize else f"{runtime}, node by node"
    if optimize and not any(q.is_enable for q in qmodel.quantizers() if q.target == "feature"):
        shown += f" ({', '.join(f'{key}={value}' for key, value in EXACT[runtime].items())})"
    comparison = Comparison(session.outputs)
    first: Call | None = None
    for call in _calls(qmodel, session, data, num_samples):
        first = first or call
        comparison.add(_run(qmodel, call), session.run(_feeds(session, call)), _run(qmodel, call, quantized=False))
    parity = comparison.result(name, shown, "the simulation")
    fault = parity.fault(tolerance)
    assert first is not None
    differences = []
    if fault or not parity.is_exact:
        differences = site_differences(file, runtime, _feeds(session, first), _codes(qmodel, first), optimize=optimize)
    bad = kernel_fault(differences) if runtime == "onnxruntime" else None
    if fault or bad:
        where = bad or first_divergence(differences)
        raise DeploymentError(
            f"{name} does not compute what was simulated ({shown}): {fault or 'one of its kernels is wrong'}"
            + (f"; the first site that differs is {where}" if where else _behind(differences))
        )
    if not optimize and _has_channel_scales(qmodel):
        _try_default_session(file, name, _feeds(session, first))
    return parity


def _has_channel_scales(qmodel: SimulatedModel) -> bool:
    features = (q.spec.granularity.kind for q in qmodel.quantizers() if q.target == "feature" and q.is_enable)
    return any(kind != "tensor" for kind in features)


def _try_default_session(file: Path, name: str, feeds: dict[str, Any]) -> None:
    """Warns of a file that is right as it is written, and that ONNX Runtime's own fusions break."""
    try:
        open_session(file).run(feeds)
    except DeploymentError as error:
        told = str(error).replace(str(file), name)
        warnings.warn(f"{told}; node by node it computes what was simulated", stacklevel=4)


def _behind(differences: Sequence[SiteDifference]) -> str:
    if not differences:
        return "; it has no quantized activation to compare"
    return f"; all quantized activations agree up to the last one, {differences[-1].site}: the fault lies behind it"


def check_rules(file: Path, name: str) -> None:
    """Refuses a file that TensorRT, which does not run here, would not take."""
    broken = [str(violation) for violation in violations(file) if violation.severity == "error"]
    if broken:
        more = f"\n  and {len(broken) - _NUM_SHOWN} more" if len(broken) > _NUM_SHOWN else ""
        raise DeploymentError(f"{name}: TensorRT would refuse it:\n  " + "\n  ".join(broken[:_NUM_SHOWN]) + more)


def _calls(qmodel: SimulatedModel, session: Session, data: Any, num_samples: int) -> Iterator[Call]:
    """Batches in the size that the file takes."""
    size = session.batch_size
    left = num_samples
    model = qmodel._original[0]
    for args, keywords in calls(data, model, qmodel.device):
        kwargs = in_order(keywords, inspect.signature(model.forward))
        tensors = flat_inputs(args, kwargs)
        given = tensors[0].shape[0] if tensors and tensors[0].ndim else 1
        step = min(size or given, given) if size else min(given, left)
        if size and given < size:
            if left < num_samples:  # the rest of a loader
                return
            raise DeploymentError(f"the file takes batches of {size}, the data has {given}; export with dynamic_axes")
        for start in range(0, given - step + 1, max(step, 1)):
            if left <= 0:
                return
            yield _cut(args, given, start, step), _cut(kwargs, given, start, step)
            left -= step


def _cut(value: Any, given: int, start: int, size: int) -> Any:
    if size == given:
        return value
    return map_nested(Tensor, lambda x: x.narrow(0, start, size) if x.ndim and x.shape[0] == given else x, value)


@torch.no_grad()
def _run(qmodel: SimulatedModel, call: Call, *, quantized: bool = True) -> list[Any]:
    """The outputs as numpy arrays, of the simulation or of the float model in it."""
    switched = [] if quantized else [quantizer for quantizer in qmodel.quantizers() if quantizer.use_quant]
    try:
        for quantizer in switched:
            quantizer.use_quant = False
        args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
        with evaluating(qmodel):
            return [_array(tensor) for tensor in flat_outputs(qmodel(*args, **kwargs))]
    finally:
        for quantizer in switched:
            quantizer.use_quant = True


def _feeds(session: Session, call: Call) -> dict[str, Any]:
    tensors = flat_inputs(*call)
    if len(tensors) != len(session.inputs):
        raise DeploymentError(
            f"the file has {len(session.inputs)} inputs ({', '.join(session.inputs)}), the data {len(tensors)} tensors"
        )
    return {name: _array(tensor) for name, tensor in zip(session.inputs, tensors, strict=True)}


def _array(tensor: Tensor) -> Any:
    """The same numbers in numpy, which has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@torch.no_grad()
def _codes(qmodel: SimulatedModel, call: Call) -> dict[str, Any]:
    """Every activation site's integers in the simulation; of a site that runs several times the first ones."""
    found: dict[str, Any] = {}

    def note(quantizer: Quantizer, _: Any, output: Any) -> None:
        spec = quantizer.spec
        if isinstance(output, Tensor) and spec.granularity.kind == "tensor" and quantizer.name not in found:
            scale, zero_point = quantizer.qparams()
            codes = torch.round(output / scale) + zero_point.round()
            found[quantizer.name] = codes.to(torch.int32).cpu().numpy()

    quantizers = [q for q in qmodel.quantizers() if q.target == "feature" and q.is_enable]
    handles = [quantizer.register_forward_hook(note) for quantizer in quantizers]
    try:
        _run(qmodel, call)
    finally:
        for handle in handles:
            handle.remove()
    return found
