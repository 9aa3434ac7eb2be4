"""`Skeleton`: a model without weights; the weights of its parts are read from files when needed, and freed again.

`fill` reads the weights of a module, `empty` frees them. The names of tensors in files differ from those in the model:
transformers' own renaming rules translate them (`names`). Three things differ from transformers' model: experts are
separate linear layers, `Conv1D` layers are linear layers with the transposed weight, and tied weights with different
values in the files are not tied. Buffers without a file are recomputed, and proven to depend on the config alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.llm.models.architectures import as_linear_layers
from sparsebit.llm.models.hub_classes import auto_class, load_config, need_imported
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.separate_experts import separate_experts
from sparsebit.progress import track

log = logging.getLogger(__name__)
# Files with the stacked experts of a block, as transformers has them in memory.
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
# Types whose values are the weights themselves; 8-bit floats and whole numbers come with scales.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Skeleton:
    """`model`: the architecture of the folder on torch's meta device, in `dtype`.

    `names`: the name in the files of each tensor of the model. Stacked experts are `SeparateExperts`, and `Conv1D`
    layers are linear: `transposed` names their weights, which the files keep as `(in, out)`.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self.folder, self.dtype, self.device = folder, dtype, torch.device(device)
        config = load_config(folder.path, trust_remote_code=trust_remote_code)
        self.model = empty_model(config, dtype=dtype, trust_remote_code=trust_remote_code)
        renamings, converters = _rules(self.model)
        if not any(_STACKED.search(name) for name in folder):
            converters = separate_experts(self.model, converters)
        self.names = _file_names(self.model, folder, renamings, converters)
        self.transposed = as_linear_layers(self.model)
        self._untie()
        self._drop_first_values()

    def _untie(self) -> None:
        """Separate weights whose values in the files differ, as transformers does; correct the config for others."""
        for target, source in dict(self.model.all_tied_weights_keys).items():
            own, other = self.names.get(target), self.names.get(source)
            if own is None or other is None or own == other:
                continue
            if not torch.equal(self.folder.tensor(own), self.folder.tensor(other)):
                text = "%s: its config ties %s to %s, and its files differ: not tied"
                log.warning(text, self.folder.path, own, other)
                self.model.all_tied_weights_keys.pop(target)
                self.model.config.tie_word_embeddings = self.folder.config["tie_word_embeddings"] = False

    def _drop_first_values(self) -> None:
        """Move everything that the files hold to the meta device: some classes create initial values elsewhere."""
        for path, part in self.model.named_modules():
            for own, tensor in own_tensors(part).items():
                name = f"{path}.{own}" if path else own
                if not tensor.is_meta and (own in part._parameters or name in self.names):
                    set_tensor(part, own, tensor.to("meta"))

    def fill(self, path: str, *, without: Sequence[str] = ()) -> nn.Module:
        """The module at `path` with its weights, and with those of its submodules, except for those at `without`."""
        module: nn.Module = self.model.get_submodule(path)
        skipped = tuple(f"{name}." for name in without)
        for full, part in module.named_modules(prefix=path):
            if f"{full}.".startswith(skipped):
                continue
            restore_buffers(self.model, part, self.device)
            for own, tensor in own_tensors(part).items():
                if tensor.is_meta:
                    set_tensor(part, own, self.read(f"{full}.{own}" if full else own, tensor).to(self.device))
        return module.eval()

    def check_shapes(self) -> None:
        """Raise for files that cannot be read, lack a tensor of the model or have one in another shape."""
        shapes = self.folder.shapes()
        for name, wanted in self.model.state_dict().items():
            found = shapes[self._file_name(name)]
            self._need_shape(name, found[::-1] if name in self.transposed else found, wanted)

    def read(self, name: str, wanted: Tensor) -> Tensor:
        """A tensor of the model from the files, on the CPU, in the model's type; `wanted`: its shape."""
        value = self.in_files(name, self.folder.tensor(self._file_name(name)))
        self._need_shape(name, tuple(value.shape), wanted)
        if wanted.is_floating_point() and value.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.folder.path}: {name} is kept as {value.dtype}, and the architecture wants floats: the weights "
                "are quantized, and its config.json has no quantization_config that says how; give the float model"
            )
        return value.to(self.dtype if wanted.is_floating_point() else wanted.dtype)

    def in_files(self, name: str, value: Tensor) -> Tensor:
        """A tensor of the model in the layout of the files, or one of the files in the layout of the model."""
        return value.t().contiguous() if name in self.transposed else value

    def _file_name(self, name: str) -> str:
        if name not in self.names:
            raise CheckpointError(
                f"{self.folder.path} has no tensor for {name} of {type(self.model).__name__}, or keeps it in another "
                "form: give a whole checkpoint of this architecture"
            )
        return self.names[name]

    def _need_shape(self, name: str, found: tuple[int, ...], wanted: Tensor) -> None:
        if found != tuple(wanted.shape):
            shapes = f"{name} has the shape {found}, and the architecture wants {tuple(wanted.shape)}"
            raise CheckpointError(f"{self.folder.path}: {shapes}")

    def check_unused(self, packed: Collection[str] = ()) -> None:
        """Log the tensors of the files that the architecture does not use; `packed`: those of packed layers.

        Tensors of further layers or experts are an error: the model would run with a part of its weights.
        """
        used = {self.names[name] for name in self.model.state_dict() if name in self.names} | set(packed)
        expected = [*(self.model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        unused = [name for name in self.folder if name not in used and not any(re.search(p, name) for p in expected)]
        numbered = {pattern for name in used for pattern in _numbered(name)}
        further = [name for name in unused if not numbered.isdisjoint(_numbered(name))]
        if further and not self.folder.config.get("num_nextn_predict_layers"):  # layers that predict further tokens
            raise CheckpointError(
                f"{self.folder.path}: its files hold {len(further)} tensors of layers or experts that its config.json "
                f"does not have ({', '.join(further[:2])}): the config is of another model, or was changed"
            )
        if unused:
            log.warning(
                "%s: %d tensors have no place in %s, and are not used (%s): does config.json belong to these files?",
                *(self.folder.path, len(unused), type(self.model).__name__, ", ".join(unused[:3])),
            )

    def stored_type(self, name: str) -> torch.dtype:
        """The type in which the files store a tensor of the model; results get the same, but float32 for float64."""
        found = self.folder.tensor(self.names[name]).dtype
        return torch.float32 if found == torch.float64 else found

    def empty(self, path: str) -> None:
        """Free the weights of the module at `path`."""
        self.model.get_submodule(path).to("meta")


def empty_model(config: Any, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The architecture on the meta device, which takes no memory."""
    auto = auto_class(config)
    if trust_remote_code is False and type(config) not in auto._model_mapping:
        name = ", ".join(config.architectures or ()) or type(config).__name__
        raise CheckpointError(f"model type {config.model_type!r} is not a causal language model ({name})")
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # classes of models raise any kind of exception, for example for a missing package
        need_imported(error)
        why = f"cannot be built from its config ({type(error).__name__}: {error})"
        raise CheckpointError(f"the architecture {config.model_type!r} {why}") from error
    return model.eval()


def restore_buffers(model: Any, part: nn.Module, device: torch.device) -> None:
    """Compute the buffers of `part` that no file holds, such as rotary frequencies, by transformers' `_init_weights`.
    One that stays unchanged is an error, since the model would compute with arbitrary numbers.
    """
    missing = [name for name in part._non_persistent_buffers_set if getattr(part._buffers.get(name), "is_meta", False)]
    if not missing:
        return
    # As transformers does it: by the innermost model that holds the part, such as a tower for images.
    inner = [one for one in model.modules() if hasattr(one, "_init_weights") and any(part is x for x in one.modules())]
    owner = inner[-1]
    first = _computed(owner, part, missing, device, mark=False)
    has_flags = any(tensor.dtype == torch.bool for tensor in first.values())
    second = _computed(owner, part, missing, device, mark=True) if has_flags else first
    left = [name for name in missing if _is_marked(first[name]) or not torch.equal(first[name], second[name])]
    if left:
        raise CheckpointError(
            f"{type(part).__name__} of {type(model).__name__} computes {', '.join(left)} when it is built, and its "
            "transformers class does not compute them again: this architecture cannot be read block by block"
        )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of the module itself, by name."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the module's parameter or buffer `name` by `value`."""
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value


def _rules(model: Any) -> tuple[list[Any], list[Any]]:
    """How transformers renames the tensors of files, and which of its tensors it builds from several of them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def _file_names(model: Any, folder: ModelFolder, renamings: list[Any], converters: list[Any]) -> dict[str, str]:
    """The name in the files of each tensor, by transformers' own rules, without those that it computes from several."""
    from transformers.core_model_loading import rename_source_key

    known = model.state_dict()
    names: dict[str, str] = {}
    for name in folder:
        found, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if converter is None:
            names[found] = name
    for target, source in dict(model.all_tied_weights_keys).items():
        if target in names or source in names:
            names.setdefault(target, names.get(source, ""))
            names.setdefault(source, names[target])
    return names


def _numbered(name: str) -> list[str]:
    """The name with each of its numbers in turn replaced by a star.

    >>> _numbered("layers.3.experts.0.up")
    ['layers.*.experts.0.up', 'layers.3.experts.*.up']
    """
    found = re.finditer(r"(?<=\.)\d+(?=\.)", name)
    return [f"{name[: number.start()]}*{name[number.end() :]}" for number in found]


def _computed(
    model: Any, part: nn.Module, names: Sequence[str], device: torch.device, *, mark: bool
) -> dict[str, Tensor]:
    """The buffers as the model's class computes them over arbitrary values; those of flags are `mark`."""
    buffers = {name: buffer for name in names if (buffer := part._buffers[name]) is not None}
    for name, buffer in buffers.items():
        value = torch.nan if buffer.is_floating_point() else mark
        if buffer.dtype != torch.bool and not buffer.is_floating_point():
            value = torch.iinfo(buffer.dtype).min
        part._buffers[name] = torch.full(buffer.shape, value, dtype=buffer.dtype, device=device)
    model._init_weights(part)
    return {name: buffer for name in names if (buffer := part._buffers[name]) is not None}


def _is_marked(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:  # detected by the difference between two marks
        return False
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


_CHUNK = 1 << 24  # numbers that are checked together


def check_weights(skeleton: Skeleton, *, scan: bool) -> None:
    """Raise for unreadable files, missing tensors and wrong shapes; `scan`: also for NaN and infinity. Matrices of
    zeros cause a warning: an interrupted download leaves them. A part of one tensor is in memory at a time.
    """
    skeleton.check_shapes()
    names = track(list(skeleton.folder), "looking for NaN in the weights") if scan else ()
    zeros = [name for name in names if not _need_finite(skeleton.folder, name)]
    if zeros:
        log.warning(
            "%s: %d weights are all zero (%s): if the model was not trained so, its download is not whole",
            *(skeleton.folder.path, len(zeros), ", ".join(zeros[:3])),
        )
    skeleton.folder.close()


def _need_finite(folder: ModelFolder, name: str) -> bool:
    """Raise for NaN and infinity; returns whether a number is not zero (vectors, such as biases, may be all zero)."""
    part: Any = folder.part(name)
    shape = part.get_shape()
    rows = max(1, _CHUNK * shape[0] // max(1, torch.Size(shape).numel())) if shape else 1
    has_values = len(shape) < 2
    for start in range(0, shape[0] if shape else 1, rows):
        values = part[start : start + rows] if shape else folder.tensor(name)
        if not values.is_floating_point():
            return True
        has_values = has_values or bool(values[0].any()) or bool(values.any())
        # A sum is five times faster than `isfinite`, and is not finite where a value is not.
        if not values.sum(dtype=torch.float32).isfinite() and not values.float().isfinite().all():
            file = folder.files[name]
            raise CheckpointError(f"{file}: {name} has NaN or infinite values: it is damaged; download it again")
    return has_values
