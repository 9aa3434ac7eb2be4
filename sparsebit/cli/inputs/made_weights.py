"""Whether a factory returns random weights; checked if no file of weights is given."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

MOST_SECONDS = 30.0  # a slower factory is not called a second time
MOST_BYTES = 4 << 30
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def why_random(model: nn.Module, factory: Callable[[], Any] | None, seconds: float = 0.0) -> str:
    """Why the model's weights seem to be random; empty if they do not.

    The factory is called again: random weights differ between calls; loaded weights, and those from a fixed seed, do
    not. If it cannot or should not be called again (an object, a cached model, a slow or large one), the model's
    normalization layers are checked instead, because training changes their parameters.
    """
    again = None
    if factory is not None and seconds <= MOST_SECONDS and _num_bytes(model) <= MOST_BYTES:
        again = _made_again(factory)
    if again is None or again is model:
        return _as_initialized(model)
    one, other = _tensors(model), _tensors(again)
    if one.keys() != other.keys():
        return f"it makes {len(one)} tensors at one call, {len(other)} at another, or calls them differently"
    names = [name for name, tensor in one.items() if not _is_equal(tensor, other[name])]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of its {len(one)} tensors have other values at every call ({shown})"


def _made_again(factory: Callable[[], Any]) -> nn.Module | None:
    """Call the factory again without side effects: its prints are dropped, and the random generators are restored.

    None if the factory cannot be called twice.
    """
    with (
        _same_generators(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            found = factory()
        except (Exception, SystemExit):  # some factories can be called only once
            return None
    return found if isinstance(found, nn.Module) else None


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Restore the global generators of torch, Python and numpy at the end."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(of_python)
    if numpy is not None:
        numpy.random.set_state(of_numpy)


def _as_initialized(model: nn.Module) -> str:
    """Why the model seems untrained: none of its normalization layers differs from a new one."""
    begin = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
    norms = [m for m in model.modules() if isinstance(m, _NORMS) and not any(map(is_lazy, m.parameters()))]
    learned = [_tensors(norm) for norm in norms if next(norm.parameters(), None) is not None]
    known = [(values[name], first) for values in learned for name, first in begin.items() if name in values]
    if not learned or not all(bool((tensor == first).all()) for tensor, first in known):
        return ""
    return f"its {len(learned)} normalization layers have the values that they begin training with"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if is_lazy(one) or is_lazy(other) or "meta" in (one.device.type, other.device.type):
        return True  # not initialized yet
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))  # NaN equals NaN


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(model).values() if not is_lazy(tensor))
