"""`GraphBuilder`: the torch.fx graph in progress, its layers and parameters, and the value of each node for an example.

The example inputs run along with the building: operators can ask for the rank and size of any value, and a mistake is
found at the node that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.deploy.loading.building.layer_names import argument_name, as_path, layer_path
from sparsebit.deploy.loading.building.values import Number, Numbers, Value, example_of, examples, has_proxy, numbers
from sparsebit.errors import DeploymentError

# Larger float constants are masks (-1e4, -3.4e38), not weights that training may change.
_LARGEST_WEIGHT = 1e4
# More numbers than any constant of a model has; a few bytes of a hostile file can ask for as many.
LARGEST_RESULT = 1 << 30


class GraphBuilder(fx.Tracer):
    """`tensors`: the file's constants by name; `static_sizes`: the sizes that the file fixes, by value's name."""

    def __init__(self, tensors: dict[str, Tensor], static_sizes: dict[str, tuple[int | None, ...]]) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        self.static_sizes = static_sizes
        self._stored = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = list(tensors.values())  # ids and addresses stay those of these tensors
        self._attributes: dict[int, str] = {}
        self._layers: dict[Any, str] = {}
        self._weights: dict[Any, nn.Parameter] = {}
        self.taken: set[str] = set()

    def input(self, name: str, example: Tensor) -> fx.Proxy:
        """A placeholder."""
        word = self._unique(argument_name(name), alone=True)
        proxy = self.create_proxy("placeholder", word, (), {})
        proxy.__dict__["example"] = example
        return proxy

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result: computed now if all arguments are constant, else a node."""
        args, kwargs = self._read((args, kwargs))
        if not has_proxy(args, kwargs):
            return function(*args, **kwargs)
        return self.create_proxy("call_function", function, args, kwargs)

    def method(self, name: str, value: Value, *args: Any, **kwargs: Any) -> Any:
        """The result of a method of a tensor: computed now if all arguments are constant, else a node."""
        value, args, kwargs = self._read((value, args, kwargs))
        if not has_proxy(value, args, kwargs):
            return getattr(value, name)(*args, **kwargs)
        return self.create_proxy("call_method", name, (value, *args), kwargs)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind != "placeholder":
            proxy.__dict__["example"] = self._computed(kind, target, examples(args), examples(kwargs))
        return proxy

    def _computed(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if kind == "get_attr":
            parent, _, name = target.rpartition(".")
            return getattr(self.root.get_submodule(parent), name)
        assert kind == "call_module"
        return self.root.get_submodule(target)(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self._attribute(a).node
        return super().create_arg(a)

    def _read(self, tree: Any) -> Any:
        """Arguments with Numbers as tensors."""
        if isinstance(tree, Numbers):
            return self.tensor(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._read(item) for item in tree)
        return {key: self._read(item) for key, item in tree.items()} if isinstance(tree, dict) else tree

    def tensor(self, value: Value) -> Value:
        """Numbers as a tensor that is made at run time; other values as they are."""
        if not isinstance(value, Numbers):
            return value
        items = list(value.items) if value.shape else value.items[0]
        made = self.create_proxy("call_function", torch.tensor, (items,), {"dtype": value.dtype})
        return self.method("reshape", made, value.shape) if len(value.shape) > 1 else made

    def known(self, value: Value, what: str) -> Tensor:
        """A constant, where an operator needs one."""
        if isinstance(value, Tensor):
            return value
        raise DeploymentError(f"{what} is computed at run time; it has to be a constant")

    def sizes(self, value: Value) -> tuple[Number, ...]:
        """The elements of a vector or scalar of integers as Python numbers."""
        if isinstance(value, Numbers):
            return value.items
        if isinstance(value, Tensor):
            return tuple(value.reshape(-1).tolist())
        if example_of(value).ndim == 0:
            return (self.method("item", value),)
        items = [self.method("select", value, 0, place) for place in range(len(example_of(value)))]
        return tuple(self.method("item", item) for item in items)

    def size(self, value: Value, axis: int, name: str = "") -> Number:
        """The size of an axis: a number if the file fixes it (`name`: the value's), else a node."""
        if isinstance(value, (Tensor, Numbers)):
            return int(example_of(value).shape[axis])
        known = self.static_sizes.get(name, ())
        if len(known) == example_of(value).ndim and known[axis] is not None:
            return known[axis]
        return self.method("size", value, axis)

    def shape(self, value: Value, name: str = "") -> Tensor | Numbers:
        return numbers(self.size(value, axis, name) for axis in range(example_of(value).ndim))

    def layer(self, node: Any, layer: nn.Module, key: Any, parameters: dict[str, Tensor | None], *args: Value) -> Value:
        """Call a layer with these parameters; the same parameters in an equal layer are the same layer."""
        stored = {name: tensor for name, tensor in parameters.items() if tensor is not None}
        if all(isinstance(arg, Tensor) for arg in args):  # a norm of a weight: computed now
            for name, tensor in stored.items():
                setattr(layer, name, nn.Parameter(tensor) if name in layer._parameters else tensor)
            return layer(*args)
        full_key = (type(layer), key, *((name, _address(tensor)) for name, tensor in stored.items()))
        path = self._layers.get(full_key)
        if path is None:
            names = [self._name_of(tensor) for tensor in stored.values()]
            path = self._unique(layer_path(node, names))
            for name, tensor in stored.items():
                setattr(layer, name, self._parameter(tensor) if name in layer._parameters else tensor.clone())
            self._install(path, layer)
            if any(
                tensor.ndim > 1 for tensor in stored.values()
            ):  # vectors may be equal by chance, and are then merged
                self._layers[full_key] = path
        return self.create_proxy("call_module", path, self._read(args), {})

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        """Matrices and kernels that are one tensor in the file are one parameter; vectors are copied for each layer."""
        if tensor.ndim < 2:
            return nn.Parameter(tensor.detach().clone())
        address = _address(tensor)
        if address not in self._weights:
            self._alive.append(tensor)
            self._weights[address] = nn.Parameter(tensor.detach().contiguous())
        return self._weights[address]

    def _attribute(self, tensor: Tensor) -> fx.Proxy:
        """A constant that a function reads: a parameter if it is a weight of the file, else a buffer."""
        path = self._attributes.get(id(tensor))
        if path is None:
            self._alive.append(tensor)
            path = self._unique(as_path(self._stored.get(id(tensor), "constant")))
            parent, _, name = path.rpartition(".")
            owner = self._container(parent)
            if id(tensor) in self._stored and _is_weight(tensor):
                owner.register_parameter(name, self._parameter(tensor))
            else:
                owner.register_buffer(name, tensor.detach().contiguous())
            self._attributes[id(tensor)] = path
        return self.create_proxy("get_attr", path, (), {})

    def _name_of(self, tensor: Tensor) -> str:
        return self._stored.get(id(tensor), "")

    def named(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The tensor, known by the name of the one that it was computed from."""
        if id(like) in self._stored and tensor is not like:
            self._alive.append(tensor)
            self._stored[id(tensor)] = self._stored[id(like)]
        return tensor

    def store(self, name: str, tensor: Tensor) -> None:
        """Name a constant that a node computed."""
        self._alive.append(tensor)
        self._stored.setdefault(id(tensor), name)

    def _unique(self, path: str, alone: bool = False) -> str:
        """A path that no layer or parameter has and that leads through none of them."""
        parts = path.split(".")
        while not alone and any(".".join(parts[:length]) in self.taken for length in range(1, len(parts))):
            parts[-2:] = [f"{parts[-2]}_{parts[-1]}"]
        stem = found = ".".join(parts)
        number = 0
        while found in self.taken or _exists(self.root, found):
            number += 1
            found = f"{stem}_{number}"
        self.taken.add(found)
        return found

    def _install(self, path: str, layer: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        self._container(parent).add_module(name, layer)

    def _container(self, path: str) -> nn.Module:
        owner = self.root
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            child = owner._modules[part]
            assert child is not None
            owner = child
        return owner

    def finish(self, outputs: list[Value]) -> fx.GraphModule:
        """The module that returns the outputs: the only one as it is, several as a tuple."""
        read = [self._attribute(value) if isinstance(value, Tensor) else self.tensor(value) for value in outputs]
        self.create_node("output", "output", (self.create_arg(read[0] if len(read) == 1 else tuple(read)),), {})
        module = fx.GraphModule(self.root, self.graph, "OnnxModel")
        module.graph.eliminate_dead_code()
        module.recompile()
        return module


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_weight(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.ndim == 0 or not tensor.numel():
        return False
    largest = float(tensor.abs().max())
    return largest < _LARGEST_WEIGHT  # False for NaN


def _exists(root: nn.Module, path: str) -> bool:
    owner: Any = root
    for part in path.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
