"""Names of nodes for configs, reports and files: the path of the module whose forward calls the op, and the op.

`layer1.0.add`, `blocks.3.attn.matmul`, the second one there `blocks.3.attn.matmul_1`; in the model's own forward `add`.
What other modules compute has no influence. Names that torch.fx gives count over the whole graph, and a change in one
block would rename the ops of all that follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

from sparsebit.graph.nodes.graph_module import NAME_KEY, source_path

_NOT_IN_NAMES = re.compile(r"[^0-9a-zA-Z_]+")


def node_name(node: fx.Node) -> str:
    """The node's name inside its graph: of a module's call the module's path, else what the tracer noted."""
    name: str | None = node.meta.get(NAME_KEY)
    if name is not None:
        return name
    return source_path(str(node.target)) if node.op == "call_module" else node.name


class NodeNames:
    """Gives names that nothing else in the graph has; `taken`: paths of modules and of tensors.

    >>> names = NodeNames(["stem", "stem.add"])
    >>> [names.new("", "add"), names.new("", "add"), names.new("stem", "add"), names.new("stem", "cat")]
    ['add', 'add_1', 'stem.add_1', 'stem.cat']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._numbers: Counter[str] = Counter()

    def new(self, path: str, op: str) -> str:
        """The name of one more `op` that the module at `path` calls; a second call of the module counts on."""
        plain = _NOT_IN_NAMES.sub("_", op)
        wanted = f"{path}.{plain}" if path else plain
        name = wanted
        while name in self._taken:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._taken.add(name)
        return name
