"""`TrainingGraph`: a captured graph as it runs in training, with fused steps instead of single nodes.

The graph itself does not change: diagrams, coverage, copies and exports see it. Only the code that runs in training,
with gradients, is generated from a rewritten copy of its nodes. A fused step is a callable that knows the modules that
it replaces, and calls them one by one if they may not be fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph_module import _forward_from_src

from sparsebit.graph.nodes.graph_module import CapturedGraph
from sparsebit.quantization.speed.fusion_guards import Substitute

Rewrite = Callable[["Draft"], None]


class Draft:
    """The nodes that are rewritten: a copy of those of `root`. `copies`: a node of `root` -> its copy."""

    def __init__(self, root: CapturedGraph) -> None:
        self.root, self.graph = root, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(root.graph, self.copies))

    def replace(self, node: fx.Node, step: FusedStep, args: tuple[Any, ...]) -> None:
        """Replace a call of a module or function by `step(*args)`."""
        node.op, node.target, node.args, node.kwargs = "call_function", step, args, {}

    def drop_unread(self, *nodes: fx.Node) -> None:
        """Erase nodes that fused steps replace, the last one first."""
        for node in nodes:
            self.graph.erase_node(node)


class FusedStep:
    """A callable that a rewrite puts into a training graph, in the place of nodes."""

    __call__: Callable[..., Any]

    def __init__(self, name: str) -> None:
        self.__name__ = name  # torch.fx requires it of a function


class TrainingGraph(Substitute):
    """Replaces `root`'s forward by code that is generated from rewritten nodes, at the first training step.

    It is generated again if the graph is recompiled or one of its modules is replaced (`_is_current`).
    """

    def __init__(self, root: CapturedGraph, rewrites: tuple[Rewrite, ...]) -> None:
        self.root, self.rewrites = root, rewrites
        self._code: str | None = None
        self._parts: list[tuple[nn.Module, str, nn.Module | None]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self.root
        if not root.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return type(root).forward(root, *args, **kwargs)
        if not self._is_current():
            self._build()
        return self._function(root, *args, **kwargs)

    @property
    def steps(self) -> list[FusedStep]:
        """The fused steps in it, in the order of calls."""
        if not self._is_current():
            self._build()
        return self._steps

    def _is_current(self) -> bool:
        """Whether the graph, and the modules that it calls, are those that the function was generated from."""
        if self._code is not self.root._code:
            return False
        return all(parent._modules.get(name) is module for parent, name, module in self._parts)

    def _build(self) -> None:
        draft = Draft(self.root)
        for rewrite in self.rewrites:
            rewrite(draft)
        self._steps = [node.target for node in draft.graph.nodes if isinstance(node.target, FusedStep)]
        made = draft.graph.python_code("self")
        self._function: Callable[..., Any] = _forward_from_src(made.src, made.globals)
        targets = dict.fromkeys(str(node.target) for node in self.root.graph.find_nodes(op="call_module"))
        places = [(self.root.get_submodule(path), name) for path, _, name in (t.rpartition(".") for t in targets)]
        self._code, self._parts = self.root._code, [(parent, name, parent._modules[name]) for parent, name in places]
