"""Pads channels to numbers for which ONNX Runtime has fast integer kernels.

Its depthwise kernel needs multiples of 16 channels, its dense one multiples of 4 input channels; for any other number
a slower one runs, at two fifths of the rate. The groups of a convolution are computed one by one: 8 channels wide at
7 GMAC/s, 32 wide at 70 (x86 with VNNI, one thread). So zero channels are added inside the model, and groups are
joined with zeros between them. All other codes stay the same.
"""

from __future__ import annotations

import math

from sparsebit.deploy.layouts.channel_sets import ChannelSet, channel_sets
from sparsebit.deploy.layouts.stored_convolution import StoredConvolution
from sparsebit.deploy.onnx_graph.ir_values import become, producer, remove_unread, stored_once
from sparsebit.deploy.onnx_graph.packages import ir, numpy

_DEPTHWISE, _FEWEST = 16, 12  # below 12 channels, the work on added zeros costs as much as the faster kernel saves
_DENSE = 4
_GROUP, _MOST_DENSE = 32, 64  # the target width of groups; up to _MOST_DENSE channels one group is as fast
_FEW_TAPS, _TAPS, _FEW_OUTPUTS = 25, 49, 32  # with more taps than this, an image of 3 channels is as fast unpadded


def lay_out_channels(model: ir.Model) -> None:
    """Widen sets of values and groups of convolutions that run in integers, in place."""
    if any(
        attribute.type.name in ("GRAPH", "GRAPHS") for node in model.graph for attribute in node.attributes.values()
    ):
        return  # the subgraphs of If and Loop may read any value of the graph
    found = [StoredConvolution.read(node) for node in model.graph if node.op_type == "Conv"]
    layers = [layer for layer in found if layer is not None]
    for channels in channel_sets(model, layers):
        count = -channels.num_channels % _multiple(channels)
        if not channels.is_fixed and 0 < count < channels.num_channels:
            channels.widen(count)
    for layer in layers:
        if layer.is_integer and (count := _joined_groups(layer, can_grow=False)) > 1:
            layer.join_groups(count)
        most_taps = _TAPS if layer.num_outputs >= _FEW_OUTPUTS else _FEW_TAPS
        if layer.is_integer and layer.is_dense and layer.group_inputs < _DENSE and layer.num_taps <= most_taps:
            _pad_input(model, layer)


def _multiple(channels: ChannelSet) -> int:
    """The required divisor of the number of channels."""
    multiple = _DENSE if any(layer.is_integer for layer in channels.readers) else 1
    for layer in channels.through:
        wanted = layer.group_inputs  # add whole groups
        if layer.is_integer and layer.is_depthwise and channels.num_channels >= _FEWEST:
            wanted = _DEPTHWISE
        elif layer.is_integer:
            wanted *= _joined_groups(layer, can_grow=True)
        multiple = math.lcm(multiple, wanted)
    return multiple


def _joined_groups(layer: StoredConvolution, *, can_grow: bool) -> int:
    """How many groups become one; if no groups can be added, this must divide their number."""
    groups = layer.num_groups
    narrow = min(layer.group_inputs, layer.group_outputs)
    if layer.is_dense or layer.is_depthwise or narrow >= _GROUP:
        return 1
    if max(layer.group_inputs, layer.group_outputs) * groups <= _MOST_DENSE:
        return groups
    wanted = -(-_GROUP // narrow)
    if can_grow:
        return min(wanted, groups)
    return max(count for count in range(1, min(wanted, groups) + 1) if groups % count == 0)


def _pad_input(model: ir.Model, layer: StoredConvolution) -> None:
    """Pad the codes of an image (1 to 3 channels) before the layer; zero weights read the added channels."""
    x = layer.node.inputs[0]
    dequantize = producer(x)
    codes = None if dequantize is None else dequantize.inputs[0]
    if x is None or x.shape is None or dequantize is None or codes is None:
        return
    count = _DENSE - layer.group_inputs
    amounts = numpy.array([0, 0, 0, 0, 0, count, 0, 0], dtype=numpy.int64)
    pads = stored_once(model, f"channel_layout/pads/{count}", amounts)
    pad = ir.node("Pad", [codes, pads], name=f"{layer.node.name}/channels")
    attributes = {key: attribute.value for key, attribute in dequantize.attributes.items()}
    inputs, note = [pad.outputs[0], *dequantize.inputs[1:]], dict(dequantize.metadata_props)
    again = ir.node(dequantize.op_type, inputs, attributes, name=f"{pad.name}/dq", metadata_props=note)
    for node, like in ((pad, codes), (again, x)):
        become(node.outputs[0], like, node.name).shape = ir.Shape([x.shape[0], _DENSE, *list(x.shape)[2:]])
    model.graph.insert_before(layer.node, [pad, again])
    layer.node.replace_input_with(0, again.outputs[0])
    layer.add_inputs(count)
    remove_unread(model, dequantize)
