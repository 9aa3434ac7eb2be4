"""Training in two processes, for real: the ranks stay equal, and equal to one process on all the data."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, CaptureError, SparsebitError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.saving import checkpoint
from tests.quantization.tiny import Block, Residual, qconfig

pytestmark = pytest.mark.slow

KINDS = [("lsq", "lsq"), ("lsq+", "lsq+"), ("lsq", "pact"), ("dorefa", "uniform")]
Results = dict[str, Any]


class Blocks(nn.Module):
    """Two blocks and a head, without batch norms; one block has a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Gated(), nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.second(self.first(image)).mean(1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.fc2(F.gelu(self.fc1(self.norm(x))))


class Words(nn.Module):
    """Adds integers: quantizers in front of that sum never see a number to quantize."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, words: Tensor, shift: Tensor) -> Tensor:
        return self.fc(self.embed(words + shift).mean(1))


def images(rank: int | None = None) -> Tensor:
    """(8, 3, 8, 8), half of it for one rank; the second half has the wider range."""
    whole = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    whole[4:] *= 2
    return whole if rank is None else whole.chunk(2)[rank]


def labels(rank: int | None = None) -> Tensor:
    whole = torch.arange(8) % 4
    return whole if rank is None else whole.chunk(2)[rank]


def prepared(
    model: type[nn.Module],
    weight: str,
    activation: str,
    rank: int | None,
    *,
    follow_ranges: bool = False,
    **changes: Any,
) -> QuantModel:
    """`init_QAT` on this rank's data; the same weights everywhere."""
    torch.manual_seed(0)
    changes = {"W.QUANTIZER.TYPE": weight, "A.QUANTIZER.TYPE": activation, "A.QADD.ENABLE_QUANT": True, **changes}
    if activation == "pact":
        changes["A.QUANTIZER.PACT.ALPHA_VALUE"] = 1.0
    qmodel = QuantModel(model(), qconfig(changes, bits=4))
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(images(rank))
    qmodel.init_QAT(follow_ranges=follow_ranges)
    return qmodel.train()  # type: ignore[return-value]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(images(rank)).float(), labels(rank)).backward()
    optimizer.step()


def trained(model: nn.Module, rank: int | None, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        step(model, optimizer, rank)
    return model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def scales(qmodel: QuantModel) -> dict[str, Tensor]:
    return {f"{q.name} {n}": x.detach().clone() for q in qmodel.quantizers() for n, x in enumerate(q.qparams())}


# --- what each of two processes does


def on_a_rank(rank: int, folder: Path) -> Results:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    results: Results = {"calibrated": {}, "gradients": {}, "trained": {}}
    for kinds in KINDS:
        qmodel = prepared(Blocks, *kinds, rank)
        results["calibrated"][kinds] = scales(qmodel)
        model = DistributedDataParallel(qmodel)
        F.cross_entropy(model(images(rank)), labels(rank)).backward()
        results["gradients"][kinds] = {name: p.grad for name, p in qmodel.named_parameters() if p.grad is not None}
        qmodel = prepared(Residual, *kinds, rank)
        model = trained(DistributedDataParallel(qmodel), rank)
        results["trained"][kinds] = parameters(qmodel) | scales(qmodel)

    following = prepared(Blocks, "uniform", "uniform", rank, follow_ranges=True)
    replica = trained(DistributedDataParallel(following), rank)
    results["followed"] = scales(following)
    replica.eval()(images(rank))
    results["agreed"] = scales(following)

    saved = folder / "ddp"
    with counted_writes() as written:
        model.module.save(saved)  # on all ranks
        results["read at once"] = sorted(path.name for path in saved.iterdir())
        if rank == 0:
            model.module.save(folder / "by rank 0")  # which is not left waiting
        (folder / "file").touch()
        results["failure"] = failure(SparsebitError, lambda: model.module.save(folder / "file"))
    results["writes"] = [path.name for path in written]
    results["outputs"] = qmodel.eval()(images()).detach()

    torch.manual_seed(0)
    words = QuantModel(Words(), qconfig({"A.QUANTIZER.TYPE": "lsq", "A.QADD.ENABLE_QUANT": True}))
    words.prepare_calibration()
    call = (torch.arange(8).reshape(4, 2), torch.tensor(1))
    words(*call)
    words.init_QAT()
    model = DistributedDataParallel(words.train())
    for _ in range(2):  # the second forward would complain of parameters without a gradient
        model(*call).sum().backward()
    off = [parameter for q in words.quantizers() if q.fake_fused for parameter in q.parameters()]
    results["off"] = [parameter.requires_grad for parameter in off]

    qmodel = prepared(Residual, "uniform", "uniform", rank, **{"SCHEDULE.BN_TUNING": True})
    with qmodel.batchnorm_tuning(), torch.no_grad():
        for batch in images().split(2)[3 * rank : 3 + 3 * rank]:  # three batches of four on rank 0, one on rank 1
            qmodel(batch)
    results["tuned"] = parameters(qmodel)

    mesh = init_device_mesh("cpu", (2,))
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results["alike"] = parameters(trained(DistributedDataParallel(prepared(Blocks, "lsq+", "lsq+", rank)), rank).module)
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name in ("root", "blocks", "bfloat16"):
        qmodel = prepared(Blocks, "lsq+", "lsq+", rank)
        if name == "root":
            fully_shard(qmodel, mesh=mesh)
        else:
            more = {"mp_policy": bfloat16} if name == "bfloat16" else {}
            qmodel.shard(["first", "second"], mesh=mesh, **more)
        layer = qmodel.model.get_submodule("second.fc1")
        layer.weight_quantizer.register_forward_hook(
            lambda quantizer, args, _, name=name: seen.update({name: (args[0].dtype, quantizer.scale.dtype)})
        )
        results[name] = parameters(trained(qmodel, rank))
        qmodel.save(folder / name)
        results[f"{name} outputs"] = qmodel.eval()(images()).detach()
    results["dtypes"] = seen
    normed = prepared(Residual, "lsq", "lsq", rank)
    normed.shard(["stem"], mesh=mesh, mp_policy=bfloat16)
    results["normed"] = parameters(trained(normed, rank))
    results["refused"] = [
        failure(CalibrationError, qmodel.prepare_calibration),
        failure(CalibrationError, lambda: qmodel.export_onnx(images(), folder / "x.onnx")),
        failure(CalibrationError, lambda: qmodel.batchnorm_tuning().__enter__()),
        failure(CaptureError, lambda: qmodel.shard(["secnd"])),
    ]
    return results


@contextlib.contextmanager
def counted_writes() -> Iterator[list[Path]]:
    written: list[Path] = []
    write = checkpoint.write

    def counting(folder: Any, *rest: Any) -> Path:
        written.append(Path(folder))
        return write(folder, *rest)

    checkpoint.write = counting  # type: ignore[assignment]
    try:
        yield written
    finally:
        checkpoint.write = write


def failure(kind: type[Exception], act: Any) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return "nothing failed"


# --- what must be true of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path, project_root: Path) -> list[Results]:
    launch(project_root, __file__, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def launch(project_root: Path, *script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    environment = {"PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, env=environment, cwd=Path(script[-1]).parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
class TestReplicas:
    def test_first_scales_come_from_all_data(self, ranks: list[Results], kinds: tuple[str, str]) -> None:
        assert_same(ranks[0]["calibrated"][kinds], ranks[1]["calibrated"][kinds])
        assert_close(ranks[0]["calibrated"][kinds], scales(prepared(Blocks, *kinds, None)), rtol=1e-6, atol=0.0)

    def test_gradients_are_those_of_one_process(self, ranks: list[Results], kinds: tuple[str, str]) -> None:
        """But for the steps of activations: LSQ's 1/sqrt(N·qmax) counts the elements of one process."""
        qmodel = prepared(Blocks, *kinds, None)
        F.cross_entropy(qmodel(images()), labels()).backward()
        expected = {}
        for name, parameter in qmodel.named_parameters():
            if parameter.grad is not None:
                is_step = "quantizer" in name and "weight_quantizer" not in name and "alpha" not in name
                expected[name] = parameter.grad * (math.sqrt(2) if is_step else 1.0)
        assert any("quantizer" in name for name in expected) == (kinds != ("dorefa", "uniform"))
        assert_same(ranks[0]["gradients"][kinds], ranks[1]["gradients"][kinds])
        assert_close(ranks[0]["gradients"][kinds], expected, rtol=1e-4, atol=1e-6)

    def test_ranks_stay_equal_bit_by_bit(self, ranks: list[Results], kinds: tuple[str, str]) -> None:
        assert_same(ranks[0]["trained"][kinds], ranks[1]["trained"][kinds])
        before = prepared(Residual, *kinds, None)
        moved = parameters(before) | scales(before)
        learned = [name for name in scales(before) if not torch.equal(moved[name], ranks[0]["trained"][kinds][name])]
        assert learned  # dorefa's scales follow the weights


def test_ranges_that_follow_are_rank_0s(ranks: list[Results]) -> None:
    first, second = ranks
    assert any(not torch.equal(x, second["followed"][name]) for name, x in first["followed"].items())
    assert_same(second["agreed"], first["agreed"])
    assert_same(first["agreed"], first["followed"])


def test_no_parameter_of_a_quantizer_that_is_off_hangs(ranks: list[Results]) -> None:
    for results in ranks:
        assert len(results["off"]) >= 2 and not any(results["off"])


def test_batchnorm_tuning_averages_over_all_ranks(ranks: list[Results]) -> None:
    qmodel = prepared(Residual, "uniform", "uniform", None, **{"SCHEDULE.BN_TUNING": True})
    with qmodel.batchnorm_tuning(), torch.no_grad():
        for batch in images().split(2):
            qmodel(batch)
    assert_same(ranks[0]["tuned"], ranks[1]["tuned"])
    assert_close(ranks[0]["tuned"], parameters(qmodel), rtol=1e-5, atol=1e-6)


class TestSaving:
    def test_rank_0_writes_once_and_the_others_wait(self, ranks: list[Results], folder: Path) -> None:
        assert ranks[0]["writes"] == ["ddp", "by rank 0", "file"] and ranks[1]["writes"] == []
        assert ranks[0]["read at once"] == ranks[1]["read at once"] == sorted((checkpoint.TENSORS, checkpoint.MANIFEST))
        outputs = QuantModel.load(folder / "ddp", Residual())(images())
        torch.testing.assert_close(outputs, ranks[0]["outputs"])

    def test_what_fails_on_rank_0_is_an_error_everywhere(self, ranks: list[Results]) -> None:
        assert "is a file" in ranks[0]["failure"]
        assert "rank 0 failed" in ranks[1]["failure"] and "is a file" in ranks[1]["failure"]


class TestShards:
    @pytest.mark.parametrize("how", ["root", "blocks"])
    def test_shards_learn_what_replicas_learn(self, ranks: list[Results], how: str) -> None:
        assert_same(ranks[0][how], ranks[1][how])
        assert_close(ranks[0][how], ranks[0]["alike"], rtol=1e-5, atol=1e-6)

    def test_scales_stay_float32_beside_bfloat16_weights(self, ranks: list[Results]) -> None:
        assert ranks[0]["dtypes"] == {
            "root": (torch.float32, torch.float32),
            "blocks": (torch.float32, torch.float32),
            "bfloat16": (torch.bfloat16, torch.float32),
        }
        assert_same(ranks[0]["bfloat16"], ranks[1]["bfloat16"])
        assert_close(ranks[0]["bfloat16"], ranks[0]["alike"], rtol=0.05, atol=0.02)

    def test_batch_norms_train_beside_bfloat16_weights(self, ranks: list[Results]) -> None:
        assert_same(ranks[0]["normed"], ranks[1]["normed"])
        replicas = ranks[0]["trained"]["lsq", "lsq"]
        assert_close(ranks[0]["normed"], {name: replicas[name] for name in ranks[0]["normed"]}, rtol=0.1, atol=0.05)

    @pytest.mark.parametrize("how", ["root", "blocks"])
    def test_saved_whole(self, ranks: list[Results], folder: Path, how: str) -> None:
        qmodel = QuantModel.load(folder / how, Blocks())
        assert_same(parameters(qmodel), ranks[0][how])
        torch.testing.assert_close(qmodel(images()), ranks[0][f"{how} outputs"])

    def test_what_needs_whole_parameters_says_so(self, ranks: list[Results]) -> None:
        *verbs, block = ranks[0]["refused"]
        for verb, message in zip(("prepare_calibration", "export_onnx", "batchnorm_tuning"), verbs, strict=True):
            assert (
                message.startswith(f"{verb}() on parameters that are spread") and "save and load the model" in message
            )
        assert block.startswith("shard(): the model has no block 'secnd'") and "second" in block


@pytest.mark.parametrize("guide", ["distributed-training", "qat-sharded"])
def test_guide_runs_in_two_processes(guide: str, project_root: Path, tmp_path: Path) -> None:
    page = (project_root / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text("".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    launch(project_root, str(script))
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {checkpoint.TENSORS, checkpoint.MANIFEST}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(on_a_rank(rank, Path(folder)), Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
