"""The numbers of a simulation, to compare with a file: scales, zero points and codes of weights, codes of activations.

Outputs can be equal although these differ: if a later op clips the effect of a wrong zero point, or if the
samples do not reach a weight. Tensors of a file are found by their names (`conv1.weight/scale`); a layout may have
transposed, padded or repeated them, so a tensor of another form is compared as a set of numbers. The exporter
multiplies batch norms into the float layers before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebit.deploy.comparing.bit_exactness import SimulatedKernels
from sparsebit.deploy.onnx_graph.qdq_graph import load_model
from sparsebit.execution.batches import Call
from sparsebit.graph.checking.outcome import tensor_at
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.modes import evaluating
from sparsebit.graph.values.nested import map_nested
from sparsebit.numerics.plain import codes_of
from sparsebit.quantization.exporting.export_constants import ConstantSite, quantizers_as_constants
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.integer_ops import IntegerAdd, IntegerMultiply
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer

_BatchNorm = torch.nn.modules.batchnorm._BatchNorm
# `conv1.weight/scale`; the second site of that name is `conv1.weight#2/scale`, a scale that is repeated for eight
# channels `conv1.input/scale/8`.
_NAME = re.compile(r"(?P<site>.+)/(?P<part>codes|scale|zero_point)(/\d+)?")
_FLOATS = "module.model."  # float tensors of the model keep their names below this one


def stored_difference(qmodel: SimulatedModel, file: Path) -> str:
    """The first stored tensor of the file that differs from the simulation's, and how; empty if there is none.

    Tensors that an export names after a site or a parameter are compared. If the file's layout has changed a tensor's
    form by more than a transposition, it is compared as a set of numbers.
    """
    from onnx import numpy_helper

    simulated = _simulated(qmodel)
    for tensor in load_model(file).graph.initializer:
        expected, part = _expected(qmodel, simulated, tensor.name)
        if not expected:
            continue
        found = numpy_helper.to_array(tensor)
        if found.dtype.kind != "f" or found.dtype.itemsize < 4:  # 4-bit integers, 8-bit floats
            found = found.astype("float64")
        differences = [_difference(numbers, found, part) for numbers in expected]
        if part == "float" and any(_is_folded(expected[0], found, norm) for norm in _norms(qmodel)):
            continue
        if all(differences):  # a layer that is called with several inputs has a bias for each of their scales
            return f"{tensor.name.removeprefix(_FLOATS)}: {differences[0]}"
    return ""


def _expected(qmodel: SimulatedModel, simulated: dict[str, list[_Numbers]], name: str) -> tuple[list[Any], str]:
    """The possible values of a stored tensor of this name, and the part of a site that it is."""
    if name.startswith(_FLOATS):
        value = tensor_at(qmodel.model, name.removeprefix(_FLOATS))
        is_float = value is not None and value.is_floating_point()
        return ([value.detach().float().cpu().numpy()] if value is not None and is_float else []), "float"
    if (parts := _NAME.fullmatch(name)) is None:
        return [], ""
    site, part = parts["site"], parts["part"]
    known = simulated.get(site) or simulated.get(site.rpartition("#")[0], [])
    return [numbers for one in known if (numbers := getattr(one, part)) is not None], part


def _norms(qmodel: SimulatedModel) -> Iterator[_BatchNorm]:
    return (module for module in qmodel.modules() if isinstance(module, _BatchNorm) and module.running_var is not None)


def _is_folded(expected: Any, found: Any, norm: _BatchNorm) -> bool:
    """Whether a float layer's weight or bias is stored with a batch norm, which is an op of its own in the model."""
    import numpy

    assert norm.running_mean is not None and norm.running_var is not None
    size, factor = norm.num_features, torch.rsqrt(norm.running_var.double() + norm.eps)
    weight, bias = norm.weight, norm.bias
    factor = factor if weight is None else factor * weight.detach().double()
    if expected.shape == (size,):
        folded = (torch.from_numpy(expected).double() - norm.running_mean.double()) * factor
        forms = [folded if bias is None else folded + bias.detach().double()]
    else:  # along the outputs: the first axis, or the second one of a transposed convolution
        axes = [axis for axis in (0, 1) if axis < expected.ndim and expected.shape[axis] == size]
        shapes = [[size if place == axis else 1 for place in range(expected.ndim)] for axis in axes]
        forms = [torch.from_numpy(expected).double() * factor.reshape(shape) for shape in shapes]
    forms += [form.T for form in forms if form.ndim == 2]
    arrays = [form.numpy() for form in forms]
    return any(a.shape == found.shape and numpy.allclose(found, a, 1e-6, 1e-6 * abs(a).max()) for a in arrays)


class _Numbers(NamedTuple):
    """The numbers of one site of the simulation; `codes` if it rounds a constant, None if they are unknown."""

    scale: Any
    zero_point: Any
    codes: Any = None


@torch.no_grad()
def _simulated(qmodel: SimulatedModel) -> dict[str, list[_Numbers]]:
    found: dict[str, list[_Numbers]] = {}
    with evaluating(qmodel):
        biases = dict(_biases(qmodel))
        with quantizers_as_constants(qmodel):
            sites = [site for site in qmodel.modules() if isinstance(site, ConstantSite)]
        for site in sites:
            value = site.value if site.value is not None else biases.get(site.name)
            found.setdefault(site.name, []).append(_numbers(site, value))
    return found


def _biases(qmodel: SimulatedModel) -> Iterator[tuple[str, Tensor]]:
    for layer in qmodel.modules():
        if isinstance(layer, WeightedQuantOpr) and (bias := layer.stored_bias()) is not None:
            for rounding, _ in layer.arithmetics:
                if rounding is not None:
                    yield rounding.name, bias


def _numbers(site: ConstantSite, value: Any) -> _Numbers:
    scale, codes = site.scale, None
    if site.is_float8:
        return _Numbers(scale.cpu().numpy(), None)
    if isinstance(value, Tensor):
        codes = codes_of(value.detach().to(scale.device), scale, site.zero_point, *site.grid).cpu().numpy()
    return _Numbers(scale.cpu().numpy(), site.zero_point.cpu().numpy(), codes)


def _difference(expected: Any, found: Any, part: str) -> str:
    import numpy

    expected, found = numpy.asarray(expected), numpy.asarray(found)
    is_param = part in ("scale", "zero_point")
    if is_param and 1 in (expected.size, found.size):  # one for all, or repeated for every channel
        expected, found = numpy.broadcast_arrays(expected.reshape(-1), found.reshape(-1))
    if expected.size != found.size:
        if expected.size > found.size or expected.ndim not in (1, 4):
            return ""  # the layout has truncated or padded it
        if is_param:  # of a convolution with added channels, the first ones
            expected, found = expected.reshape(-1), found.reshape(-1)[: expected.size]
        elif (expected != 0).sum() != (found != 0).sum():
            return f"{(found != 0).sum()} numbers that are not 0 in the file, {(expected != 0).sum()} in the simulation"
        else:
            expected, found = expected[expected != 0], found[found != 0]
    # Linear layers are stored as (in, out). For a square shape this is ambiguous: the form that differs less is used.
    forms = [form for form in (expected, expected.T) if form.shape == found.shape]
    expected = min(forms, key=lambda form: int((form != found).sum()), default=expected)
    if expected.shape != found.shape:
        expected, found = numpy.sort(expected.reshape(-1)), numpy.sort(found.reshape(-1))
    are_nan = numpy.isnan(expected) & numpy.isnan(found)
    differs = ((expected != found) & ~are_nan).reshape(-1)
    if not differs.any():
        return ""
    where = int(differs.argmax())
    values = " in the file, ".join(f"{array.reshape(-1)[where]:.9g}" for array in (found, expected))
    count = f"{int(differs.sum())} of its {differs.size} numbers differ, the first is " if differs.size > 1 else ""
    return f"{count}{values} in the simulation"


# --- activations


@torch.no_grad()
def simulated_codes(qmodel: SimulatedModel, call: Call) -> tuple[dict[str, Any], SimulatedKernels]:
    """The integers of every activation site at its first run, and which sites the integer kernels round to."""
    found: dict[str, Any] = {}
    sums: dict[str, bool] = {}

    def note(quantizer: Quantizer, _: Any, output: Any) -> None:
        spec = quantizer.spec
        if isinstance(output, Tensor) and spec.granularity.kind == "tensor" and quantizer.name not in found:
            scale, zero_point = quantizer.qparams()
            codes = torch.round(output / scale) + zero_point.round()
            found[quantizer.name] = codes.to(torch.int32).cpu().numpy()

    def note_sum(kernel: IntegerAdd, inputs: tuple[Any, ...], _: Any) -> None:
        left, right = inputs
        name = kernel.sources[2].name  # a broadcasting addition is not computed in the kernel's steps
        sums[name] = sums.get(name, True) and kernel.is_active and left.shape == right.shape

    quantizers = [q for q in qmodel.quantizers() if q.target == "activation" and q.is_enable]
    handles = [quantizer.register_forward_hook(note) for quantizer in quantizers]
    modules = list(qmodel.modules())
    handles += [module.register_forward_hook(note_sum) for module in modules if isinstance(module, IntegerAdd)]
    with hooked(handles), evaluating(qmodel):
        args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
        qmodel(*args, **kwargs)
    layers: dict[str, frozenset[str | None]] = {}
    for module in (m for m in modules if isinstance(m, WeightedQuantOpr | FunctionalWeightedQuantOpr)):
        kernels = [integer.sources for _, integer in module.arithmetics if integer is not None]
        if active := [sources for sources in kernels if all(q.is_enable for q in sources)]:
            ends = frozenset(sources[2].name if len(sources) > 2 else None for sources in active)
            layers[module.weight_quantizer.name] = ends
    products = frozenset(module.sources[2].name for module in modules if isinstance(module, IntegerMultiply))
    return found, SimulatedKernels(layers, frozenset(name for name, is_exact in sums.items() if is_exact), products)
