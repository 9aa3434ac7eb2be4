"""LoRA adapters of peft on packed layers: added to a loaded model, saved in peft's own format, loaded again.

peft chooses the adapter of a layer by the layer's class: `lora_class()` is the one for `QuantLinear`. It is created at
its first use, since peft is optional. Most checks here are for adapters that peft would load without an error, but
that would then compute something else than where they were trained.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import warnings
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm.finetuning.layers.adapted_product import adapted_product, trains
from sparsebit.llm.layers.float_weight import FloatLinear
from sparsebit.llm.layers.quant_linear import QuantLinear, separate_parallel_layers
from sparsebit.llm.models.architectures import ARCHITECTURES
from sparsebit.llm.models.file_checksums import check_files
from sparsebit.llm.models.hub_classes import package
from sparsebit.tensor_files import load_tensors

log = logging.getLogger(__name__)
# Initial values of peft's adapters that do not change the weight below.
_STARTS_APART = ("gaussian", "eva", "orthogonal")


def add_adapter(
    model: Any,
    *,
    rank: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
    base: str = "",
) -> Any:
    """A model of peft around `model`: a new adapter on each linear layer of the blocks; everything else is frozen.

    `targets`: ends of the names of the layers that get one, such as `q_proj`; all, if none are given. `base`: the
    folder of the model, which the adapter's files name. The adapters' weights are float32.
    """
    peft = peft_module()
    names = adapted_layers(model, targets)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_short_names(model, names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )
    config._register_custom_module({QuantLinear: lora_class()})
    separate_parallel_layers(model)  # each needs its own weight for the backward
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(target_parameters=|_pattern keys)")  # see `_check_left_out`
            wrapped = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"targets={', '.join(targets)}: peft has no adapter for these layers ({error})") from error
    _check_left_out(wrapped, names, targets, config)
    _start(wrapped, seed)
    config.base_model_name_or_path = base or None  # peft puts in the name that the config of the model has
    return wrapped


def _check_left_out(wrapped: Any, names: Sequence[str], targets: Sequence[str], config: Any) -> None:
    """Report layers without an adapter: peft mistakes the names of experts for stacked tensors."""
    found = {name for name, part in wrapped.get_base_model().named_modules() if hasattr(part, "lora_A")}
    left = [name for name in names if name not in found]
    if not left:
        return
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in left}))
    if targets:
        why = f"peft has no adapter for {kinds} of {wrapped.config.model_type!r} models"
        raise ConfigError(f"targets={', '.join(targets)}: {why}, since it takes them for experts; leave them out")
    log.warning("%d layers get no adapter (%s): peft takes them for experts", len(left), kinds)
    config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}  # which peft has put in


@torch.no_grad()
def _start(wrapped: Any, seed: int) -> None:
    """Draw the initial values of each adapter by the name of its layer, independent of which other layers exist."""
    for name, part in wrapped.get_base_model().named_modules():
        for own in getattr(part, "lora_A", {}).values():
            key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
            bound = own.weight.shape[1] ** -0.5  # as peft's own: Kaiming's uniform distribution with a = sqrt(5)
            values = torch.empty(own.weight.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(key))
            own.weight.copy_(values)


def load_adapter(model: Any, folder: str | os.PathLike[str], *, is_trainable: bool = False) -> Any:
    """A model of peft around a model of `sparsebit.llm.load`, with the adapter of a folder.

    The folder is in peft's own format; adapters of others fit too, if they are LoRA for linear layers.
    """
    peft = peft_module()
    path = Path(folder)
    settings, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    problem, tensors = None, dict[str, Tensor]()
    try:
        config: Any = peft.PeftConfig.from_pretrained(str(path)) if settings.is_file() else None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{settings} cannot be read ({error!r})") from error
    if config is None:
        problem = f"has no {settings.name}; give the folder of an adapter"
    elif not isinstance(config, peft.LoraConfig):
        problem = f"is an adapter of type {config.peft_type}; allowed: LORA"
    elif not weights.is_file():
        problem = f"has no {weights.name}; adapters are read from safetensors only"
    else:
        check_files(path)
        tensors = load_tensors(weights)[0]
        damaged = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if damaged:
            problem = f"has NaN or infinite values in {damaged[0]}; train the adapter again"
    if problem is not None:
        raise CheckpointError(f"{path} {problem}")
    _check_start(config, model, path)
    config._register_custom_module({QuantLinear: lora_class()})
    if is_trainable:
        separate_parallel_layers(model)
    try:
        wrapped = peft.PeftModel.from_pretrained(model, str(path), config=config, is_trainable=is_trainable)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit the model ({error})") from error
    _check_names(wrapped, tensors.keys(), path)
    return wrapped


def _check_names(wrapped: Any, given: Set[str], path: Path) -> None:
    """Raise for an adapter of other layers than the model has: peft would keep their initial values, or drop them."""
    wanted = set(peft_module().get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    missing, unknown = sorted(wanted - given), sorted(given - wanted - wrapped.state_dict().keys())
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which the model has no place for"
        raise CheckpointError(
            f"{path} does not fit the model: it {what} ({len(missing)} tensors are missing, {len(unknown)} are left "
            "over); is it an adapter of another model?"
        )


def _check_start(config: Any, model: Any, path: Path) -> None:
    """Raise for an adapter whose initial values were taken out of the float weight: packed weights still have them.
    Those of others do not matter, since the file overwrites them.
    """
    start = config.init_lora_weights
    if not isinstance(start, str) or not any(isinstance(part, QuantLinear) for part in model.modules()):
        return
    if start.lower() not in _STARTS_APART:
        raise CheckpointError(
            f"{path} has init_lora_weights={start!r}, which changed the weights below the adapter; packed weights are "
            "those from before. Convert it to plain LoRA: peft's path_initial_model_for_weight_conversion"
        )
    config.init_lora_weights = True


def adapted_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """The linear layers of the blocks, packed or float, whose names end in one of `targets`; all, without any."""
    kinds = {name: part.kind for name, part in model.named_modules() if isinstance(part, FloatLinear)}
    if kinds:
        name, kind = next(iter(kinds.items()))
        raise ConfigError(
            f"{name} and {len(kinds) - 1} other layers have {kind} weights: adapters are trained on whole numbers of "
            "2, 3, 4 or 8 bits (rtn, gptq, awq), or on a float model"
        )
    inside = f"{blocks_path(model)}."
    every = [name for name, part in model.named_modules() if _is_linear(part) and name.startswith(inside)]
    found = [name for name in every if not targets or any(f".{name}".endswith(f".{target}") for target in targets)]
    if not found:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in every}))
        raise ConfigError(f"targets={', '.join(targets)}: no layer is called so; there are {known}")
    return found


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, (QuantLinear, nn.Linear))


def blocks_path(model: Any) -> str:
    """The path of the blocks of a loaded model, whose linear layers may be packed."""
    row = ARCHITECTURES.get(str(model.config.model_type))
    if row is not None:
        return row.blocks
    counts = {
        name: sum(map(_is_linear, part.modules()))
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len({type(one) for one in part}) == 1
    }
    if not any(counts.values()):
        raise ConfigError(
            f"model type {model.config.model_type!r} is not known, and no list of equal blocks in it has linear layers"
        )
    return str(max(counts, key=lambda name: counts[name]))


def peft_module() -> Any:
    """The package peft."""
    return package("peft", "llm", "fine-tuning with adapters")


def _short_names(model: Any, names: Sequence[str]) -> list[str]:
    """The last words of the names, as servers expect them; the whole names, if others end in the same words."""
    ends = {name.rsplit(".", 1)[-1] for name in names}
    meant = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in ends]
    return sorted(ends) if sorted(meant) == sorted(names) else sorted(names)


def __getattr__(name: str) -> Any:
    """`PackedLoraLinear` under the name by which pickle looks for it."""
    if name == "PackedLoraLinear":
        return lora_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def lora_class() -> Any:
    """The adapter of a packed layer, a class of peft's; created when it is needed, since peft is an extra."""
    from peft.tuners.lora.layer import LoraLayer

    class PackedLoraLinear(nn.Module, LoraLayer):
        """`base_layer(x) + B(A(x)) * scaling`. A and B are float32, and compute in the type of x."""

        def __init__(
            self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **_: Any
        ) -> None:
            super().__init__()
            LoraLayer.__init__(self, base_layer)
            self._active_adapter = adapter_name
            self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **_: Any) -> Tensor:
            """`adapter_names`: which adapter each element of the batch takes; peft calls the model with these."""
            if adapter_names is not None and not self.disable_adapters:
                self._check_forward_args(x, adapter_names=adapter_names)  # type: ignore[no-untyped-call]
                mixed: Tensor = self._mixed_batch_forward(x, adapter_names=adapter_names)
                return mixed
            names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
            if len(names) == 1 and self._trains_plainly(names[0], x):
                down, up, _ = self._parts(names[0])
                base: Any = self.base_layer
                return adapted_product(base, x, down.weight, up.weight, self.scaling[names[0]])
            result: Tensor = self.base_layer(x)
            for name in names:
                down, up, dropout = self._parts(name)
                inner = F.linear(dropout(x), down.weight.to(x.dtype))
                bias = None if up.bias is None else up.bias.to(x.dtype)
                result = result + F.linear(inner, up.weight.to(x.dtype), bias) * self.scaling[name]
            return result

        def _parts(self, name: str) -> tuple[Any, Any, Any]:
            return self.lora_A[name], self.lora_B[name], self.lora_dropout[name]

        def _trains_plainly(self, name: str, x: Tensor) -> bool:
            """Whether the adapter is two matrices and nothing else, and this is a training step."""
            down, up, dropout = self._parts(name)
            return up.bias is None and isinstance(dropout, nn.Identity) and trains(self.base_layer, x, down.weight)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise ConfigError("a packed layer cannot take an adapter into its codes; use sparsebit.llm.merge")

        def unmerge(self) -> None:
            return None

        def get_delta_weight(self, adapter: str) -> Tensor:
            down, up, _ = self._parts(adapter)
            delta: Tensor = up.weight @ down.weight * self.scaling[adapter]
            return delta

    PackedLoraLinear.__qualname__ = PackedLoraLinear.__name__
    return PackedLoraLinear
