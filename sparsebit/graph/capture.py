"""Captures a model as torch.fx graphs: one graph if possible, else one for each part that can be traced, with reasons.

The result holds *regions* (captured graphs, by path) and *loose* modules (leaves that live inside an opaque module and
are called by its own code). Whatever a pass does to a region's leaves also happens to the module it came from, so the
original Python code stays a second, always valid way to run it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CaptureError
from sparsebit.graph.captured_block import refuse_hook
from sparsebit.graph.copying import copy_model, uncompiled
from sparsebit.graph.example import UNKNOWN, Example, GuardError, guard
from sparsebit.graph.failures import FAILURES, Untraced, describe_failure, forward_line, report_own_fault
from sparsebit.graph.graph_module import CapturedGraph
from sparsebit.graph.hidden_writes import may_write_parameters
from sparsebit.graph.outcome import Call, Randomness, Snapshot, cloned, undisturbed_randomness
from sparsebit.graph.outer_state import OuterState, undisturbed_outer_state
from sparsebit.graph.passes.decompose import decompose
from sparsebit.graph.stand_in import StandIn
from sparsebit.graph.state import undisturbed_state
from sparsebit.graph.tracer import LeafPolicy, LeafTracer
from sparsebit.graph.untraceable import has_hooks

# A parameter of `forward` that differs from call to call.
VARYING = "<varying>"
_KNOWN_FORMS = 4096
CallForm = dict[str, Any]


class Region(StandIn):
    """One captured graph standing in for the module it was traced from (`source`, which shares its leaves).

    A call whose optional arguments differ from the captured ones runs the source's own code (`run_source`). Attributes
    that the graph lacks are the source's, and code that asks `isinstance(block, Block)` gets its answer.
    """

    graph_module: CapturedGraph

    def __init__(self, graph_module: CapturedGraph, constants: CallForm) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.constants = constants
        # Called before each call that runs the source's own code.
        self.before_source: Callable[[Region, Call], None] | None = None
        self._traced_blocks = _blocks_within(graph_module)
        self.has_guards = any(node.target is guard for node in graph_module.graph.nodes)
        # Per form of the inputs: why a guard fails, or "" where all of them hold.
        self.known_forms: dict[Any, str] = {}
        self.inputs = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]

    @property
    def source(self) -> nn.Module:
        return self.graph_module.source

    def _stands_for(self) -> nn.Module | None:
        graph_module = self.__dict__.get("_modules", {}).get("graph_module")
        return None if graph_module is None else graph_module.source

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The graph's inputs by name, or None where the call has another form than the captured one."""
        try:
            bound = _signature(self.source).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        given = _flattened(bound)
        if given.keys() != {*self.inputs, *self.constants} or any(_is_constant(given[name]) for name in self.inputs):
            return None
        if not all(_same_constant(given[name], constant) for name, constant in self.constants.items()):
            return None
        return {name: given[name] for name in self.inputs}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.bind(args, kwargs)
        if inputs is not None and not self.__dict__.get("is_overruled", False):
            self._refuse_late_hooks()
            with contextlib.suppress(GuardError):
                return self.attempt(inputs)
        return self.run_source(args, kwargs)

    def run_source(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The source's own code, with the layers that the graph has."""
        if not torch.compiler.is_compiling():
            self.graph_module.update_source()
            if self.before_source is not None:
                self.before_source(self, (args, kwargs))
        return self.source(*args, **kwargs)

    def _refuse_late_hooks(self) -> None:
        """Attributes that the graph lacks are the source's: a hook on a block that was found so would never run."""
        if torch.compiler.is_compiling():
            return
        for path, block in self._traced_blocks:
            if block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks:
                refuse_hook(f"a hook on {path}")

    def attempt(self, inputs: dict[str, Any]) -> Any:
        """The graph on `inputs`; a GuardError, and nothing changed, where the graph does not cover such a call.

        Guards ask for sizes, types and numbers, never for values: inputs of one form always give the same answers.
        """
        if not self.has_guards or torch.compiler.is_compiling():
            return self.graph_module(**inputs)
        form = _form_of(inputs)
        reason = self.known_forms.get(form)
        if reason == "":
            return self.graph_module(**inputs)
        if reason is not None:
            raise GuardError(reason)
        # What runs before a guard fails may write into inputs and buffers, draw random numbers, or call hooks.
        snapshot, randomness = Snapshot(self.graph_module, self.source, call=inputs), Randomness.now()
        outside = OuterState(self.graph_module.modules(), {})
        try:
            output = self.graph_module(**inputs)
        except GuardError as error:
            snapshot.restore()
            outside.restore()
            randomness.restore()
            reason = str(error)
            raise
        else:
            reason = ""
            return output
        finally:
            if form is not None and reason is not None:
                if len(self.known_forms) >= _KNOWN_FORMS:
                    self.known_forms.clear()
                self.known_forms[form] = reason

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that code around the region sets is the source's, which runs its own code from then on."""
        if "inputs" in self.__dict__ and name not in self.__dict__ and name not in self._modules:
            setattr(self.source, name, value)
            self.__dict__["is_overruled"] = True
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            graph_module = self.__dict__.get("_modules", {}).get("graph_module")
            if graph_module is None or name.startswith("__"):
                raise
            return getattr(graph_module.source, name)


def _blocks_within(graph_module: CapturedGraph) -> tuple[tuple[str, nn.Module], ...]:
    """The source's modules that the graph was traced through. In a tuple: they are not the region's children."""
    called = {id(module) for module in graph_module.modules()}
    inner = list(graph_module.source.named_modules())[1:]
    return tuple((path, module) for path, module in inner if id(module) not in called and not has_hooks(module))


class ContainerRegion(Region):
    """A region that replaces an `nn.Sequential` or another module that is indexed, counted or iterated over."""

    def __len__(self) -> int:
        return len(self._container)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container)

    def __getitem__(self, key: Any) -> Any:
        return self._container[key]

    def __contains__(self, item: object) -> bool:
        return item in self._container

    @property
    def _container(self) -> Any:
        return self.source


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

    `untraced`: modules that run their own code; `untouched`: those that stay as they are, with the reason.
    """

    model: nn.Module
    regions: dict[str, Region] = field(default_factory=dict)
    loose: dict[str, Loose] = field(default_factory=dict)
    untraced: dict[str, Untraced] = field(default_factory=dict)
    eval_branches: dict[str, str] = field(default_factory=dict)
    untouched: Mapping[str, str] = field(default_factory=dict)


def capture(
    model: nn.Module,
    policy: LeafPolicy | None = None,
    *,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    form: CallForm | None = None,
) -> Captured:
    """A copy of `model` whose code is captured as torch.fx graphs.

    `example` (args, kwargs) tells which optional arguments are used, everywhere in the model; `form` does so for the
    model's own `forward` alone. Without either, optional arguments are taken as not given.
    """
    with undisturbed_randomness():
        copied = decompose(copy_model(uncompiled(model)))
        observed = _Observed(copied, *example) if example is not None else None
        explorer = _Explorer(policy or LeafPolicy(), observed, form)
        explorer.captured.model = explorer.explore(copied, "", is_root=True)
        _mark_shared(explorer.captured)
        return explorer.captured


def call_form(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallForm:
    """What a call looks like: per parameter its constant value (None, bool, str, defaults) or VARYING."""
    signature = _signature(module)
    given = _flattened(signature.bind(*args, **kwargs))
    form: CallForm = {name: value if _is_constant(value) else VARYING for name, value in given.items()}
    for name, parameter in signature.parameters.items():
        if name in given:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            form[name] = ()
        elif parameter.kind is not parameter.VAR_KEYWORD:
            form[name] = parameter.default
    return form


class _Explorer:
    """Walks the module tree: a graph where possible, else inside."""

    def __init__(self, policy: LeafPolicy, observed: _Observed | None, root_form: CallForm | None) -> None:
        self.policy, self.observed, self.root_form = policy, observed, root_form
        self.captured = Captured(nn.Module(), untouched=policy.untouched)
        self.done: dict[int, nn.Module] = {}

    def explore(self, module: nn.Module, path: str, is_root: bool = False) -> nn.Module:
        """The module to put at `path`. A module that is registered in two places is explored once."""
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
        self.captured.eval_branches.update({tracer.full_path(p): line for p, line in tracer.eval_branches.items()})
        region.graph_module.meta["eval_branches"] = frozenset(tracer.eval_branches)
        for local, failure in tracer.untraced.items():
            inner = module.get_submodule(local)
            self.captured.untraced[tracer.full_path(local)] = failure
            if id(inner) not in self.done:
                self.done[id(inner)] = inner
                self._enter(inner, tracer.full_path(local))
        return region

    def _enter(self, module: nn.Module, path: str) -> None:
        """Explore the children of an opaque module."""
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            child_path = f"{path}.{name}" if path else name
            if self.policy.is_leaf(child, child_path) or _is_weighted_leaf(child):
                self.captured.loose[child_path] = Loose(child_path, module, name)
            else:
                module._modules[name] = self.explore(child, child_path)

    def _constants(self, module: nn.Module, is_root: bool) -> CallForm | None:
        """The parameters of `forward` to hold fixed, or None where it is not known how the module is called."""
        form = self.root_form if is_root and self.root_form is not None else None
        if form is None and self.observed is not None:
            form = self.observed.forms.get(id(module))
            if form is None:
                return None
        if form is not None:
            return {name: value for name, value in form.items() if value != VARYING}
        defaults = {}
        for name, parameter in _signature(module).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                return None
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        # A child of an opaque module may be called with any of its optional arguments: only an example tells which.
        return defaults if is_root or not defaults else None

    def _why_not_tried(self, module: nn.Module, is_root: bool) -> str:
        """Why the module was not traced; "" for a container without code of its own."""
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript has no Python code that could be traced; give the module that was scripted"
        if not has_forward(module):
            return "it has no forward" if is_root else ""
        if self.observed is not None:
            return "called in more than one way, or never, by the example"
        return "its forward has optional arguments, and how it is called is not known: pass example_inputs"


class _Observed:
    """How each module is called in one forward: form and example inputs; neither if there are several ways."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.example = Example()
        self.forms: dict[int, CallForm | None] = {}
        self.inputs: dict[int, dict[str, Any]] = {}
        callable_modules = [module for module in model.modules() if has_forward(module)]
        handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in callable_modules]
        modes = {module: module.training for module in model.modules()}
        own = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        buffers = [(module, dict(module._buffers)) for module in own]
        written = [*model.buffers(), *(model.parameters() if may_write_parameters(model) else ())]
        values = {tensor: tensor.detach().clone() for tensor in written}
        try:
            model.eval()
            args, kwargs = cloned((args, kwargs))  # the model may write into its inputs
            with torch.no_grad(), undisturbed_outer_state(model), undisturbed_state(model, tensors=True):
                model(*args, **kwargs)
        except FAILURES as error:
            told = f"it calls sys.exit({error})" if isinstance(error, SystemExit) else error
            raise CaptureError(f"{type(model).__name__} does not run on its example_inputs: {told}") from error
        finally:
            for module, training in modes.items():
                module.training = training
            for handle in handles:
                handle.remove()
            for module, registry in buffers:
                module._buffers.update(registry)
            with torch.no_grad():
                for tensor, value in values.items():
                    tensor.copy_(value)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = call_form(module, args, kwargs)
        seen = self.forms.setdefault(id(module), form)
        if seen is not None and not _same_form(seen, form):
            self.forms[id(module)] = None
        elif id(module) not in self.inputs:
            given = _flattened(_signature(module).bind(*args, **kwargs))
            varying = {name: given.get(name) for name, value in form.items() if value == VARYING}
            self.inputs[id(module)] = self.example.fake(varying)


def _check_names(module: nn.Module, path: str) -> None:
    """A region below an opaque module is read by its code, which must find the module's own attributes."""
    taken = [name for name in _NAMES_OF_A_REGION if hasattr(module, name)]
    if path and taken:
        raise fx.proxy.TraceError(f"its attribute {taken[0]!r} has a name that a captured region uses itself")


_NAMES_OF_A_REGION = (
    "graph_module", "constants", "inputs", "bind", "source", "attempt", "run_source", "before_source", "has_guards",
    "known_forms", "is_overruled",
)  # fmt: skip


def _form_of(inputs: dict[str, Any]) -> Any:
    """What guards can read of the inputs, hashable; None where something in them cannot be described."""
    leaves, structure = pytree.tree_flatten(inputs)
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad))
        elif leaf is None or type(leaf) in (bool, int, float, str):
            parts.append((type(leaf), leaf))
        else:
            return None
    return (str(structure), *parts)


def _same_form(one: CallForm, other: CallForm) -> bool:
    return one.keys() == other.keys() and all(_same_constant(one[name], other[name]) for name in one)


def _same_constant(value: Any, constant: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(constant, torch.Tensor):
        return value is constant
    return value is constant or (type(value) is type(constant) and bool(value == constant))


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, (tuple, dict)) and not value)


def _flattened(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those taken by `**kwargs` among the others."""
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _signature(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward)


def has_forward(module: nn.Module) -> bool:
    """Whether the module has Python code that a call runs: of its class, or set on the module itself."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_weighted_leaf(module: nn.Module) -> bool:
    """A subclass of a torch.nn layer with its own forward and no children (`Conv2dSame`): quantized as one piece."""
    bases = [base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules")]
    return bases[:1] != [nn.Module] and not any(True for _ in module.children()) and "weight" in module._parameters


def _mark_shared(captured: Captured) -> None:
    """Tell each graph which of its leaves others call too: `meta["shared"]`, by target."""
    leaves = {
        path: {target: id(region.graph_module.get_submodule(target)) for target in _called(region.graph_module)}
        for path, region in captured.regions.items()
    }
    holders = Counter(leaf for targets in leaves.values() for leaf in set(targets.values()))
    holders.update({id(loose.module) for loose in captured.loose.values()})
    for path, targets in leaves.items():
        shared = frozenset(target for target, leaf in targets.items() if holders[leaf] > 1)
        captured.regions[path].graph_module.meta["shared"] = shared


def _called(graph_module: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph_module.graph.find_nodes(op="call_module")}
