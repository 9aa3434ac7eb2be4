"""The symbolic tracer: which modules are leaves, and what happens where torch.fx alone would give up or guess wrong.

What differs from `torch.fx.Tracer`:

* a submodule that cannot be traced becomes one leaf call and is reported (`Untraced`); the rest of the trace goes on;
* `self.training` stays alive: passed on (`F.dropout(x, training=self.training)`) it is read from the module at run time,
  branched on it takes the eval branch and is reported, and a module without weights that branches on it becomes a leaf;
* factories (`torch.arange(h)`) accept traced sizes;
* values have examples, where example inputs are given (`example.py`), and answer Python's questions from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.example import UNKNOWN, Example, ExampleProxy, guard, plain_training, value_of

# Tensor factories take sizes, not tensors, so torch.fx never sees them unless it is told.
_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "rand", "randn", "linspace", "eye")


@dataclass(frozen=True)
class Untraced:
    """One module that stays opaque: where the trace broke and why. `line` is `file:number: source`."""

    path: str
    module_type: str
    reason: str
    line: str


class TrainingFlag:
    """Stands for one module's `training` while its forward is traced."""

    def __init__(self, tracer: LeafTracer, path: str, owner: nn.Module) -> None:
        self.tracer, self.path = tracer, path
        self.is_stateless = not owner._modules and not owner._parameters and not owner._buffers

    def __bool__(self) -> bool:
        if self.is_stateless:
            raise fx.proxy.TraceError("branches on self.training and has no weights: kept as it is for both modes")
        self.tracer.eval_branches.setdefault(self.path, user_line())
        return False


# Modules of torch.nn that are no ops themselves: their inside is traced, or entered.
_COMPOSITES: tuple[type[nn.Module], ...] = (
    nn.Module,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class LeafPolicy:
    """Leaves: modules of `torch.nn` except containers and composites, `skip` globs, and the classes in `extra`."""

    skip: tuple[str, ...] = ()
    extra: tuple[type[nn.Module], ...] = ()

    def is_skipped(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.skip)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        if self.is_skipped(path) or (self.extra and type(module) in self.extra):
            return True
        of_torch = type(module).__module__.startswith("torch.nn.") or type(module).__module__.startswith("torch.ao.nn.")
        return of_torch and type(module) not in _COMPOSITES


class LeafTracer(fx.Tracer):
    """Traces `root` once, whatever is inside; `prefix` is where `root` stands in the whole model (for leaf globs and reports)."""

    def __init__(
        self,
        policy: LeafPolicy,
        prefix: str = "",
        constants: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        example: Example | None = None,
    ) -> None:
        """`constants`: parameters of forward held fixed; `inputs`: example values of the others, by name (keywords that
        forward takes by `**kwargs` among them)."""
        super().__init__()
        self.policy, self.prefix = policy, prefix
        self.constants, self.inputs = constants or {}, inputs or {}
        self.example = example or Example()
        self.untraced: dict[str, Untraced] = {}
        self.eval_branches: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensor_names: dict[int, str] = {}
        self._attribute_proxies: dict[str, fx.Proxy] = {}

    def full_path(self, path: str) -> str:
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.policy.is_leaf(m, self.full_path(module_qualified_name))

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        self._tensors = dict([*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)])
        self._tensor_names = {id(tensor): name for name, tensor in reversed(self._tensors.items())}
        with _flagged_training(self, root), _traced_factories(self):
            return super().trace(root, concrete_args)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: dict[str, Any] | None = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Placeholders by name, keyword-only parameters included; parameters in `self.constants` never become inputs."""
        assert isinstance(self.root, nn.Module)
        signature = inspect.signature(self.root.forward)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = [name for name in (*self.constants, *self.inputs) if name not in signature.parameters]
                kwargs.update({name: self._input(name, ()) for name in extra})
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                if parameter.name not in self.constants:
                    raise fx.proxy.TraceError(f"forward takes *{parameter.name}: how many values come is not known")
                continue
            value = self._input(parameter.name, () if parameter.default is parameter.empty else (parameter.default,))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        root = self.root

        def forward(*values: Any) -> Any:
            return root.forward(*values, **kwargs)

        return forward, args

    def _input(self, name: str, default: tuple[Any, ...]) -> Any:
        return self.constants[name] if name in self.constants else self.create_proxy("placeholder", name, default, {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        node.meta["example"] = self._evaluate(node)
        return ExampleProxy(node, self)

    def _evaluate(self, node: fx.Node) -> Any:
        """The node's example value, as far as its inputs have one."""
        if node.op == "placeholder":
            return self.inputs.get(str(node.target), UNKNOWN)
        if node.op == "get_attr":
            return self._tensors[str(node.target)]
        if any(value_of(source) is UNKNOWN for source in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if node.op == "call_function":
            return self.example.evaluate(lambda: node.target(*args, **kwargs))  # type: ignore[operator]
        if node.op == "call_method":
            return self.example.evaluate(lambda: getattr(args[0], str(node.target))(*args[1:], **kwargs))
        assert isinstance(self.root, nn.Module)
        module = self.root.get_submodule(str(node.target))
        with plain_training(module), fx._symbolic_trace._maybe_revert_all_patches():
            return self.example.evaluate(lambda: module(*args, **kwargs))

    def add_guard(self, node: fx.Node, answer: Any) -> None:
        """Remember in the graph that `node` was taken to be `answer`. What weights alone decide needs no guard."""
        if answer not in node.meta.setdefault("guards", []) and _depends_on_input(node):
            self.create_node("call_function", guard, (node, answer, user_line()), {})
        node.meta["guards"].append(answer)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self._installed_path(m)
        if path in self.untraced:
            return self.create_proxy("call_module", path, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        stack = dict(self.module_stack)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            reraise_own_fault(error)
            self._roll_back(last)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.untraced[path] = describe_failure(error, self.full_path(path), m)
            return self.create_proxy("call_module", path, args, kwargs)

    def _installed_path(self, module: nn.Module) -> str:
        """The module's path; one that forward makes on the spot (`nn.ReLU()(x)`) is installed first."""
        assert isinstance(self.root, nn.Module) and isinstance(self.submodule_paths, dict)
        if module not in self.submodule_paths:
            name = self.get_fresh_qualname(type(module).__name__.lower())
            self.root.add_module(name, module)
            self.submodule_paths[module] = name
        return self.path_of_module(module)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Parameters and buffers become live reads of the module, one node each."""
        self._attribute_proxies = parameter_proxy_cache
        name = self._tensor_names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, TrainingFlag):
            node = self.create_node("get_attr", f"{a.path}.training" if a.path else "training", (), {})
            node.meta["example"] = False
            return node
        if isinstance(a, dict) and type(a) is not dict:
            return self._typed_dict(a)
        return super().create_arg(a)

    def _typed_dict(self, a: dict[Any, Any]) -> fx.Node:
        """A mapping that is more than a dict (a model's output class) is made anew by its own type."""
        if dataclasses.is_dataclass(a):
            given = {f.name: a[f.name] for f in dataclasses.fields(a) if a.get(f.name) is not None}
            return self.create_node("call_function", type(a), (), {key: self.create_arg(value) for key, value in given.items()})
        pairs = [(key, self.create_arg(value)) for key, value in a.items()]
        return self.create_node("call_function", type(a), (pairs,), {})

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


def reraise_own_fault(error: Exception) -> None:
    """An error from our own lines is a bug here, not a module that cannot be traced."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.startswith(_HERE) and not isinstance(error, fx.proxy.TraceError):
        raise error


def describe_failure(error: Exception, path: str, module: nn.Module) -> Untraced:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Untraced(path, type(module).__name__, f"{type(error).__name__}: {reason}", _failing_line(error))


def _failing_line(error: BaseException) -> str:
    """`file:line: source` of the innermost frame that is the user's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"


def user_line() -> str:
    """`file:line: source` of the innermost running frame that is the user's own code."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"


def _is_ours(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE)) or filename.startswith("<")


_TORCH = torch.__file__.rsplit("/", 1)[0]
_HERE = __file__.rsplit("/", 2)[0] + "/graph"


def _depends_on_input(node: fx.Node) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


@contextlib.contextmanager
def _flagged_training(tracer: LeafTracer, root: nn.Module) -> Iterator[None]:
    """While tracing, `training` of every module that is entered is a `TrainingFlag`."""
    saved = {module: module.training for module in root.modules()}
    try:
        for path, module in root.named_modules():
            if not tracer.is_leaf_module(module, path) or module is root:
                module.__dict__["training"] = TrainingFlag(tracer, path, module)
        yield
    finally:
        for module, training in saved.items():
            module.__dict__["training"] = training


@contextlib.contextmanager
def _traced_factories(tracer: LeafTracer) -> Iterator[None]:
    saved = {name: getattr(torch, name) for name in _FACTORIES}

    def wrap(factory: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", factory, args, kwargs)
            return factory(*args, **kwargs)

        return traced

    try:
        for name, factory in saved.items():
            setattr(torch, name, wrap(factory))
        yield
    finally:
        for name, factory in saved.items():
            setattr(torch, name, factory)
