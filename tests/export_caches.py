"""Work that every export of torch repeats with the same result, done once for all tests."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._export import utils as export_utils
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program


def read_translations_once() -> None:
    """Every export parses the source of all its ONNX translations: nearly half of a small model's time."""
    module = sys.modules.get("torch.onnx._internal.exporter._registration")  # loaded by the first export
    if module is None or hasattr(module.ONNXRegistry.from_torchlib, "is_read_once"):
        return
    read = functools.cache(module.ONNXRegistry.from_torchlib)

    def copied(opset_version: int = module.ONNXRegistry().opset_version) -> Any:
        registry = copy.copy(read(opset_version))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry  # the export adds translations of its own

    copied.is_read_once = True  # type: ignore[attr-defined]
    module.ONNXRegistry.from_torchlib = staticmethod(copied)


@contextlib.contextmanager
def composite_ops_once() -> Iterator[None]:
    """Every export looks up each composite op of the dispatcher, for each of 30 namespaces, and gives each of 500 ops a
    dozen kernels: a tenth of its time. It is needed again only where ops were added since.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._ops, "Callable", typing.Callable)  # evaluated for each op: those of typing are cached
        listed = _Listed(export_utils._collect_all_valid_cia_ops)
        for module in (export_utils, exported_program, decomp_utils):
            patch.setattr(module, "_collect_all_valid_cia_ops", listed)
        decompositions = _same_for_the_same_op(export_utils._get_decomp_for_cia)
        for module in (export_utils, exported_program, decomp_utils):
            patch.setattr(module, "_get_decomp_for_cia", decompositions)
        overridden = _Overridden(exported_program._override_composite_implicit_decomp)
        patch.setattr(exported_program, "_override_composite_implicit_decomp", overridden)
        yield


def _same_for_the_same_op(decomposition_of: Any) -> Any:
    """Calls of an op's own decomposition, which are made anew each time, compare equal."""
    known: dict[Any, Any] = {}

    def decomposition(op: Any) -> Any:
        found = decomposition_of(op)
        return known.setdefault(op, found) if isinstance(found, functools.partial) else found

    return decomposition


class _Listed:
    """The composite ops, listed again if some were registered since."""

    def __init__(self, listing: Any) -> None:
        self.listing, self.registered, self.found = listing, None, set[Any]()

    def __call__(self) -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if registered != self.registered:
            self.registered, self.found = registered, self.listing()
        return set(self.found)


class _Overridden:
    """Gives ops the kernels that the same call gave them before, and takes them back at the end.

    A call is the same if it is about the same ops, which had the same kernels.
    """

    def __init__(self, override: Any) -> None:
        self.override = override
        self.given: Mapping[Any, Any] = {}
        self.before: Mapping[Any, Any] = {}
        self.inside: list[tuple[Any, Any, Any]] = []  # op, its kernels, its rule for fake tensors

    @contextlib.contextmanager
    def __call__(self, given: Mapping[Any, Any]) -> Iterator[None]:
        rules = fake_impls.op_implementations_dict
        before = {op: op.py_kernels.copy() for op in given}
        if any(op in rules for op in given) or self.given != given or self.before != before:
            with self.override(given):
                self.given, self.before = dict(given), before
                self.inside = [(op, op.py_kernels.copy(), rules[op]) for op in given]
                yield
            return
        for op, kernels, rule in self.inside:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            rules[op] = rule
        try:
            yield
        finally:
            for op, kernels in before.items():
                op.py_kernels.clear()
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                del rules[op]
