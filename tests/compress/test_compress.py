"""The whole call on a small trained net, with real files in ONNX Runtime."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import sparsebit
from sparsebit.compress import Candidate, Known, Result, compress, register_rung
from sparsebit.compress.judging.metrics import TOP1, PerSample
from sparsebit.compress.networks.rungs import RUNGS
from sparsebit.errors import ConfigError
from sparsebit.records import read_record
from tests.compress.nets import Patterns, batches, trained

ONE = ("eight bits",)


def run(folder: Path, **given: Any) -> Result:
    return compress(trained(), batches(256, 3), folder=folder, **{"minutes": 2, "rungs": ONE, **given})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    validation = batches(512, 7, labelled=True)
    return run(tmp_path_factory.mktemp("runs") / "run", metric="top1", validation=validation, max_loss=2.0)


def test_candidates_stay_on_the_cpu_where_their_files_run(tmp_path: Path, asks_for_a_gpu: None) -> None:
    done = run(tmp_path / "run")
    assert done.file is not None and {parameter.device.type for parameter in done.model.parameters()} == {"cpu"}


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_compressed_and_stays_there(tmp_path: Path) -> None:
    net = trained().cuda()
    done = compress(net, [x.cuda() for x in batches(256, 3)], folder=tmp_path / "run", rungs=ONE, minutes=2)
    assert done.file is not None and done.steps[0].final is not None
    assert {p.device.type for p in net.parameters()} == {"cuda"}


@pytest.mark.slow
def test_programs_are_compiled_timed_and_judged_in_their_runtime(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    validation = batches(512, 7, labelled=True)
    rungs = ("eight bits", "measured placement")
    how: Any = {"target": "executorch", "metric": "top1", "max_loss": 2.0, "validation": validation, "rungs": rungs}
    done = run(tmp_path / "run", **how)
    assert done.met and done.file == tmp_path / "run" / "best.pte" and done.file.is_file()
    assert "bit-exact in executorch" in done.steps[0].parity and done.steps[0].cost is not None
    assert done.steps[0].cost.milliseconds and 0 < done.steps[0].cost.bytes_ratio < 1
    assert (tmp_path / "run" / "float.pte").is_file() and done.steps[-1].recipe["placement"] != "default"
    session = sparsebit.open_session(done.file, "executorch")
    assert session.batch_size == 1 and read_record(tmp_path / "run" / "record.json").audits[0].runtime == "executorch"
    assert run(tmp_path / "run", **how).steps == done.steps


def test_a_target_that_nothing_here_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing here runs files for coreml"):
        run(tmp_path / "run", target="coreml")


class TestResult:
    def test_the_goal_is_met_by_a_file_that_passed_the_gate(self, done: Result) -> None:
        assert done.met and "on 256 samples that selection never saw" in done.reason
        (step,) = done.steps
        assert step.verdict == "within" and "bit-exact in onnxruntime" in step.parity
        assert step.selection.loss <= 2.0 and step.final.num_samples == 256  # type: ignore[union-attr]
        assert done.pareto == (step,) and str(done).startswith("met: 01-w8")

    def test_the_costs_are_those_of_the_file(self, done: Result) -> None:
        cost, before = done.steps[0].cost, done.ladder.float_cost
        assert cost is not None and before is not None and done.file is not None
        assert cost.num_bytes == done.file.stat().st_size and before.num_bytes > cost.num_bytes
        assert cost.macs == before.macs == 3 * 16 * 9 * 64 + 16 * 9 * 64 + 16 * 24 * 9 * 9 + 24 * 6
        assert cost.latency is not None and before.latency == 1.0

    def test_the_model_computes_what_the_file_computes(self, done: Result) -> None:
        x = batches(32, 11)[0]
        session = sparsebit.open_session(done.file)
        (found,) = session.run({session.inputs[0]: x.numpy()})  # type: ignore[attr-defined]
        with torch.no_grad():
            assert torch.from_numpy(found).equal(done.model(x))  # type: ignore[misc]

    def test_the_config_alone_makes_the_same_numbers_again(self, done: Result) -> None:
        again = sparsebit.quantize(trained(), batches(256, 3), str(done.folder / "best.yaml"))
        assert done.model is not None
        own, other = done.model.state_dict(), again.state_dict()
        assert all(own[key].equal(other[key]) for key in own if isinstance(own[key], torch.Tensor))
        assert "best.yaml" in done.ladder.reproduce

    def test_the_record_has_the_errors_of_all_layers_and_the_audit(self, done: Result) -> None:
        made = read_record(done.folder / "record.json")
        assert {"model", "plan", "coverage", "errors", "file", "parity", "audits"} <= set(made.sections)
        assert made.file is not None and made.file.path == str(done.file)

    def test_the_same_call_again_returns_the_same_at_once(self, done: Result) -> None:
        before = {path: path.stat().st_mtime_ns for path in done.folder.rglob("best.onnx")}
        validation = batches(512, 7, labelled=True)
        again = run(done.folder, metric="top1", validation=validation, max_loss=2.0)
        assert again.ladder == done.ladder
        assert before == {path: path.stat().st_mtime_ns for path in done.folder.rglob("best.onnx")}

    def test_what_the_folder_has_lost_is_not_needed_or_is_made_again(self, done: Result, tmp_path: Path) -> None:
        how: dict[str, Any] = {"metric": "top1", "validation": batches(512, 7, labelled=True), "max_loss": 2.0}
        shutil.copytree(done.folder, tmp_path / "run")
        before = (tmp_path / "run" / "best.onnx").read_bytes()
        (tmp_path / "run" / "best.onnx").unlink()
        again = run(tmp_path / "run", **how)
        assert again.file is not None and again.file.read_bytes() == before and again.steps == done.steps
        shutil.rmtree(tmp_path / "run" / "candidates")
        again = run(tmp_path / "run", **how)
        x = batches(32, 11)[0]
        assert again.model(x).equal(done.model(x))

    @pytest.mark.parametrize("what", ["model", "data", "metric"])
    def test_what_differs_in_a_detail_is_another_run(self, done: Result, what: str) -> None:
        def top1(outputs: Any, batch: Any) -> Any:
            return outputs.argmax(1) == batch[1]

        class Other(Patterns):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * 2.0

        net, data, validation = trained(), batches(256, 3), batches(512, 7, labelled=True)
        if what == "model":
            net.__class__ = Other  # the same weights, which compute something else
        if what == "data":
            data[-1] = batches(32, 4)[0]
        metric: Any = PerSample(top1, TOP1.name) if what == "metric" else "top1"
        with pytest.raises(ConfigError, match="another model, other data or another goal"):
            compress(
                net, data, folder=done.folder, rungs=ONE, minutes=2, metric=metric, validation=validation, max_loss=2.0
            )

    def test_another_goal_or_folder_is_refused(self, done: Result, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="holds a run with another model, other data or another goal"):
            run(done.folder)
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="is not a run of compress"):
            run(tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    net = trained().train()
    net.norm.eval()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ConfigError, match="unknown rung"):
        compress(net, batches(256, 3), folder=tmp_path / "run", rungs=("nine bits",))
    with pytest.raises(ConfigError, match=r"give a list of names, as \['eight bits'\]"):
        compress(net, batches(256, 3), folder=tmp_path / "run", rungs="eight bits")
    compress(net, batches(64, 3), folder=tmp_path / "run", rungs=ONE, minutes=1, target="virtual")
    assert net.training and not net.norm.training
    assert all(state[key].equal(value) for key, value in net.state_dict().items())


class WritesInput(Patterns):
    """Writes into its input, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x.sub_(0.5))


def test_a_model_that_writes_into_its_input_and_buffers_leaves_the_data_and_is_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, data = WritesInput().eval(), batches(128, 3)
    for _ in range(2):  # the second call finds the same model and the same data
        found = compress(net, data, "virtual", folder=tmp_path / "run", rungs=ONE, minutes=1)
    assert found.steps[0].cost is not None and float(net.num_calls) == 0
    assert all(one.equal(other) for one, other in zip(data, batches(128, 3), strict=True))


def test_an_evaluation_that_trains_the_model_does_not_reach_the_search(tmp_path: Path) -> None:
    def evaluate(model: torch.nn.Module) -> float:
        model.half().train()
        return 100.0

    found = run(tmp_path / "run", target="virtual", metric=evaluate)
    assert found.met


@pytest.mark.parametrize("metric", [lambda outputs, batch: 0.5, lambda outputs, batch: None], ids=["mean", "nothing"])
def test_a_metric_with_a_fault_ends_the_search_before_the_first_candidate(metric: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it returned"):
        run(tmp_path / "run", target="virtual", metric=metric)
    assert not any((tmp_path / "run" / "candidates").iterdir())


class FixedBatch(Patterns):
    """Runs with 32 samples only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(32, 2, 3).flatten(1)


@pytest.mark.slow
def test_a_model_with_a_fixed_number_of_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = compress(FixedBatch().eval(), batches(128, 3), folder=tmp_path / "run", rungs=ONE, minutes=2)
    assert found.steps[0].cost is not None and found.steps[0].cost.latency is not None
    assert found.steps[0].selection is not None and found.steps[0].selection.num_samples == 32


def test_inputs_that_no_runtime_reads_are_refused(tmp_path: Path) -> None:
    data = [batch.bfloat16() for batch in batches(128, 3)]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"bfloat16, which no runtime here reads; give model\.float"):
        compress(trained().bfloat16(), data, folder=tmp_path / "run", rungs=ONE)


def test_a_model_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model of type int: give a torch\.nn\.Module"):
        compress(5, [], folder=tmp_path)  # type: ignore[arg-type]


def test_a_failing_candidate_is_a_step_with_its_fault(tmp_path: Path) -> None:
    class Broken(Patterns):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    @register_rung("broken", order=5)
    def broken(known: Known) -> Candidate:
        recipe = known.study.bench.model and RUNGS.get("eight bits").propose(known).recipe  # type: ignore[union-attr]
        return Candidate("broken", "a test", recipe.replace(placement="/no/such/file.json"))

    try:
        found = run(tmp_path / "run", rungs=("broken",), target="virtual")
    finally:
        RUNGS._entries.pop("broken")
    assert not found.met and found.file is None and found.model is None
    assert found.steps[0].verdict == "failed" and "/no/such/file.json" in found.steps[0].fault
    assert "no candidate was made" in found.reason


KILLED = """
import os, signal, sys
from sparsebit.compress.networks.trial import NetworkTrials
from tests.compress.test_compress import run
from pathlib import Path
trial = NetworkTrials.made
def killed(trials, recipe, step, folder, rejects):
    found = trial(trials, recipe, step, folder, rejects)
    if step.name.startswith("02"):
        os.kill(os.getpid(), signal.SIGKILL)  # the files of the step are there, the ladder does not have it
    return found
NetworkTrials.made = killed
run(Path(sys.argv[1]), rungs=("eight bits", "four bits"), prefer="bytes")
"""


@pytest.mark.slow
def test_a_killed_search_goes_on_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    threads = str(torch.get_num_threads())  # the network is trained in both processes, and must get the same bits
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": threads}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(json.loads((tmp_path / "a" / "ladder.json").read_text())["steps"]) == 1
    how: dict[str, Any] = {"rungs": ("eight bits", "four bits"), "prefer": "bytes"}
    resumed, whole = run(tmp_path / "a", **how), run(tmp_path / "b", **how)
    assert resumed.ladder.best == whole.ladder.best and [s.name for s in resumed.steps] == [s.name for s in whole.steps]
    assert (tmp_path / "a" / "best.onnx").read_bytes() == (tmp_path / "b" / "best.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["openvino", "tensorrt", "virtual"])
def test_every_target(target: str, tmp_path: Path) -> None:
    if target == "openvino":
        pytest.importorskip("openvino")
    found = run(tmp_path / "run", rungs=None, target=target, max_loss=5.0)
    assert found.met and found.file is not None and found.file.is_file()


@pytest.mark.slow
def test_a_model_without_one_graph_gets_a_small_file_too(tmp_path: Path) -> None:
    net = nn.Sequential(trained())
    net.register_forward_hook(lambda module, inputs, output: None)  # it must run at every call
    found = compress(net, batches(256, 3), "onnxruntime", folder=tmp_path / "run", budget={"bytes": 0.4}, minutes=3)
    assert [step.name[3:] for step in found.steps[:3]] == ["w8", "w4-gptq", "w4-nearest"]
    assert [step.verdict for step in found.steps[:3]] == ["over budget", "failed", "within"] and found.met


@pytest.mark.slow
def test_a_budget_below_four_bits_takes_channels_too(tmp_path: Path) -> None:
    net = trained()
    found = compress(net, batches(256, 3), "virtual", folder=tmp_path / "run", budget={"macs": 0.7}, minutes=3)
    assert any(step.rung == "channels" for step in found.steps)
    cost = found.ladder.step(found.ladder.best).cost
    assert found.met and cost is not None and cost.macs_ratio <= 0.7
