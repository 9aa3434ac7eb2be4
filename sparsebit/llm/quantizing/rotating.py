"""`rotate_model`: rotates the hidden states of a model in blocks of channels, without a change of its outputs.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (NeurIPS 2024), section 4.1, with Hadamard
matrices on blocks as large as the groups that share a scale. A norm by the root mean square is invariant to a rotation.
Its weights are multiplied into the layers that read it; then `x R` passes between the blocks instead of `x`: layers
that read it have `W R`, layers that write it `R W`. Nothing is added at run time. Readers and writers are found by
running each block, and each block must prove that it computes the same; otherwise the model is an error.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.folders import replace_text
from sparsebit.llm.checkpoint.packed_folder import copy_small_files, write_config
from sparsebit.llm.models.architectures import architecture_of, linears
from sparsebit.llm.models.input_scaling import find_fold
from sparsebit.llm.models.model_folder import ModelFolder, Shards
from sparsebit.llm.models.separate_experts import experts_in
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.numerics.hadamard import is_power_of_two, rotate_blocks
from sparsebit.progress import track

_TOLERANCE = 1e-3  # of the largest number; all is computed in float32


@torch.no_grad()
def rotate_model(source: ModelFolder, target: Path, size: int, *, trust_remote_code: bool = False) -> ModelFolder:
    """The model of `source` with hidden states rotated in blocks of `size` channels, written to the folder `target`.

    One block at a time is in memory. If the output layer shares its weight with the embeddings, it gets a separate one.
    Experts, norms that subtract a mean, and norms after layers are errors.
    """
    skeleton = Skeleton(source, trust_remote_code=trust_remote_code)
    width, problem = int(skeleton.model.config.get_text_config().hidden_size), None
    if not is_power_of_two(size) or width % size:
        problem = f"a group_size of {size}: allowed: a power of two that divides the {width} channels of hidden states"
    elif experts_in(skeleton.model):
        problem = "a model of experts: what chooses the experts reads the hidden states too"
    if problem is not None:
        raise ConfigError(f"rotate with {problem}")
    rotation = _Rotation(skeleton, size)
    target.mkdir(parents=True)
    copy_small_files(source.path, target)
    shards = Shards(target, rotation.walk.num_blocks + 1)
    for number in track(range(rotation.walk.num_blocks), "rotating blocks"):
        shards.write(rotation.block(number))
    shards.write(rotation.outside())
    shards.finish()
    write_config(target, {**source.config, "tie_word_embeddings": False})
    return ModelFolder(target)


def rotated_beside(output: Path, source: ModelFolder, size: int, *, trust_remote_code: bool = False) -> ModelFolder:
    """The rotated model in `OUTPUT.rotated`, written again: the same bytes each time, for a run that continues."""
    folder = _folder_beside(output)
    marker = folder / "rotation.json"
    if folder.exists() and not marker.is_file():
        raise ConfigError(f"{folder} exists, and is not of an interrupted run; remove it or give another output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    replace_text(marker, json.dumps({"source": str(source.path)}))
    return rotate_model(source, folder / "model", size, trust_remote_code=trust_remote_code)


def remove_rotated(output: Path) -> None:
    """Remove the folder that `rotated_beside` has written."""
    shutil.rmtree(_folder_beside(output), ignore_errors=True)


def _folder_beside(output: Path) -> Path:
    return output.with_name(f"{output.name}.rotated")


class _Rotation:
    """The model block by block, with a few arbitrary tokens that prove each block."""

    def __init__(self, skeleton: Skeleton, size: int) -> None:
        self.skeleton, self.size = skeleton, size
        architecture = architecture_of(skeleton.model)
        self.path = architecture.blocks
        vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
        self.tokens = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
        self.walk = BlockWalk(skeleton, architecture, self.tokens, with_float=False)
        self.walk.start()
        self.last: Tensor | None = None

    def block(self, number: int) -> dict[str, Tensor]:
        """The tensors of a rotated block, by their names in files."""
        path = f"{self.path}.{number}"
        block = self.skeleton.fill(path)
        stages = self.walk.stages(block)
        changed = copy.deepcopy(block)
        folds = {stage: find_fold(block, stage, self.walk.run_first) for stage in stages}
        norms: dict[Any, Any] = {stage: changed.get_submodule(one.source) for stage, one in folds.items() if one}
        # What a stage can be scaled in may also be a linear layer before it (its weight has two dimensions).
        norms = {stage: one for stage, one in norms.items() if one.weight.ndim == 1}
        hidden, modules = self.walk.present("changed", 0), linears(changed)
        for stage, fold in folds.items():
            for layer in (modules[name] for name in stage):
                if stage in norms and fold is not None:
                    gain = norms[stage].weight + fold.offset
                    layer.weight.data = rotate_blocks(layer.weight * gain, self.size)
                # A layer as wide as the hidden states is taken to write them; `_prove` refuses a block where that is
                # wrong.
                elif layer.out_features == hidden.shape[-1]:
                    layer.weight.data = rotate_blocks(layer.weight.T, self.size).T.contiguous()
                    if layer.bias is not None:
                        layer.bias.data = rotate_blocks(layer.bias, self.size)
        for stage, norm in norms.items():
            norm.weight.data = torch.ones_like(norm.weight) - folds[stage].offset  # type: ignore[union-attr]
        self.last = self.walk.run_first(block)
        found = self.walk.run_some(changed, rotate_blocks(hidden, self.size))
        self._prove(found, rotate_blocks(self.last, self.size), path)
        found_tensors = self._as_stored({f"{path}.{name}": value for name, value in changed.state_dict().items()})
        self.walk.advance(block, stages)
        self.skeleton.empty(path)
        self.skeleton.folder.close()
        return found_tensors

    def outside(self) -> dict[str, Tensor]:
        """Embeddings, the last norm and the output layer, by their names in files."""
        assert self.last is not None
        self.walk.fill_outside(with_head=True)
        model: Any = self.skeleton.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        norms = [
            module
            for name, module in model.named_modules()
            if not name.startswith(f"{self.path}.")
            and isinstance(getattr(module, "weight", None), Tensor)
            and module.weight.ndim == 1
        ]
        if len(norms) != 1 or head is None:
            name = type(model).__name__
            raise ConfigError(f"rotate: {name} has {len(norms)} norms outside of its blocks: one is needed, and a head")
        expected = self.walk.behind_blocks(self.tokens, self.last)
        first = embedding(self.tokens)
        norm, weight = norms[0], head.weight.detach().clone()
        gain = norm.weight.detach().clone()
        head.weight = nn.Parameter(weight, requires_grad=False)  # no longer that of the embeddings
        embedding.weight.data = rotate_blocks(embedding.weight, self.size)
        self._prove(embedding(self.tokens), rotate_blocks(first, self.size), "the embeddings")
        found = expected * torch.nan
        for offset in (0.0, 1.0):  # a norm may multiply by 1 + weight
            if not _is_near(found, expected):
                head.weight.data = rotate_blocks(weight * (gain + offset), self.size)
                norm.weight.data = torch.ones_like(gain) - offset
                found = self.walk.behind_blocks(self.tokens, rotate_blocks(self.last, self.size))
        self._prove(found, expected, "the last norm")
        kept = {name: value for name, value in model.state_dict().items() if not value.is_meta}
        return self._as_stored(kept)

    def _prove(self, found: Tensor, expected: Tensor, what: str) -> None:
        if not _is_near(found, expected):
            raise ConfigError(
                f"rotate: {what} of {type(self.skeleton.model).__name__} does not compute the same with rotated hidden "
                "states (a norm that subtracts the mean, or one after a layer): leave rotate out"
            )

    def _as_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model by their names in files, in the types that the files have."""
        names, folder = self.skeleton.names, self.skeleton.folder
        usual = folder.tensor(next(iter(names.values()))).dtype
        found: dict[str, Tensor] = {}
        for name, value in tensors.items():
            in_file = names.get(name, name)
            if in_file in found:  # the output layer of tied embeddings
                in_file = name
            stored = folder.tensor(names[name]).dtype if name in names else usual
            found[in_file] = value.to(stored) if value.is_floating_point() else value
        return found


def _is_near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
