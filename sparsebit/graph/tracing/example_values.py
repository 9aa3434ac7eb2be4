"""The example values of a trace's nodes, found by computing each node on the examples of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.nodes.example import UNKNOWN, Example, evaluate_plainly, value_of
from sparsebit.graph.nodes.value_kinds import asks_for_sizes
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.state.state import PythonRandomness, undisturbed_state
from sparsebit.graph.tracing.traced_calls import TracedCalls


class ExampleValues:
    """`inputs`: the values of forward's parameters, by name. `example`: None, where only sizes are asked for."""

    def __init__(self, example: Example | None, inputs: Mapping[str, Any], calls: TracedCalls) -> None:
        self.example, self.inputs = example, inputs
        self.is_evaluating = False
        self._calls = calls

    def of(self, node: fx.Node, root: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The node's example value, as far as its inputs have one."""
        if node.op == "placeholder":
            return self.inputs.get(str(node.target), UNKNOWN)
        if node.op == "get_attr":
            return self.fake(tensors[str(node.target)])
        if any(value_of(source) is UNKNOWN for source in node.all_input_nodes):
            return UNKNOWN
        if self.example is None and not asks_for_sizes(node):
            return UNKNOWN
        self.is_evaluating = True
        try:
            return self._compute(node, root)
        finally:
            self.is_evaluating = False

    def fake(self, value: Any) -> Any:
        return value if self.example is None else self.example.fake(value)

    def _compute(self, node: fx.Node, root: nn.Module) -> Any:
        evaluate = evaluate_plainly if self.example is None else self.example.evaluate
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if node.op == "call_function":
            return evaluate(lambda: node.target(*args, **kwargs))  # type: ignore[operator]
        if node.op == "call_method":
            return evaluate(lambda: getattr(args[0], str(node.target))(*args[1:], **kwargs))
        module = root.get_submodule(str(node.target))
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            return UNKNOWN  # compiled code takes no tensors without data
        with undisturbed_outer_state(module, known=self._calls.places), undisturbed_state(module):
            is_users = not type(module).__module__.startswith("torch.nn.")
            for part in module.modules():
                if "training" in part.__dict__:
                    part.__dict__["training"] = False
                self._without_data(part._parameters)  # once, not again in each op
                self._without_data(part._buffers)  # the code of a user's module may write into them
                if is_users:
                    self._without_data(part.__dict__)
            randomness = PythonRandomness()
            try:
                return evaluate(lambda: module(*args, **kwargs))
            finally:
                randomness.restore()

    def _without_data(self, held: dict[str, Any]) -> None:
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        held.update((name, fake) for name, fake in self.fake(tensors).items() if fake is not UNKNOWN)
