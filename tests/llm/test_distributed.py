"""Under torchrun, two gloo processes give the results of one: fine-tuning, calibration and the pipeline."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebit.execution.distributed import is_distributed
from sparsebit.llm import Calibration, Recipe, finetune, quantize
from sparsebit.llm.finetuning.distributed.pipeline_training import PipelineTraining
from sparsebit.llm.process_group import joined
from tests.llm.finetuning.tasks import TUNING, instructions, packed_model
from tests.llm.tiny_models import write_text
from tests.two_ranks import torchrun

GPTQ = Recipe(bits=3, group_size=32, sweeps=1)


def everything(folder: Path, output: Path) -> None:
    """What is compared: adapters of data parallel training and of a pipeline, and quantized models."""
    model, data = folder / "packed-llama-4", folder / "data.jsonl"
    finetune(model, data, output / "adapter", TUNING, save_every=1)
    plain = replace(TUNING, dropout=0.0, num_epochs=2)
    pipeline = is_distributed()
    if pipeline:  # broken off after its second step, and started again
        step = PipelineTraining.step

        def dying(self: PipelineTraining, number: int) -> None:
            if number == 2:
                raise InterruptedError
            step(self, number)

        PipelineTraining.step = dying  # type: ignore[method-assign]
        with contextlib.suppress(InterruptedError):
            finetune(folder / "packed-qwen2-4", data, output / "pipeline", plain, parallel="pipeline", save_every=1)
        PipelineTraining.step = step  # type: ignore[method-assign]
    way: Any = "pipeline" if pipeline else "ddp"
    made = finetune(folder / "packed-qwen2-4", data, output / "pipeline", plain, parallel=way, save_every=1)
    assert made.num_resumed == (2 if pipeline else 0)
    calibration = Calibration(folder / "text.txt", num_samples=7, length=16)
    quantize(folder / "float-llama", output / "gptq", GPTQ, calibration, batch_size=2, check=False)
    mixed = Recipe(method="rtn", group_size=32, candidate_bits=(2, 4), average_bits=3.0)
    quantize(folder / "float-llama", output / "mixed", mixed, calibration, batch_size=2, check=False)
    plainly = Recipe(method="rtn", group_size=32, scale_search="none")
    quantize(folder / "float-llama", output / "without_text", plainly)  # loaded by transformers on rank 0 alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the results of one process in `one`, those of two in `two`."""
    pytest.importorskip("peft")
    pytest.importorskip("compressed_tensors")
    made = tmp_path_factory.mktemp("distributed")
    packed_model(made)
    packed_model(made, kind="qwen2", num_hidden_layers=3)
    instructions(made)
    write_text(made / "text.txt")
    (made / "one").mkdir()
    (made / "two").mkdir()
    everything(made, made / "one")
    torchrun(__file__, made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "pipeline"])
def test_adapters_of_two_processes(folder: Path, kind: str) -> None:
    one, two = (load_file(folder / name / kind / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)
    losses = [json.loads((folder / name / kind / "training.json").read_text())["losses"] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "mixed", "without_text"])
def test_a_model_calibrated_by_two_processes(folder: Path, name: str) -> None:
    one, two = (
        {key: value for file in (folder / part / name).glob("*.safetensors") for key, value in load_file(file).items()}
        for part in ("one", "two")
    )
    assert one.keys() == two.keys() and any(key.endswith("weight_packed") for key in one)
    for key, value in one.items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-6, msg=key)
        else:
            assert torch.equal(two[key], value), key
    assert not list((folder / "two").glob("*.partial"))


def test_fewer_batches_than_processes(tmp_path: Path) -> None:
    from sparsebit.errors import ConfigError
    from sparsebit.llm.models.architectures import architecture_of
    from sparsebit.llm.models.model_folder import ModelFolder
    from sparsebit.llm.models.skeleton import Skeleton
    from sparsebit.llm.process_group import Rank
    from sparsebit.llm.quantizing.block_walk import BlockWalk
    from tests.llm.tiny_models import saved, tiny_model

    skeleton = Skeleton(ModelFolder(saved(tiny_model(num_hidden_layers=1), tmp_path / "model")))
    rank = Rank(0, 3, torch.device("cpu"))
    with pytest.raises(ConfigError, match="are 2 batches for 3 processes"):
        BlockWalk(
            skeleton,
            architecture_of(skeleton.model),
            torch.zeros(4, 8).long(),
            with_float=False,
            batch_size=2,
            rank=rank,
        )


if __name__ == "__main__":
    from tests import torchvision_shim

    torchvision_shim.install()
    with joined("cpu"):
        everything(Path(sys.argv[1]), Path(sys.argv[1]) / "two")
