"""Extension points of the first Sparsebit: sparsers (how a mask is made) and sparse modules (whose weights)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from sparsebit.config.section import Section
from sparsebit.errors import ConfigError
from sparsebit.registry import Registry, own_type

SPARSERS: Registry[object] = Registry("sparser")


class Sparser(ABC):
    """Makes the mask of one weight. A class of your own, registered, is a `SPARSER.TYPE`.

    `config` is the whole config, `name` the weight's (`layer1.0.conv1.weight`), `ratio` the config's ratio for it.
    """

    def __init__(self, config: Section, name: str, ratio: float) -> None:
        self.config, self.name, self.ratio = config, name, ratio

    @abstractmethod
    def calc_mask(self, x: Tensor) -> Tensor:
        """A mask of the shape of the weight `x`: zero (or False) is pruned."""


S = TypeVar("S", bound=type[Sparser])


def register_sparser(name: str | S | None = None, *, replace: bool = False) -> Any:
    """A class decorator: `@register_sparser("mine")`, or `@register_sparser` on a class with a TYPE of its own."""

    def file(kind: S) -> S:
        _require_class(kind, Sparser, "register_sparser takes a subclass of Sparser")
        _refuse_former_sparser(kind)
        SPARSERS.register(name if isinstance(name, str) else own_type(kind), replace=replace)(kind)
        return kind

    return file if name is None or isinstance(name, str) else file(name)


def _require_class(kind: object, base: type, allowed: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{allowed}, not {kind!r}")


def _refuse_former_sparser(kind: type) -> None:
    """Raise for a class of the first Sparsebit, registered by its STRATEGY and created with `(config, opr)`."""
    arguments = signature(kind).parameters
    if "opr" in arguments or ("STRATEGY" in vars(kind) and "TYPE" not in vars(kind)):
        raise ConfigError(
            f"{kind.__name__} is of the first Sparsebit; today: TYPE = {vars(kind).get('STRATEGY', 'mine')!r} "
            "in the class, __init__(self, config, name, ratio) or none, and SPARSER.TYPE in the config"
        )


def sparser_mask(kind: type[Sparser], config: Section, name: str, weight: Tensor, ratio: float) -> Tensor:
    """The mask that a registered class makes for one weight, checked."""
    found = kind(config, name, ratio).calc_mask(weight)
    if found.shape != weight.shape:
        shapes = f"{tuple(found.shape)} for {name}, a weight of {tuple(weight.shape)}"
        raise ConfigError(f"{kind.__name__}.calc_mask returned a mask of {shapes}")
    return found.bool()


# The two that are built in work on all weights together: `unit_selection.py` and `element_weights.py`.
SPARSERS.register("structured", aliases=("structed",))("structured")
SPARSERS.register("unstructured", aliases=("unstructed",))("unstructured")


class SparseOpr:
    """Which parameters of a class of modules unstructured sparsity prunes: names or globs."""

    weights: ClassVar[tuple[str, ...]] = ("weight",)


SMODULE_MAP: dict[type[nn.Module], type[SparseOpr]] = {}
K = TypeVar("K", bound=type[SparseOpr])


def register_smodule(sources: Iterable[type[nn.Module]]) -> Callable[[K], K]:
    """A class decorator: modules of these classes (and their subclasses) have weights that are pruned.

    >>> @register_smodule(sources=[nn.Bilinear])
    ... class SBilinear(SparseOpr):
    ...     weights = ("weight",)
    """
    listed = tuple(sources)
    for source in listed:
        _require_class(source, nn.Module, "register_smodule: sources are classes of nn.Module")

    def file(kind: K) -> K:
        _require_class(kind, SparseOpr, "register_smodule takes a subclass of SparseOpr")
        SMODULE_MAP.update(dict.fromkeys(listed, kind))
        return kind

    return file


_BUILT_IN: tuple[tuple[tuple[str, ...], tuple[type[nn.Module], ...]], ...] = (
    # Weights, not biases; nn.Module stands for all classes that have no row here.
    (("weight",), (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.Module)),
    (("weight_*",), (nn.RNNBase, nn.RNNCellBase)),  # of all layers, directions and projections
    (("*_proj_weight",), (nn.MultiheadAttention,)),  # the projection of the output is a linear layer of its own
    ((), (nn.Embedding, nn.EmbeddingBag)),  # nothing is multiplied with a table, so its zeros save nothing
    ((), (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)),  # scales of channels
    ((), (torch.jit.ScriptModule,)),  # its modules take no masks
)
for _weights, _sources in _BUILT_IN:
    register_smodule(_sources)(type("BuiltIn", (SparseOpr,), {"weights": _weights}))


def pruned_weights(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    """The class under which unstructured sparsity handles a module, and the globs of the parameters that it prunes."""
    kind = next(kind for kind in type(module).__mro__ if kind in SMODULE_MAP)
    return kind, SMODULE_MAP[kind].weights
