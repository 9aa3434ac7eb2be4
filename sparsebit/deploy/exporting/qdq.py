"""`sparsebit::FakeQuantize` -> standard ONNX: stored integers + DequantizeLinear, or QuantizeLinear + DequantizeLinear.

A constant (weight, bias) is stored as the integers that the simulation rounds it to, or as 8-bit floats (`FakeFloat8`);
anything else gets a pair of nodes, with a Clip before it if the grid is narrower than its type. Nodes are named after
their site (`conv1.input/q`) and carry site, role and bits in `metadata_props`, because onnx.checker rejects attributes
that the operator does not define. Layouts and comparisons find sites by this metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebit.deploy.exporting.to_onnx import DOMAIN, FLOAT8_TYPE, NO_AXIS, OP_TYPE
from sparsebit.deploy.onnx_graph import number_types as types
from sparsebit.deploy.onnx_graph.constant_folding import fold_constants
from sparsebit.deploy.onnx_graph.ir_values import stored
from sparsebit.deploy.onnx_graph.model_file import remove_unused
from sparsebit.deploy.onnx_graph.number_types import ACTIVATION_WIDTHS, FLOAT8, Storage, storage_for
from sparsebit.deploy.onnx_graph.packages import ir
from sparsebit.errors import DeploymentError
from sparsebit.numerics import float8
from sparsebit.numerics.plain import codes_of
from sparsebit.numerics.spec import PerGroup, scale_shape

SITE_KEY, ROLE_KEY, BITS_KEY = "sparsebit.site", "sparsebit.role", "sparsebit.bits"


@dataclass(frozen=True)
class ExportedSite:
    """One quantized tensor of the file. `codes`: the value with its integers; `axis`, `group`: those of its scales."""

    site: str
    role: str
    bits: int
    stored_as: str
    codes: str
    qmin: int
    qmax: int
    axis: int | None
    group: int
    num_scales: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def lower(model: ir.Model, weight_widths: frozenset[int], *, whole_groups: bool) -> list[ExportedSite]:
    """Replace every FakeQuantize, in place; returns the sites in the order of the graph.

    `weight_widths`: the integer types, by bits, that the runtime reads for constants. `whole_groups`: a last group
    shorter than the others is an error.
    """
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _is_fake_quantize(node)]
    # Exported graphs compute some scales and weights (a cast, a transpose); folded, they are constants to be stored.
    fold_constants(model, [value for node in nodes for value in node.inputs], stop=_is_fake_quantize)
    ports = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
    names: dict[str, int] = {}
    sites = []
    for node in nodes:
        site = _Site.read(node, names, ports)
        if stored(node.inputs[0]) is None:
            sites.append(_lower(model, node, site))
        else:
            sites.append(_lower_constant(model, node, site, weight_widths, whole_groups))
    remove_unused(model)
    model.opset_imports.pop(DOMAIN, None)
    return sites


def required_opset(sites: Iterable[tuple[int, int, int, bool]], weight_widths: frozenset[int]) -> int:
    """The first opset with all the types; `sites`: (qmin, qmax, group size, is it a constant) of each."""
    needed = 13
    for qmin, qmax, group, is_constant in sites:
        widths = weight_widths if is_constant else ACTIVATION_WIDTHS
        needed = max(needed, storage_for(qmin, qmax, widths, "").opset, types.BLOCK_OPSET if group else 0)
    return needed


@dataclass(frozen=True)
class _Site:
    name: str
    role: str
    scale: Tensor
    zero_point: Tensor
    axis: int | None
    group: int
    qmin: int
    qmax: int
    is_float8: bool = False

    @staticmethod
    def read(node: ir.Node, names: dict[str, int], ports: Sequence[str]) -> _Site:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        tag = str(attributes["tag"]) or "site"
        name = ""
        # A layer that the model calls twice has its sites twice; the names of inputs and outputs are the user's.
        while not name or any(port.startswith(f"{name}/") for port in ports):
            names[tag] = names.get(tag, 0) + 1
            name = tag if names[tag] == 1 else f"{tag}#{names[tag]}"
        axis = None if attributes["axis"] == NO_AXIS else int(attributes["axis"])
        scale = _tensor(node.inputs[1], name).float()
        if node.op_type == FLOAT8_TYPE:
            return _Site(name, _role(tag), scale, torch.zeros_like(scale), axis, 0, FLOAT8.low, FLOAT8.high, True)
        zero_point = _tensor(node.inputs[2], name).float().round()
        group, qmin, qmax = (int(attributes[key]) for key in ("group_size", "qmin", "qmax"))
        return _Site(name, _role(tag), scale, zero_point, axis, group, qmin, qmax)

    @property
    def bits(self) -> int:
        return FLOAT8.width if self.is_float8 else types.num_bits(self.qmin, self.qmax)

    @property
    def metadata(self) -> dict[str, str]:
        return {SITE_KEY: self.name, ROLE_KEY: self.role, BITS_KEY: str(self.bits)}

    def without_single_groups(self, shape: Sequence[int]) -> _Site:
        """A group that is as long as its row of a matrix is a scale per row, which every runtime reads."""
        if self.axis is None or not self.group or len(shape) != 2 or shape[self.axis] > self.group:
            return self
        return replace(self, axis=1 - self.axis % 2, group=0)

    def place(self, ndim: int) -> tuple[int | None, dict[str, int]]:
        """The axis counted from the front, and the attributes of Q and DQ."""
        if self.axis is None or (self.scale.numel() == 1 and not self.group):
            return None, {}
        axis = self.axis % ndim
        return axis, {"axis": axis, "block_size": self.group} if self.group else {"axis": axis}

    def exported(self, storage: Storage, codes: str, axis: int | None) -> ExportedSite:
        return ExportedSite(
            *(self.name, self.role, self.bits, storage.name.lower(), codes, self.qmin, self.qmax),
            *(axis, self.group, self.scale.numel()),
        )


def _lower_constant(
    model: ir.Model, node: ir.Node, site: _Site, widths: frozenset[int], whole_groups: bool
) -> ExportedSite:
    """Integers in the file, and one DequantizeLinear."""
    weight = _tensor(node.inputs[0], site.name).detach()
    if site.is_float8:
        storage, codes = FLOAT8, float8.codes_of(weight, site.scale, site.axis)
    else:
        storage = storage_for(site.qmin, site.qmax, _safe_widths(node, weight, widths), site.name)
        codes = codes_of(weight, site.scale, site.zero_point, site.axis, site.group, site.qmin, site.qmax)
    site = site.without_single_groups(weight.shape)
    axis, attributes = site.place(weight.ndim)
    if axis is not None and site.group and whole_groups and weight.shape[axis] % site.group:
        raise DeploymentError(
            f"{site.name}: {weight.shape[axis]} numbers in groups of {site.group}, and the backend reads whole groups "
            f"only; set a W.QUANTIZER.GROUP_SIZE that divides {weight.shape[axis]}, or a per-channel QSCHEME"
        )
    stored = _initializer(model, f"{site.name}/codes", codes, storage.name)
    scale, zero_point = _parameters(model, site, storage, weight.shape)
    # A linear's zero point is written even if it is 0: without it ONNX Runtime leaves a Gemm in float. The zero points
    # of all other weights are left out, since they would be several per cent of a small file.
    is_linear = weight.ndim == 2 and site.bits < types.BIAS_BITS and not site.is_float8
    inputs = [stored, scale, *([zero_point] if is_linear or site.zero_point.any() else [])]
    _replace(node, [("DequantizeLinear", f"{site.name}/dq", inputs, attributes)], site, storage)
    return site.exported(storage, f"{site.name}/codes", axis)


def _safe_widths(node: ir.Node, weight: Tensor, widths: frozenset[int]) -> frozenset[int]:
    """The widths without 2 bits for matrices whose sizes are not multiples of 4: ONNX Runtime 1.25 to 1.31 multiplies
    those wrongly. Tables that are only looked up are not affected.
    """
    is_looked_up = all(use.node.op_type == "Gather" for use in node.outputs[0].uses())
    if weight.ndim != 2 or is_looked_up or not any(size % 4 for size in weight.shape):
        return widths
    return widths - {2}


def _lower(model: ir.Model, node: ir.Node, site: _Site) -> ExportedSite:
    """QuantizeLinear + DequantizeLinear; before them a Clip, or Max + Min if there are limits per channel."""
    x = node.inputs[0]
    assert x is not None
    if site.is_float8:
        raise DeploymentError(
            f"{site.name}: fp8 is for stored weights, and this one is computed while the model runs; set another "
            "W.QUANTIZER.TYPE there"
        )
    storage = storage_for(site.qmin, site.qmax, ACTIVATION_WIDTHS, site.name)
    shape = _shape(x, site)
    axis, attributes = site.place(len(shape))
    scale, zero_point = _parameters(model, site, storage, shape)
    steps: list[tuple[str, str, list[ir.Value], dict[str, int]]] = []
    if (storage.low, storage.high) != (site.qmin, site.qmax):
        if site.group:
            raise DeploymentError(
                f"{site.name}: {site.bits}-bit groups of a weight that is computed while the model runs have no ONNX "
                "form; use 8 or 16 bits, or a per-channel QSCHEME"
            )
        along = () if axis is None else tuple(-1 if dim == axis else 1 for dim in range(len(shape)))
        low, high = (
            _initializer(model, f"{site.name}/{name}", ((end - site.zero_point) * site.scale).reshape(along), "FLOAT")
            for name, end in (("low", site.qmin), ("high", site.qmax))
        )
        if axis is None:
            steps = [("Clip", f"{site.name}/clip", [low, high], {})]
        else:
            steps = [("Max", f"{site.name}/clip_low", [low], {}), ("Min", f"{site.name}/clip_high", [high], {})]
    for op_type, suffix in (("QuantizeLinear", "q"), ("DequantizeLinear", "dq")):
        steps.append((op_type, f"{site.name}/{suffix}", [scale, zero_point], attributes))
    _replace(node, steps, site, storage)
    return site.exported(storage, f"{site.name}/codes", axis)


def _replace(
    node: ir.Node, steps: list[tuple[str, str, list[ir.Value], dict[str, int]]], site: _Site, storage: Storage
) -> None:
    """Replace the node by a chain of steps. Half precision computes in float32, as the simulation does."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None and node.graph is not None
    kind = ir.DataType.FLOAT if y.dtype is None else y.dtype
    chain = list(steps)
    starts_stored = chain[0][0] == "DequantizeLinear"
    if kind != ir.DataType.FLOAT:
        if not starts_stored:
            chain.insert(0, ("Cast", f"{site.name}/in", [], {"to": int(ir.DataType.FLOAT)}))
        chain.append(("Cast", f"{site.name}/out", [], {"to": int(kind)}))
    value: ir.Value | None = None if starts_stored else x
    new: list[ir.Node] = []
    for op_type, name, inputs, attributes in chain:
        read = inputs if value is None else [value, *inputs]
        new.append(ir.node(op_type, read, attributes, name=name, metadata_props=site.metadata))
        is_codes = op_type == "QuantizeLinear"
        value = new[-1].outputs[0]
        value.name, value.shape = f"{site.name}/codes" if is_codes else name, y.shape
        value.dtype = ir.DataType[storage.name] if is_codes else ir.DataType.FLOAT
    assert value is not None
    value.dtype = kind
    node.graph.insert_before(node, new)
    if y.is_graph_output():
        value.name = y.name
    ir.convenience.replace_all_uses_with(y, value, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


def _parameters(model: ir.Model, site: _Site, storage: Storage, shape: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Scale and zero point as initializers: a number, one per channel, or the blocks' shape."""
    axis, _ = site.place(len(shape))
    form: tuple[int, ...] = () if axis is None else (max(site.scale.numel(), site.zero_point.numel()),)
    if axis is not None and site.group:
        form = scale_shape(shape, PerGroup(axis, site.group))
    numbers = (site.scale, site.zero_point)
    scale, zero_point = (p.reshape(()).expand(form) if p.numel() == 1 else p.reshape(form) for p in numbers)
    return (
        _initializer(model, f"{site.name}/scale", scale, "FLOAT"),
        _initializer(model, f"{site.name}/zero_point", zero_point.to(torch.int64), storage.name),
    )


def _initializer(model: ir.Model, name: str, value: Tensor, kind: str) -> ir.Value:
    dtype = ir.DataType[kind]
    tensor = ir.Tensor(value.detach().cpu().contiguous().numpy().astype(dtype.numpy()), dtype=dtype, name=name)
    initializer = ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=ir.Shape(tensor.shape))
    model.graph.register_initializer(initializer)
    return initializer


def _is_fake_quantize(node: ir.Node) -> bool:
    return bool(node.domain == DOMAIN and node.op_type in (OP_TYPE, FLOAT8_TYPE))


def _tensor(value: Any, site: str) -> Tensor:
    array = stored(value)
    if array is None:
        raise DeploymentError(
            f"{site}: its scale or zero point is computed while the model runs; a file needs constants there "
            "(a custom quantizer must return them from qparams())"
        )
    return torch.from_numpy(array.astype("float32") if array.dtype.name == "bfloat16" else array.copy())


def _shape(value: ir.Value, site: _Site) -> tuple[int, ...]:
    """The sizes, 0 if they are free; for a tensor with one scale no sizes are needed."""
    shape = tuple(size if isinstance(size, int) else 0 for size in value.shape or ())
    if (value.shape is None and site.axis is not None) or (site.group and not all(shape)):
        raise DeploymentError(f"{site.name}: several scales for a tensor with dynamic dimensions")
    return shape


def _role(tag: str) -> str:
    parts = [part for part in tag.split(".") if part in ("input", "weight", "output", "shared", "gate", "bias")]
    return parts[-1] if parts else "input"
