"""`facts_of`: what a bit search must know about a model's sites: sizes, multiplications, and shared config entries.

Shapes come from one forward with hooks. `layers` of a site are the names whose config entries set its format: for a
separate quantizer these are the layers that read it, so that all of its readers have to agree on the bits.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.execution.batches import Call, num_samples
from sparsebit.graph.nodes.value_kinds import copied
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import QIdentity, QShared, QuantOpr, WeightedQuantOpr
from sparsebit.quantization.planning.sites import Plan, layer_name, split_site
from sparsebit.quantization.quantizers.base import Quantizer

_Names = dict[str, list[str]]
_Calls = dict[int, list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class SiteFacts:
    """`layers`: the names in the config that set its format. `num_elements`: of a weight, or of an activation in
    one sample. `parameter`: the same number for sites that read the same weight.
    """

    layers: tuple[str, ...]
    is_weight: bool
    num_elements: int
    num_scales: int
    symmetric: bool
    parameter: int | None = None

    def num_bytes(self, bits: int) -> int:
        """The bytes with codes packed without gaps, a float scale for each row, and a zero point if it is affine."""
        num_codes = self.num_elements + (0 if self.symmetric else self.num_scales)
        return -(-num_codes * bits // 8) + 4 * self.num_scales


_Sites = dict[str, SiteFacts]


@dataclass(frozen=True)
class LayerProduct:
    """The multiplications of one call of a layer for one sample. `weight`, `activation`: sites, or None in float."""

    layer: str
    weight: str | None
    activation: str | None
    num_multiplications: int


@dataclass(frozen=True)
class SearchedSites:
    """`siblings`: weight sites of layers of one kind that read one tensor, as q, k and v do."""

    sites: dict[str, SiteFacts]
    products: tuple[LayerProduct, ...]
    siblings: tuple[tuple[str, ...], ...]


@torch.no_grad()
def facts_of(model: nn.Module, plan: Plan, run: Any, call: Call) -> SearchedSites:
    """The facts of a built model; `run(*args, **kwargs)` of one call shows the shapes."""
    quantizers = {m.name: m for m in model.modules() if isinstance(m, Quantizer) and not m.fake_fused}
    layers = [m for m in model.modules() if isinstance(m, WeightedQuantOpr)]
    sizes, outputs = _shapes(quantizers, layers, run, call)
    readers, inputs = _readers(model)
    parameters: dict[str, Tensor | None]
    parameters = {m.weight_quantizer.name: m.parameter for m in model.modules() if isinstance(m, QuantizedParameter)}
    for layer in layers:
        site = layer.weight_quantizer.name
        parameters[site] = layer.op._parameters.get("weight")
        if parameters[site] is None:  # computed by pruning or by weight norm
            sizes[site] = current_weight(layer.op).numel()
    sites: dict[str, SiteFacts] = {}
    for name in plan:
        if name not in quantizers:
            continue
        quantizer, weight = quantizers[name], parameters.get(name)
        is_weight = quantizer.target == "weight"
        own = split_site(name)[0]
        deciding = [own] if is_weight or name not in readers else readers[name]
        if split_site(name)[1].startswith("output"):
            deciding = [own, *deciding]
        deciding = [layer for layer in dict.fromkeys(deciding) if is_weight or layer in plan.layers]
        num_elements = weight.numel() if weight is not None else sizes.get(name, 0)
        number = None if weight is None else id(weight)
        of_scales = quantizer.scale.numel(), quantizer.spec.symmetric
        sites[name] = SiteFacts(tuple(deciding), is_weight, num_elements, *of_scales, number)
    products = tuple(product for layer in layers for product in _products(layer, sites, inputs, outputs))
    return SearchedSites(sites, products, _siblings(layers, inputs, sites))


def _readers(model: nn.Module) -> tuple[_Names, _Names]:
    """The layers that read each separate quantizer, and what each call of a layer reads: a quantizer, or a node."""
    of_site: _Names = defaultdict(list)
    inputs: _Names = defaultdict(list)
    for name_of_graph, root in model.named_modules():
        if not isinstance(root, fx.GraphModule):
            continue
        path = name_of_graph.removesuffix("graph_module").removesuffix(".")  # of the module that the graph replaces
        for node in root.graph.nodes:
            module = _module(root, node)
            name = layer_name(path, node)
            if isinstance(module, (QIdentity, QShared)):
                of_site[module.input_quantizer.name] += (layer_name(path, user) for user in _users(node))
            elif isinstance(module, WeightedQuantOpr) and node.all_input_nodes:
                source = node.all_input_nodes[0]
                before = _module(root, source)
                read = before.input_quantizer.name if isinstance(before, (QIdentity, QShared)) else ""
                inputs[name].append(read or f"node {path}:{source.name}")
    return of_site, inputs


def _users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and user.target is copied:
            yield from _users(user)
        elif user.op != "output":
            yield user


def _module(root: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def _shapes(
    quantizers: dict[str, Quantizer], layers: list[WeightedQuantOpr], run: Any, call: Call
) -> tuple[dict[str, int], _Calls]:
    """Elements of each activation in one sample, and the input and output of each call of a layer, by its id."""
    sizes: dict[str, int] = {}
    outputs: _Calls = {}

    def of_quantizer(quantizer: Any, inputs: tuple[Any, ...]) -> None:
        if isinstance(inputs[0], Tensor) and quantizer.target != "weight":
            sizes[quantizer.name] = inputs[0].numel()

    def of_layer(layer: QuantOpr, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            outputs.setdefault(id(layer), []).append((inputs[0].to("meta"), output.to("meta")))

    with contextlib.ExitStack() as stack:
        for quantizer in quantizers.values():
            stack.callback(quantizer.register_forward_pre_hook(of_quantizer).remove)
        for layer in layers:
            stack.callback(layer.register_forward_hook(of_layer).remove)
        answer = run(*call[0], **call[1])
    count = max(1, num_samples(call, answer))
    for found in outputs.values():
        found[:] = [(x[:1], y[:1]) if x.ndim and len(x) == count else (x, y) for x, y in found]
    return {name: max(1, size // count) for name, size in sizes.items()}, outputs


def _products(layer: WeightedQuantOpr, sites: _Sites, inputs: _Names, outputs: _Calls) -> Iterator[LayerProduct]:
    """The products of a layer, one for each call."""
    name = split_site(layer.weight_quantizer.name)[0]
    weight = layer.weight_quantizer.name if layer.weight_quantizer.name in sites else None
    own = layer.input_quantizer.name
    read = [own] if own in sites else inputs.get(name) or [own]
    kernel: Any = layer.op.weight
    per_element = 0 if layer.row.name == "embedding" else kernel.numel() // max(1, kernel.shape[0])
    # Each output of a layer sums over a row of the weight; for a transposed convolution, each input multiplies one.
    is_transposed = layer.row.channel_axis == 1
    for number, (x, y) in enumerate(outputs.get(id(layer), ())):
        activation = read[number % len(read)]  # a graph that is called again reads the same quantizers
        count = (x if is_transposed else y).numel() * per_element
        yield LayerProduct(name, weight, activation if activation in sites else None, count)


def _siblings(layers: list[WeightedQuantOpr], inputs: _Names, sites: _Sites) -> tuple[tuple[str, ...], ...]:
    found: _Names = defaultdict(list)
    for layer in layers:
        site = layer.weight_quantizer.name
        if site in sites and layer.row.name == "linear":
            for source in inputs.get(split_site(site)[0], ()):
                found[source].append(site)
    return tuple(tuple(group) for group in found.values() if len(group) > 1)
