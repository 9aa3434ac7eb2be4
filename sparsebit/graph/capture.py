"""Captures a model as torch.fx graphs: one graph if possible, else one for each part that can be traced, with reasons.

The result holds *regions* (captured graphs, by path) and *loose* modules (leaves inside an opaque module, whose own
code calls them). The invariant: a graph and the module that it came from share their leaves and tensors. Whatever a
pass does to a layer also happens to the module, whose own code stays a second, always valid way to run it.

With an example, the model runs once first (`ObservedCalls`), which shows how each module is called. Then `_Explorer`
goes down the module tree: it tries to trace a module as one graph, and enters its children if that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from sparsebit.errors import CaptureError
from sparsebit.graph.checking.outcome import cloned, state_kept, undisturbed_randomness
from sparsebit.graph.nodes.aliasing import writes_through_data
from sparsebit.graph.nodes.example import UNKNOWN, Example
from sparsebit.graph.nodes.graph_module import CapturedGraph, source_path
from sparsebit.graph.passes.decompose import decompose
from sparsebit.graph.region import NAMES_OF_A_REGION, ContainerRegion, Region
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.outer_state import undisturbed_outer_state
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.tracing.tracer import LeafTracer
from sparsebit.graph.values.call_form import (
    VARYING,
    CallForm,
    call_form,
    flattened,
    has_forward,
    same_form,
    signature_of,
)
from sparsebit.graph.values.copying import copy_model, uncompiled
from sparsebit.graph.values.failures import FAILURES, Untraced, describe_failure, forward_line, report_own_fault
from sparsebit.graph.values.input_hints import input_hint


@dataclass
class Loose:
    """A leaf inside an opaque module: `parent._modules[name]`."""

    path: str
    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        module = self.parent._modules[self.name]
        assert module is not None
        return module


@dataclass
class Captured:
    """A captured copy of a model, which passes rewrite in place.

    `model` runs like the original; `regions` and `loose`, by path in the original model, are what passes work on.

    `uncalled`: those of `loose` that the captured path of a region does not call;
    `untraced`: modules that run their own code; `untouched`: those that stay as they are, with the reason;
    `hidden_writes`: regions that write through `.data`.
    """

    model: nn.Module
    regions: dict[str, Region] = field(default_factory=dict)
    loose: dict[str, Loose] = field(default_factory=dict)
    uncalled: list[str] = field(default_factory=list)
    untraced: dict[str, Untraced] = field(default_factory=dict)
    eval_branches: dict[str, str] = field(default_factory=dict)
    hidden_writes: list[str] = field(default_factory=list)
    untouched: Mapping[str, str] = field(default_factory=dict)


def capture(
    model: nn.Module,
    policy: LeafPolicy | None = None,
    *,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    form: CallForm | None = None,
) -> Captured:
    """A copy of `model` whose code is captured as torch.fx graphs.

    `example` (args, kwargs) shows which optional arguments are used, everywhere in the model; `form` does so for the
    model's own `forward` only. Without either, optional arguments are assumed not to be passed.
    """
    with undisturbed_randomness():
        copied = decompose(copy_model(uncompiled(model)))
        observed = ObservedCalls(copied, *example) if example is not None else None
        explorer = _Explorer(policy or LeafPolicy(), observed, form)
        explorer.captured.model = explorer.explore(copied, "", is_root=True)
        _mark_shared(explorer.captured)
        return explorer.captured


class _Explorer:
    """Walks the module tree from the root: a module becomes a graph, or else its children are explored."""

    def __init__(self, policy: LeafPolicy, observed: ObservedCalls | None, root_form: CallForm | None) -> None:
        self.policy, self.observed, self.root_form = policy, observed, root_form
        self.captured = Captured(nn.Module(), untouched=policy.untouched)
        self.done: dict[int, nn.Module] = {}

    def explore(self, module: nn.Module, path: str, is_root: bool = False) -> nn.Module:
        """The module to put at `path`: a region, or the module itself. One in two places is explored once."""
        if path in self.policy.untouched:
            return module
        if id(module) not in self.done:
            constants = self._constants(module, is_root) if has_forward(module) else None
            reason = self.policy.own_code.get(path)
            if constants is None or reason is not None:
                self.done[id(module)] = module
                reason = reason or self._why_not_tried(module, is_root)
                if reason:
                    self.captured.untraced[path] = Untraced(path, type(module).__name__, reason, forward_line(module))
                self._enter(module, path)
            else:
                self.done[id(module)] = self._capture_region(module, path, constants)
        return self.done[id(module)]

    def _capture_region(self, module: nn.Module, path: str, constants: CallForm) -> nn.Module:
        inputs = self.observed.inputs.get(id(module), {}) if self.observed else {}
        if not path and self.root_form is not None:
            inputs = {name: inputs.get(name, UNKNOWN) for name, value in self.root_form.items() if value == VARYING}
        tracer = LeafTracer(self.policy, path, constants, inputs, self.observed.example if self.observed else None)
        try:
            _check_names(module, path)
            graph = tracer.trace(module)
            kind = ContainerRegion if hasattr(type(module), "__len__") else Region
            region = kind(CapturedGraph(module, graph), constants)
        except FAILURES as error:  # the module's own forward cannot be traced
            report_own_fault(error)
            self.captured.untraced[path] = describe_failure(error, path, module)
            self._enter(module, path)
            return module
        self.captured.regions[path] = region
        self._note_uncalled(module, path, _modules_read(region))
        self.captured.eval_branches.update({tracer.full_path(p): line for p, line in tracer.eval_branches.items()})
        region.graph_module.meta["eval_branches"] = frozenset(tracer.eval_branches)
        region.graph_module.meta["traced_through"] = sorted(tracer.traced_through)
        if writes_through_data(region.graph_module):  # checked now, before passes remove nodes that nothing reads
            self.captured.hidden_writes.append(path)
        for local, failure in tracer.untraced.items():
            inner = module.get_submodule(local)
            self.captured.untraced[tracer.full_path(local)] = failure
            if id(inner) not in self.done:
                self.done[id(inner)] = inner
                self._enter(inner, tracer.full_path(local))
        return region

    def _enter(self, module: nn.Module, path: str) -> None:
        """Explore the children of an opaque module."""
        for name, child, child_path, is_leaf in self._children(module, path):
            if is_leaf:
                self.captured.loose[child_path] = Loose(child_path, module, name)
            else:
                module._modules[name] = self.explore(child, child_path)

    def _children(self, module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, str, bool]]:
        """Name, module and path of each child, and whether it is a leaf."""
        for name, child in list(module._modules.items()):
            if child is not None:
                child_path = f"{path}.{name}" if path else name
                yield name, child, child_path, self.policy.is_leaf(child, child_path) or _is_weighted_leaf(child)

    def _note_uncalled(self, module: nn.Module, path: str, read: set[int]) -> None:
        """Note as loose the layers that the captured path does not call: own code calls them on other paths."""
        for name, child, child_path, is_leaf in self._children(module, path):
            if id(child) in read or child_path in self.policy.untouched:
                continue
            if not is_leaf:
                self._note_uncalled(child, child_path, read)
            elif any(True for _ in child.parameters()):
                self.captured.loose[child_path] = Loose(child_path, module, name)
                self.captured.uncalled.append(child_path)

    def _constants(self, module: nn.Module, is_root: bool) -> CallForm | None:
        """The arguments of `forward` that the graph fixes as constants; None if it is unknown how it is called."""
        form = self.root_form if is_root else None
        if form is None and self.observed is not None and (form := self.observed.forms.get(id(module))) is None:
            return None
        if form is not None:
            return {name: value for name, value in form.items() if value != VARYING}
        defaults = {}
        for name, parameter in signature_of(module).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                return None
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        # A child of an opaque module may be called with any of its optional arguments: only an example shows which.
        return defaults if is_root or not defaults else None

    def _why_not_tried(self, module: nn.Module, is_root: bool) -> str:
        """Why the module was not traced; empty for a container without code of its own, which is not reported."""
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript has no Python code that could be traced; give the module that was scripted"
        if not has_forward(module):
            return "it has no forward" if is_root else ""
        if self.observed is not None:
            return "called in more than one way, or never, by the example"
        return "its forward has optional arguments, and how it is called is not known: pass example_inputs"


class ObservedCalls:
    """How each module is called in one forward: the form and example inputs, or None if it has several forms."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.example = Example()
        self.forms: dict[int, CallForm | None] = {}
        self.inputs: dict[int, dict[str, Any]] = {}
        callable_modules = [module for module in model.modules() if has_forward(module)]
        try:
            args, kwargs = cloned((args, kwargs))  # the model may write into its inputs
            handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in callable_modules]
            with hooked(handles), torch.no_grad(), undisturbed_outer_state(model), state_kept(model):
                model.eval()
                model(*args, **kwargs)
        except FAILURES as error:
            cause = f"it calls sys.exit({error})" if isinstance(error, SystemExit) else error
            hint = input_hint((args, kwargs))
            raise CaptureError(f"{type(model).__name__} does not run on its example_inputs: {cause}{hint}") from error

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = call_form(module, args, kwargs)
        seen = self.forms.setdefault(id(module), form)
        if seen is not None and not same_form(seen, form):
            self.forms[id(module)] = None
        elif id(module) not in self.inputs:
            given = flattened(signature_of(module).bind(*args, **kwargs))
            varying = {name: given.get(name) for name, value in form.items() if value == VARYING}
            self.inputs[id(module)] = self.example.fake(varying)


def _is_weighted_leaf(module: nn.Module) -> bool:
    """A subclass of a torch.nn layer with its own forward and no children (`Conv2dSame`): quantized as one piece."""
    bases = [base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules")]
    return bases[:1] != [nn.Module] and not any(True for _ in module.children()) and "weight" in module._parameters


def _modules_read(region: Region) -> set[int]:
    """The ids of the source's modules that the graph calls, or whose tensors it reads."""
    graph = region.graph_module.graph
    called = [source_path(str(node.target)) for node in graph.find_nodes(op="call_module")]
    owners = [source_path(str(node.target)).rpartition(".")[0] for node in graph.find_nodes(op="get_attr")]
    return {id(region.source.get_submodule(path)) for path in (*called, *owners)}


def _mark_shared(captured: Captured) -> None:
    """Store in each graph, as `meta["shared"]`, the targets of leaves that other graphs or own code call, too.

    A pass must not change these for its own graph alone.
    """
    holders = Counter({id(loose.module) for loose in captured.loose.values()})
    leaves: list[tuple[CapturedGraph, dict[str, int]]] = []
    for region in captured.regions.values():
        root = region.graph_module
        called = {str(node.target) for node in root.graph.find_nodes(op="call_module")}
        leaves.append((root, {target: id(root.get_submodule(target)) for target in called}))
        holders.update(set(leaves[-1][1].values()))
    for root, targets in leaves:
        root.meta["shared"] = frozenset(target for target, leaf in targets.items() if holders[leaf] > 1)


def _check_names(module: nn.Module, path: str) -> None:
    """A region below an opaque module is read by that module's code, which must find the original attributes."""
    taken = [name for name in NAMES_OF_A_REGION if hasattr(module, name)]
    if path and taken:
        raise fx.proxy.TraceError(f"its attribute {taken[0]!r} has a name that a captured region uses itself")
