"""What a call gave, as values that can be compared: outputs, what it wrote into its inputs, what hooks saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_REGISTRIES = {name for name, value in nn.Module().__dict__.items() if isinstance(value, dict) or name in ("training",)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nest with its path; containers are leaves too, as their type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value).__name__
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, Mapping):
        yield path, type(value).__name__
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        yield path, type(value).__name__
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def frozen(value: Any) -> list[tuple[str, Any]]:
    """The leaves as they are now: later writes do not change them."""
    return [(path, x.detach().clone() if isinstance(x, Tensor) else x) for path, x in leaves(value)]


def error(one: Tensor, other: Tensor, floor: float = 1e-3) -> float:
    """The largest difference, relative to the range of `one` (at least `floor`).

    Infinite where one is NaN and the other is not.
    """
    if not one.numel():
        return 0.0
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double(), other.double()
    both = one.isfinite() & other.isfinite()
    same = (one == other) | (one.isnan() & other.isnan())
    if bool((~both & ~same).any()):
        return float("inf")
    finite = one[both]
    if not finite.numel():
        return 0.0
    span = float(finite.max() - finite.min())
    size = max(span, float(finite.abs().max()), floor)
    return float((finite - other[both]).abs().max()) / size


def first_difference(
    one: list[tuple[str, Any]], other: list[tuple[str, Any]], limit: float, floor: float
) -> str | None:
    """What differs first: structure, type, dtype, shape, or values by more than `limit` of the range."""
    if [path for path, _ in one] != [path for path, _ in other]:
        return f"structure: {_outline(one)} became {_outline(other)}"
    for (path, a), (_, b) in zip(one, other, strict=True):
        where = path or "output"
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return f"{where}: {type(a).__name__} became {type(b).__name__}"
        if isinstance(a, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{where}: {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
            if (wrong := error(a, b, floor)) > limit:
                return f"{where}: off by {wrong:.3g} of its range"
        elif isinstance(a, float) and isinstance(b, float):
            if abs(a - b) > limit * max(1, abs(a)):
                return f"{where}: {a} became {b}"
        elif a != b:
            return f"{where}: {a!r} became {b!r}"
    return None


def _outline(values: list[tuple[str, Any]]) -> str:
    return ", ".join(path or type(x).__name__ for path, x in values)[:200]


def snapshot(model: nn.Module) -> list[tuple[str, Any]]:
    """All that a model holds: parameters, buffers, plain attributes, hooks, modes."""
    held: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        held.append((f"{name}:class", type(module).__name__))
        held.append((f"{name}:training", module.training))
        for kind in ("_parameters", "_buffers"):
            for key, value in getattr(module, kind).items():
                if value is not None:
                    held.append((f"{name}.{key}", value.detach().clone()))
                    held.append((f"{name}.{key}:grad", value.requires_grad))
        held.append((f"{name}:hooks", len(module._forward_hooks) + len(module._forward_pre_hooks)))
        held.append((f"{name}:children", tuple(module._modules)))
        for key, value in module.__dict__.items():
            if key in _REGISTRIES or (key.startswith("_") and key != "_graph"):
                continue
            for path, leaf in leaves(value):
                if isinstance(leaf, Tensor):
                    held.append((f"{name}.{key}{path}", leaf.detach().clone()))
                elif isinstance(leaf, (int, float, str, bool)) or leaf is None:
                    held.append((f"{name}.{key}{path}", leaf))
                else:
                    held.append((f"{name}.{key}{path}", type(leaf).__name__))
    return held
