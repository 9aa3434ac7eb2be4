"""Which modules a trace keeps as one call, and which run their own code."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

# Containers and composites of torch.nn: not one op each; the modules inside them are traced.
_COMPOSITES: tuple[type[nn.Module], ...] = (
    nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder,
    nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


@dataclass(frozen=True)
class LeafPolicy:
    """Decides which modules are leaves: those of `torch.nn` except containers, `skip` globs, and classes in `extra`.

    By path, with the reason: `own_code`, modules that run their own code untraced while their layers are handled one by
    one; `untouched`, modules that stay as they are, with everything inside.
    """

    skip: tuple[str, ...] = ()
    extra: tuple[type[nn.Module], ...] = ()
    own_code: Mapping[str, str] = field(default_factory=dict)
    untouched: Mapping[str, str] = field(default_factory=dict)

    def cut(self, path: str, reason: str) -> LeafPolicy:
        """The same policy with one more module that runs its own code or, where it does already, stays untouched."""
        if path in self.own_code:
            return dataclasses.replace(self, untouched={**self.untouched, path: reason})
        return dataclasses.replace(self, own_code={**self.own_code, path: reason})

    def below(self, path: str, module: nn.Module) -> LeafPolicy:
        """The same policy for `module`, which is at `path`, with paths relative to it."""
        names = {f"{path}.{name}" if path and name else path or name: name for name, _ in module.named_modules()}
        own_code, untouched = (
            {names[full]: reason for full, reason in reasons.items() if full in names}
            for reasons in (self.own_code, self.untouched)
        )
        skipped = (name for full, name in names.items() if self.is_skipped(full))
        return LeafPolicy(tuple(map(glob.escape, skipped)), self.extra, own_code, untouched)

    def is_skipped(self, path: str) -> bool:
        return path in self.untouched or any(fnmatch.fnmatchcase(path, pattern) for pattern in self.skip)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        if self.is_skipped(path) or (self.extra and type(module) in self.extra):
            return True
        kind = type(module).__bases__[0] if is_parametrized(module) else type(module)
        of_torch = kind.__module__.startswith(("torch.nn.", "torch.ao.nn."))
        return (of_torch or isinstance(module, torch.jit.ScriptModule)) and kind not in _COMPOSITES
