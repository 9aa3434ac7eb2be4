"""`Region`: a module that runs a captured graph, in the place of the module that it was traced from.

A call takes one of two ways: the graph, if its form is the captured one and all guards hold, or the source's own code
with the same layers (`run_source`). The invariant: the choice never changes what a call computes, and a graph that
fails at a guard has no effects: inputs, buffers, attributes, globals and random numbers are restored before the
source's code runs. The result is remembered for each form of the inputs, so this costs only the first call of a form.

To code around it, the region looks like the source: attributes, `isinstance` and items are the source's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from sparsebit.graph.checking.outcome import Call, Randomness, Snapshot, cloned
from sparsebit.graph.nodes.aliasing import written_later
from sparsebit.graph.nodes.captured_block import refuse_hook
from sparsebit.graph.nodes.example import GuardError, guard
from sparsebit.graph.nodes.graph_module import CapturedGraph
from sparsebit.graph.nodes.hidden_writes import module_may_write
from sparsebit.graph.nodes.stand_in import StandIn, replaced_by
from sparsebit.graph.state.frozen_values import FrozenValues
from sparsebit.graph.state.outer_state import OuterState
from sparsebit.graph.tracing.untraceable import has_hooks
from sparsebit.graph.values.call_form import CallForm, flattened, is_constant, same_constant, signature_of
from sparsebit.graph.values.nested import is_symbolic
from sparsebit.graph.values.own_tensors import with_own_tensors

_KNOWN_FORMS = 4096


class Region(StandIn):
    """One captured graph in the place of `source`, the module it was traced from, which shares its leaves.

    A call whose optional arguments differ from the captured ones runs the source's own code (`run_source`). Attributes
    that the graph lacks are read from the source, and `isinstance(block, Block)` is that of the source.
    """

    graph_module: CapturedGraph

    def __init__(self, graph_module: CapturedGraph, constants: CallForm) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.constants = constants
        # Called before each call that runs the source's own code.
        self.before_source: Callable[[Region, Call], None] | None = None
        called = {id(module) for module in graph_module.modules()}
        inner = ((p, m) for p, m in list(graph_module.source.named_modules())[1:] if id(m) not in called)
        # The source's modules that the graph was traced through; in a tuple, so that they do not become children.
        self._traced_blocks = tuple((path, module) for path, module in inner if not has_hooks(module))
        self.has_guards = any(node.target is guard for node in graph_module.graph.nodes)
        # By the form of the inputs: why a guard fails, or "" if all of them hold.
        self.known_forms: dict[Any, str] = {}
        self.frozen_values: FrozenValues | None = None
        self.inputs = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]

    @property
    def source(self) -> nn.Module:
        return self.graph_module.source

    def _replaced_module(self) -> nn.Module | None:
        graph_module = self.__dict__.get("_modules", {}).get("graph_module")
        return None if graph_module is None else graph_module.source

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The graph's inputs by name; None if the call has another form than the captured one."""
        try:
            bound = signature_of(self.source).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        given = flattened(bound)
        is_known = given.keys() == {*self.inputs, *self.constants}
        is_known = is_known and not any(is_constant(given[name]) for name in self.inputs)
        is_known = is_known and all(same_constant(given[name], value) for name, value in self.constants.items())
        return {name: given[name] for name in self.inputs} if is_known else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.bind(args, kwargs)
        if inputs is not None and not self.__dict__.get("is_overruled", False):
            self._refuse_late_hooks()
            with contextlib.suppress(GuardError):
                return self.attempt(inputs)
        return self.run_source(args, kwargs)

    def run_source(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the source's own code, which calls the same (quantized) layers as the graph."""
        if torch.compiler.is_compiling():
            return self.source(*args, **kwargs)
        self.graph_module.update_source()
        if self.before_source is not None:
            self.before_source(self, (args, kwargs))
        # A quantizer saves its input for the backward even where the float layer saves nothing, and the source's code
        # may overwrite that input afterwards: autograd then gets copies.
        is_risky = torch.is_grad_enabled() and not is_symbolic([]) and module_may_write(self.source)
        with saved_tensors_hooks(_own_copy, lambda saved: saved) if is_risky else contextlib.nullcontext():
            return self.source(*args, **kwargs)

    def _refuse_late_hooks(self) -> None:
        """Raise if a user has put a hook on a block that was traced through: the graph never calls the block."""
        if torch.compiler.is_compiling():
            return
        for path, block in self._traced_blocks:
            if block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks:
                refuse_hook(f"a hook on {path}")

    def attempt(self, inputs: dict[str, Any]) -> Any:
        """Run the graph on `inputs`. If a guard fails, raises GuardError, with all changes undone.

        Guards read sizes, types and numbers, never tensor values, so inputs of one form have the same guard results.
        """
        return with_own_tensors(self._attempt(inputs), inputs)

    def note_frozen_values(self) -> None:
        """From now on a call raises GuardError if a plain value that the graph holds as a constant has changed."""
        paths = self.graph_module.meta.get("traced_through", ("",))
        modules = [(path, replaced_by(self.source.get_submodule(path))) for path in paths]
        self.frozen_values = FrozenValues(modules, self.graph_module.meta.get("new_attributes"))

    def follow_frozen_values(self, original: Region) -> None:
        """For a copy of `original`: exactly the values that have changed there count as changed here."""
        if self.frozen_values is not None and original.frozen_values is not None:
            self.frozen_values.follow(original.frozen_values)

    def _attempt(self, inputs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self.graph_module(**inputs)
        if self.frozen_values is not None and (changed := self.frozen_values.changed()):
            raise GuardError(changed, "build the QuantModel again, from a float model with this value")
        form = form_of(inputs) if self.has_guards else None
        reason = self.known_forms.get(form) if self.has_guards else ""
        if reason == "":
            return self.graph_module(**inputs)
        if reason is not None:
            raise GuardError(reason)
        try:
            output = self._run_undone_at_guards(inputs)  # the first call of this form
        except GuardError as error:
            self._note_form(form, str(error))
            raise
        self._note_form(form, "")
        return output

    def _run_undone_at_guards(self, inputs: dict[str, Any]) -> Any:
        """Run the graph; everything that nodes before a failing guard have changed is restored.

        They may write into inputs and buffers, draw random numbers, or call hooks.
        """
        snapshot, randomness = Snapshot(self.graph_module, self.source, call=inputs), Randomness.now()
        outside = OuterState(self.graph_module.modules(), {})

        def restore() -> None:
            snapshot.restore()
            outside.restore()
            randomness.restore()

        try:
            written = written_later(self.graph_module) if torch.is_grad_enabled() else ()
            if any(node.op == "placeholder" for node in written):
                # A write into an input changes its autograd history, which cannot be restored: try on copies first.
                self.graph_module(**cloned(((), inputs))[1])
                restore()
            return self.graph_module(**inputs)
        except GuardError:
            restore()
            raise

    def _note_form(self, form: Any, reason: str) -> None:
        if form is not None:
            if len(self.known_forms) >= _KNOWN_FORMS:
                self.known_forms.clear()
            self.known_forms[form] = reason

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the source, whose own code runs from then on: the graph may hold the old value."""
        if "inputs" in self.__dict__ and name not in self.__dict__ and name not in self._modules:
            if not hasattr(self.source, name):
                self.graph_module.meta.setdefault("new_attributes", []).append(name)
            setattr(self.source, name, value)
            self.__dict__["is_overruled"] = True
        else:
            super().__setattr__(name, value)


def _own_copy(saved: Tensor) -> Tensor:
    is_parameter = saved.is_leaf and saved.requires_grad  # needs no copy: torch forbids in-place writes into it
    return saved if is_parameter else saved.clone()


class ContainerRegion(Region):
    """A region that replaces an `nn.Sequential` or another module that is indexed, counted or iterated over."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __getitem__(self, key: Any) -> Any:
        return self.source[key]

    def __contains__(self, item: object) -> bool:
        return item in self.source


# Attributes of a region: a source that has one of these names is not captured below an opaque module, whose code would
# read the region's.
NAMES_OF_A_REGION = (
    "graph_module", "constants", "inputs", "bind", "source", "attempt", "run_source", "before_source", "has_guards",
    "known_forms", "is_overruled", "frozen_values", "note_frozen_values", "follow_frozen_values",
)  # fmt: skip


def form_of(inputs: dict[str, Any]) -> Any:
    """A hashable description of what guards can read of the inputs; None if some value cannot be described."""
    leaves, structure = pytree.tree_flatten(inputs)
    parts: list[Any] = [torch.is_grad_enabled()]  # decides whether results require a gradient, which code may ask
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad))
        elif leaf is None or type(leaf) in (bool, int, float, str):
            parts.append((type(leaf), leaf))
        else:
            return None
    return (str(structure), *parts)
