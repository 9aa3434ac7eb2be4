"""Names of nodes for configs, reports and files: the path of the module whose forward calls the op, and the op.

`layer1.0.add`, `blocks.3.attn.matmul`, the second one there `blocks.3.attn.matmul_1`; in the model's own forward `add`.
A name does not depend on other modules. torch.fx numbers ops over the whole graph instead, so a change in one block
would rename the ops of all later blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

from sparsebit.graph.nodes.graph_module import NAME_KEY, source_path

_NOT_IN_NAMES = re.compile(r"[^0-9a-zA-Z_]+")


def node_name(node: fx.Node) -> str:
    """The node's name inside its graph: for a module call the module's path, else the name that the tracer recorded."""
    name: str | None = node.meta.get(NAME_KEY)
    if name is not None:
        return name
    return source_path(str(node.target)) if node.op == "call_module" else node.name


class NodeNames:
    """Makes names that are unique in the graph; `taken`: paths of modules and of tensors.

    >>> names = NodeNames(["stem", "stem.add"])
    >>> [names.new("", "add"), names.new("", "add"), names.new("stem", "add"), names.new("stem", "cat")]
    ['add', 'add_1', 'stem.add_1', 'stem.cat']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._numbers: Counter[str] = Counter()

    def new(self, path: str, op: str) -> str:
        """The name of one more `op` that the module at `path` calls; the number continues over calls of the module."""
        plain = _NOT_IN_NAMES.sub("_", op)
        wanted = f"{path}.{plain}" if path else plain
        name = wanted
        while name in self._taken:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._taken.add(name)
        return name
