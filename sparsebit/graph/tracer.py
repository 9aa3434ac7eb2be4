"""The symbolic tracer: which modules are leaves, and what happens where torch.fx alone would give up or guess wrong.

Three things differ from `torch.fx.Tracer`:

* a submodule that cannot be traced becomes one leaf call and is reported (`Untraced`); the rest of the trace goes on;
* `self.training` stays alive: passed on (`F.dropout(x, training=self.training)`) it is read from the module at run time,
  branched on it takes the eval branch and is reported, and a module without weights that branches on it becomes a leaf;
* factories (`torch.arange(h)`) accept traced sizes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

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
        self.tracer.eval_branches.setdefault(self.path, _user_line(inspect.stack(0)))
        return False


@dataclass
class LeafPolicy:
    """Leaves: modules of `torch.nn` except containers and composites, `skip` globs, and the classes in `extra`."""

    skip: tuple[str, ...] = ()
    extra: tuple[type[nn.Module], ...] = ()
    composites: tuple[type[nn.Module], ...] = field(
        default=(
            nn.Sequential,
            nn.Transformer,
            nn.TransformerEncoder,
            nn.TransformerDecoder,
            nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer,
        )
    )

    def is_skipped(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.skip)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        if self.is_skipped(path) or (self.extra and type(module) in self.extra):
            return True
        of_torch = type(module).__module__.startswith("torch.nn.") or type(module).__module__.startswith("torch.ao.nn.")
        return of_torch and type(module) not in self.composites


class LeafTracer(fx.Tracer):
    """Traces `root` once, whatever is inside; `prefix` is where `root` stands in the whole model (for leaf globs and reports)."""

    def __init__(self, policy: LeafPolicy, prefix: str = "", constants: dict[str, Any] | None = None) -> None:
        super().__init__(param_shapes_constant=True)
        self.policy, self.prefix = policy, prefix
        self.constants = constants or {}
        self.untraced: dict[str, Untraced] = {}
        self.eval_branches: dict[str, str] = {}
        # torch.fx records buffers used as plain values as constants; a live reference survives `.to()` and loading.
        self.proxy_buffer_attributes = True

    def full_path(self, path: str) -> str:
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.policy.is_leaf(m, self.full_path(module_qualified_name))

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
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
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                if parameter.name not in self.constants:
                    raise fx.proxy.TraceError(f"forward takes *{parameter.name}: how many values come is not known")
                continue
            if parameter.name in self.constants:
                value = self.constants[parameter.name]
            else:
                default = () if parameter.default is parameter.empty else (parameter.default,)
                value = self.create_proxy("placeholder", parameter.name, default, {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        root = self.root

        def forward(*values: Any) -> Any:
            return root.forward(*values, **kwargs)

        return forward, args

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if path in self.untraced:
            return self.create_proxy("call_module", path, args, kwargs)
        last = next(reversed(self.graph.nodes), None)
        stack = dict(self.module_stack)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            self._roll_back(last)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.untraced[path] = describe_failure(error, self.full_path(path), m)
            return self.create_proxy("call_module", path, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        self._attribute_proxies = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, TrainingFlag):
            return self.create_node("get_attr", f"{a.path}.training" if a.path else "training", (), {})
        return super().create_arg(a)

    def _roll_back(self, last: fx.Node | None) -> None:
        """Forget every node after `last`, and the cached parameter reads among them."""
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
        alive = set(self.graph.nodes)
        cache = getattr(self, "_attribute_proxies", {})
        for name in [name for name, proxy in cache.items() if proxy.node not in alive]:
            del cache[name]


def describe_failure(error: Exception, path: str, module: nn.Module) -> Untraced:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Untraced(path, type(module).__name__, f"{type(error).__name__}: {reason}", _failing_line(error))


def _failing_line(error: BaseException) -> str:
    """`file:line: source` of the innermost frame that is the user's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"


def _user_line(stack: list[inspect.FrameInfo]) -> str:
    for frame in stack:
        if not _is_ours(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {linecache.getline(frame.filename, frame.lineno).strip()}"
    return "unknown line"


def _is_ours(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE)) or filename.startswith("<")


_TORCH = torch.__file__.rsplit("/", 1)[0]
_HERE = __file__.rsplit("/", 2)[0] + "/graph"


@contextlib.contextmanager
def _flagged_training(tracer: LeafTracer, root: nn.Module) -> Iterator[None]:
    """While tracing, `training` of every module is a `TrainingFlag`; leaves are never entered, so they are left alone."""
    saved = {module: module.training for module in root.modules()}
    try:
        for path, module in root.named_modules():
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
            if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
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
