"""LSTM, GRU and RNN: torch's recurrent layers, with the gates in torch's order."""

from __future__ import annotations

import operator as python
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.deploy.loading.building.call import Call
from sparsebit.deploy.loading.building.operator_table import operator
from sparsebit.deploy.loading.building.values import Value, is_constant

# Per operator: the layer, and torch's gates as places among ONNX's (LSTM: iofc -> ifco; GRU: zrh -> rzh).
_KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LSTM": (nn.LSTM, (0, 2, 3, 1)),
    "GRU": (nn.GRU, (1, 0, 2)),
    "RNN": (nn.RNN, (0,)),
}
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@operator("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> list[Value]:
    kind = call.node.op_type
    layer_type, gates = _KINDS[kind]
    activations = _activations(call, kind)
    _check(call, kind)
    weight, recurrent = call.constant(1, "weight"), call.constant(2, "recurrent weight")
    bias = None if call.input(3) is None else call.constant(3, "bias")
    directions, _, inputs = weight.shape
    hidden = recurrent.shape[-1]
    tensors: dict[str, Tensor | None] = {}
    for place in range(directions):
        end = "_reverse" if place else ""
        tensors[f"weight_ih_l0{end}"] = call.graph.named(_ordered(weight[place], gates), weight)
        tensors[f"weight_hh_l0{end}"] = call.graph.named(_ordered(recurrent[place], gates), recurrent)
        if bias is not None:
            of_input, of_state = bias[place].chunk(2)
            tensors[f"bias_ih_l0{end}"] = _ordered(of_input, gates)
            tensors[f"bias_hh_l0{end}"] = _ordered(of_state, gates)
    more = {"nonlinearity": activations[0].lower()} if kind == "RNN" else {}
    layer = layer_type(inputs, hidden, bias=bias is not None, bidirectional=directions == 2, device="meta", **more)
    is_reverse = call.attribute("direction", "forward") == "reverse"
    value = call.emit(torch.flip, call.inputs[0], (0,)) if is_reverse else call.inputs[0]
    states = [call.input(5), call.input(6)][: 2 if kind == "LSTM" else 1]
    given = _given(call, states)
    found = call.layer(layer, (hidden, directions, *activations), tensors, value, *given)
    output, last = call.emit(python.getitem, found, 0), call.emit(python.getitem, found, 1)
    output = call.emit(torch.flip, output, (0,)) if is_reverse else output
    split = call.emit(torch.unflatten, output, -1, (directions, hidden))
    outputs = [call.method("permute", split, (0, 2, 1, 3))]
    if kind == "LSTM":
        return [*outputs, call.emit(python.getitem, last, 0), call.emit(python.getitem, last, 1)]
    return [*outputs, last]


def _activations(call: Call, kind: str) -> list[str]:
    """Those of one direction."""
    names = call.attribute("activations") or _ACTIVATIONS[kind]
    found = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    one = found[: len(_ACTIVATIONS[kind])]
    allowed = [["Tanh"], ["Relu"]] if kind == "RNN" else [_ACTIVATIONS[kind]]
    if one not in allowed or found != one * (len(found) // len(one)):
        raise call.refusal(f"its activations {', '.join(found)}: torch's layer has no counterpart")
    return one


def _check(call: Call, kind: str) -> None:
    """Raise for what torch's layers do not have."""
    faults = {
        "lengths of sequences": call.input(4) is not None,
        "peepholes": call.input(7) is not None,
        "clip": call.attribute("clip") is not None,
        "layout=1": call.attribute("layout", 0) == 1,
        "input_forget": call.attribute("input_forget", 0) == 1,
        "linear_before_reset=0": kind == "GRU" and not call.attribute("linear_before_reset", 0),
    }
    if found := [name for name, is_given in faults.items() if is_given]:
        raise call.refusal(f"{', '.join(found)}: torch's layer has no counterpart")


def _ordered(tensor: Tensor, gates: tuple[int, ...]) -> Tensor:
    parts = tensor.chunk(len(gates))
    return torch.cat([parts[gate] for gate in gates])


def _given(call: Call, states: list[Value]) -> tuple[Value, ...]:
    """The initial state as torch's layer takes it; none if it is zero."""
    if all(state is None or (is_constant(state) and not state.any()) for state in states):
        return ()
    like = next(state for state in states if state is not None)
    given = tuple(call.emit(torch.zeros_like, like) if state is None else state for state in states)
    return given if len(given) == 1 else (given,)
