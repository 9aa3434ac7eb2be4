"""The symbolic tracer: which modules are leaves, and what happens where torch.fx alone would fail or be wrong.

Differences to `torch.fx.Tracer`:

* a submodule that cannot be traced becomes one leaf call and is reported (`Untraced`); the rest of the trace goes on;
* `self.training` stays dynamic: passed on (`F.dropout(x, training=self.training)`) it is read from the module at run
  time; a branch on it takes the eval path and is reported; a module without weights that branches on it is a leaf;
* factories (`torch.arange(h)`) accept traced sizes;
* nodes are named after the module whose code calls the op (`node_names.py`);
* values have examples, where example inputs are given, and answer Python's questions from them (`proxies.py`).

The invariant: a trace either represents what the code does for every call that passes the graph's guards, or it ends
with the reason (`refuse`), and the module runs its own code. Whatever the traced code changed is undone. One trace runs
at a time (`TRACING`), and answers only to the thread that traces (`is_tracing_here`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from sparsebit.graph.nodes.aliasing import OPERATORS, writes_by_name
from sparsebit.graph.nodes.example import GIVEN, Example, forget_values, guard, value_of
from sparsebit.graph.nodes.graph_module import NAME_KEY
from sparsebit.graph.nodes.node_names import NodeNames
from sparsebit.graph.nodes.value_kinds import asks_about_training, depends_on_input, is_part_of_input, python_values
from sparsebit.graph.state.state import RequiredGradients, is_iterator, undisturbed_state
from sparsebit.graph.state.training_flag import TrainingFlag, tests_identity
from sparsebit.graph.tracing.example_values import ExampleValues
from sparsebit.graph.tracing.leaf_policy import LeafPolicy
from sparsebit.graph.tracing.patched_torch import TRACING, traced_factories, unfused_attention
from sparsebit.graph.tracing.proxies import ExampleProxy
from sparsebit.graph.tracing.traced_builtins import traced_builtins
from sparsebit.graph.tracing.traced_calls import TracedCalls
from sparsebit.graph.tracing.untraceable import watched
from sparsebit.graph.values.copying import is_held
from sparsebit.graph.values.failures import (
    FAILURES,
    Untraced,
    describe_failure,
    forward_line,
    report_own_fault,
    user_line,
)


class LeafTracer(fx.Tracer):
    """Traces `root` once, with everything inside; `prefix`: its path in the whole model (for globs and reports)."""

    def __init__(
        self,
        policy: LeafPolicy,
        prefix: str = "",
        constants: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        example: Example | None = None,
    ) -> None:
        """`constants`: parameters of forward held fixed; `inputs`: example values of the others, by name (keywords that
        forward takes by `**kwargs` among them).
        """
        with TRACING:  # torch.fx notes the ids of the functions in `math`, which another trace replaces for its time
            super().__init__()
        self.policy, self.prefix = policy, prefix
        self.constants, self.inputs = constants or {}, inputs or {}
        self.untraced: dict[str, Untraced] = {}
        self.eval_branches: dict[str, str] = {}
        self.traced_through: set[str] = {""}  # paths of the modules whose code is in the graph
        self._names = NodeNames()
        self.tensors: dict[str, torch.Tensor] = {}
        self._tensor_names: dict[int, str] = {}
        self._gradients = RequiredGradients(())
        self._attribute_proxies: dict[str, fx.Proxy] = {}
        self._thread: int | None = None
        self._calls = TracedCalls(self)
        self._values = ExampleValues(example, self.inputs, self._calls)

    @property
    def is_evaluating(self) -> bool:
        """Whether the code that runs finds an example's value."""
        return self._values.is_evaluating

    def is_tracing_here(self) -> bool:
        """Whether the code that asks runs in this trace: not in another thread, nor to find an example's value."""
        return self._thread == threading.get_ident() and not self._values.is_evaluating

    def refuse(self, reason: str) -> NoReturn:
        self._calls.refuse(reason)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.refuse("symbolically traced variables cannot be used as inputs to control flow")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Called by torch.fx for a value of unknown length that is not unpacked into names."""
        raise fx.proxy.TraceError("iterates over a traced value")

    def full_path(self, path: str) -> str:
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.policy.is_leaf(m, self.full_path(module_qualified_name))

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        parameters, buffers = root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)
        self.tensors = {**dict(parameters), **dict(buffers)}
        self._tensor_names = {id(tensor): name for name, tensor in reversed(self.tensors.items())}
        self._gradients = RequiredGradients(self.tensors.values())
        modules = (name for name, _ in root.named_modules(remove_duplicate=False))
        self._names = NodeNames([*modules, *self.tensors])
        registered = set(root._modules)
        try:
            with TRACING, undisturbed_state(root), contextlib.ExitStack() as patches:
                self._thread = threading.get_ident()
                builtins = traced_builtins(self, root)
                for patch in (traced_factories(self), unfused_attention(), builtins, watched(self, root)):
                    patches.enter_context(patch)
                for path, module in self._read_modules(root):
                    kind: Any = type(module)
                    flag = False if tests_identity(kind) else TrainingFlag(self, path, module)
                    module.__dict__["training"] = flag
                graph = super().trace(root, concrete_args)
        except FAILURES:
            self._uninstall(set(root._modules) - registered)
            raise
        finally:
            self._gradients.restore()
        forget_values(graph)
        return graph

    def _read_modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose attributes traced code may read: all except those inside of leaves."""
        inside: tuple[str, ...] = ()
        for path, module in root.named_modules():
            if path.startswith(inside) or isinstance(module, torch.jit.ScriptModule):
                continue
            if module is not root and self.is_leaf_module(module, path):
                inside += (f"{path}.",)
            yield path, module

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Placeholders by name, keyword-only parameters among them; parameters in `self.constants` are left out."""
        assert isinstance(self.root, nn.Module)
        self.graph._graph_namespace.create_name("self", None)  # the compiled forward's own: no node may take it
        signature = inspect.signature(self.root.forward)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = [name for name in (*self.constants, *self.inputs) if name not in signature.parameters]
                kwargs.update({name: _input(self, name) for name in extra})
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(_input(self, name))
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                kwargs[name] = _input(self, name)
            elif name not in self.constants:
                raise fx.proxy.TraceError(f"forward takes *{name}: how many values come is not known")
        root = self.root

        def forward(*values: Any) -> Any:
            with self._calls.kept_faithful(root, ""):
                return root._call_impl(*values, **kwargs)

        return forward, args

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """As in torch.fx; but if the example is None, None itself, so that `if mask is not None` takes its branch."""
        if args and isinstance(args[0], torch.Tensor) and writes_by_name(target):
            raise fx.proxy.TraceError("writes a traced value into a tensor that is not traced")
        if kind in ("call_module", "get_attr"):
            self._refuse_frozen(str(target))
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if target in (operator.getitem, getattr) and value_of(proxy.node) is None:
            self.add_guard(proxy.node, None)
            return None
        if is_part_of_input(proxy.node):
            self.add_guard(proxy.node, GIVEN)
        return proxy

    def _refuse_frozen(self, target: str) -> None:
        """End the trace where forward freezes a parameter, or lets it train: a graph reads it as it is."""
        assert isinstance(self.root, nn.Module)
        read = [self.tensors[target]] if target in self.tensors else self.root.get_submodule(target).parameters()
        if any(map(self._gradients.has_changed, read)):
            self.refuse(f"changes requires_grad of {target}, which a graph reads as it is at the call")

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        """A node with a name that depends on its own module alone; in compiled code, underscores stand for dots."""
        readable = self._name_of(kind, target, name)
        if readable is not None and kind in ("call_function", "call_method"):
            name = readable.replace(".", "_")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if readable is not None:
            node.meta[NAME_KEY] = readable
        return node

    def _name_of(self, kind: str, target: Any, wanted: str | None) -> str | None:
        """The node's readable name; None where its target is that name already."""
        if kind in ("output", "call_module"):
            return None
        if kind == "placeholder":
            return self._names.new("", target)
        if kind == "get_attr" and not target.startswith("_tensor_constant"):
            return str(target)
        return self._names.new(self.scope.module_path, wanted or self.graph._target_to_str(target))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        assert isinstance(self.root, nn.Module)
        node.meta["example"] = self._values.of(node, self.root, self.tensors)
        return ExampleProxy(node, self)

    def write(self, operation: Callable[..., Any], proxy: fx.Proxy, other: Any) -> Any:
        """`proxy += other`: a write into a tensor; for a size, a new number."""
        target = OPERATORS[operation] if proxy.node in python_values(self.graph) else operation
        return self.create_proxy("call_function", target, (proxy, other), {})

    def add_guard(self, node: fx.Node, answer: Any) -> None:
        """Record in the graph that the trace assumed `answer` for `node`; a value of weights alone needs no guard."""
        guards = [user.args[1] for user in node.users if user.target is guard]
        is_known = any(type(known) is type(answer) and known == answer for known in guards)
        if not depends_on_input(node):
            if (question := asks_about_training(node)) is not None:
                self.refuse(f"asks for {question} of a parameter, which changes when it is frozen or trained")
        elif not is_known:
            self.create_node("call_function", guard, (node, answer, user_line()), {})

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.is_tracing_here():
            return forward(*args, **kwargs)
        path = self._installed_path(m)
        reason = self.policy.own_code.get(self.full_path(path))
        if reason is not None:
            self.untraced[path] = Untraced(self.full_path(path), type(m).__name__, reason, forward_line(m))
        if path in self.untraced or self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        # Everything that has to be restored if the trace of this module fails: the module then becomes a leaf.
        last = next(iter(reversed(self.graph.nodes)), None)
        stack = dict(self.module_stack)
        assert isinstance(self.root, nn.Module)
        registered = set(self.root._modules)
        try:
            with self._calls.kept_faithful(m, path):
                output = super().call_module(m, forward, args, kwargs)
        except FAILURES as error:
            report_own_fault(error)
            self._roll_back(last)
            self._uninstall(set(self.root._modules) - registered)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.untraced[path] = describe_failure(error, self.full_path(path), m)
            return self.create_proxy("call_module", path, args, kwargs)
        self.traced_through.add(path)
        return output

    def _installed_path(self, module: nn.Module) -> str:
        """The module's path; one that forward creates (`nn.ReLU()(x)`) is installed first."""
        assert isinstance(self.root, nn.Module) and isinstance(self.submodule_paths, dict)
        if module not in self.submodule_paths:
            if any(True for _ in (*module.parameters(), *module.buffers())) and not is_held(self.root, module):
                self.refuse(f"calls a {type(module).__name__} that is not part of the model, for example a global one")
            place = f"{self.scope.module_path}.".lstrip(".").replace(".", "_")
            name = self.get_fresh_qualname(f"{place}{type(module).__name__.lower()}")
            self.root.add_module(name, module)
            self.submodule_paths[module] = name
        return self.path_of_module(module)

    def _uninstall(self, names: set[str]) -> None:
        """Remove modules that `forward` created in code whose trace was given up."""
        assert isinstance(self.root, nn.Module) and isinstance(self.submodule_paths, dict)
        for name in names:
            module = self.root._modules.pop(name)
            if module is not None:
                del self.submodule_paths[module]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Parameters and buffers become live reads of the module, one node each."""
        self._attribute_proxies = parameter_proxy_cache
        name = self._tensor_names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None or not self.is_tracing_here():
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, TrainingFlag):
            node = self.create_node("get_attr", f"{a.path}.training" if a.path else "training", (), {})
            node.meta["example"] = False
            return node
        if isinstance(a, FakeTensor):  # the result of a call without data, kept by a hook and read here
            self.refuse("reads a value that was kept outside of the graph, by a hook for example")
        if isinstance(a, types.GeneratorType) or is_iterator(a):
            kind = "generator" if isinstance(a, types.GeneratorType) else f"{type(a).__name__} iterator"
            self.refuse(
                f"returns or passes on a {kind}, whose values are made after that; a graph needs a list or tuple"
            )
        if isinstance(a, dict) and type(a) is not dict:
            return _typed_dict(self, a)
        argument = super().create_arg(a)
        if isinstance(a, torch.Tensor) and isinstance(argument, fx.Node):
            argument.meta["example"] = self._values.fake(a)
        return argument

    def _roll_back(self, last: fx.Node | None) -> None:
        """Forget every node after `last`, and the cached parameter reads among them."""
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
        alive = set(self.graph.nodes)
        cache = self._attribute_proxies
        for name in [name for name, proxy in cache.items() if proxy.node not in alive]:
            del cache[name]


def _input(tracer: LeafTracer, name: str) -> Any:
    constants = tracer.constants
    return constants[name] if name in constants else tracer.create_proxy("placeholder", name, (), {})


def _typed_dict(tracer: LeafTracer, a: dict[Any, Any]) -> fx.Node:
    """A mapping of another type than dict (a model's output class) is created by its own type."""
    if dataclasses.is_dataclass(a):
        given = {f.name: a[f.name] for f in dataclasses.fields(a) if a.get(f.name) is not None}
        return tracer.create_node("call_function", type(a), (), {key: tracer.create_arg(given[key]) for key in given})
    try:
        type(a)(list(a.items()))
    except Exception as error:
        raise fx.proxy.TraceError(f"{type(a).__name__} cannot be made from pairs") from error
    pairs = [(key, tracer.create_arg(value)) for key, value in a.items()]
    return tracer.create_node("call_function", type(a), (pairs,), {})
