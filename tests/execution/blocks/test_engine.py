from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.execution.blocks.engine import BlockData, mix, run_blocks
from sparsebit.execution.blocks.find_blocks import Block, single_layers, whole_graph
from sparsebit.execution.blocks.resume import Resume
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.graph.capture import capture
from tests.two_ranks import assert_two_ranks_agree


def graph_of(model: nn.Module) -> fx.GraphModule:
    return capture(model.eval()).regions[""].graph_module


def double(data: BlockData) -> None:
    """A change that every layer shows."""
    with torch.no_grad():
        for module in data.block.modules.values():
            for parameter in module.parameters():
                parameter.mul_(2)


def no_switch(block: Block) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def visited(
    model: nn.Module, batches: list[dict[str, Any]], store: SharedData | None = None, runs: int = 1
) -> dict[str, list[Any]]:
    """What every layer gives, as a visitor sees it."""
    graph_module = graph_of(model)
    seen: dict[str, list[Any]] = {}

    def visit(data: BlockData) -> None:
        with torch.no_grad():
            for _ in range(runs):
                seen[data.block.name] = [values[0] for values in data.outputs() if values]  # none: only a write

    store = SharedData() if store is None else store
    run_blocks(graph_module, single_layers(graph_module), len(batches), batches.__getitem__, visit, store=store)
    assert len(store) == 0 and store.host_bytes == 0 and store.disk_bytes == 0
    return seen


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.a(x)
        z = torch.cat([self.b(y.relu()) * self.gain, y], dim=0)
        return self.last(z.reshape(z.shape[0] // 2, -1))


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["memory", "disk"])
@pytest.mark.parametrize("runs", [1, 3])
def test_values_equal_those_of_the_model(host_bytes: int, runs: int) -> None:
    model = Residual()
    batches = [{"x": torch.randn(2 + i, 4)} for i in range(3)]
    seen = visited(model, batches, SharedData(host_bytes=host_bytes), runs)
    for got, batch in zip(seen["last"], batches, strict=True):
        torch.testing.assert_close(got, model(**batch))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a * y)
        return self.d(self.c(b).relu() + b) + a


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["memory", "disk"])
def test_both_streams_and_targets(host_bytes: int) -> None:
    torch.manual_seed(0)
    model = UNet()
    graph_module = graph_of(model)
    batches = [{"x": torch.randn(2, 4), "y": torch.randn(2, 4)} for _ in range(3)]
    a, b, c, d = (layer.requires_grad_(False) for layer in (model.a, model.b, model.c, model.d))
    checked = []

    def visit(data: BlockData) -> None:
        index = data.block.name
        for number, batch in enumerate(batches):
            first = a(batch["x"])
            second = b(first * batch["y"])
            if index == "a":
                assert torch.equal(data.inputs[number][0], batch["x"])
                torch.testing.assert_close(data.targets[number], (first,))
            if index == "b":  # `a` is doubled in front of it
                torch.testing.assert_close(data.float_inputs[number][0], first * batch["y"])
                torch.testing.assert_close(data.inputs[number][0], 2 * first * batch["y"])
                torch.testing.assert_close(data.targets[number][0], second)
            if index == "d":
                torch.testing.assert_close(data.targets[number][0], d(c(second).relu() + second))
        assert len(data.inputs) == len(data.targets) == data.num_batches == 3
        checked.append(index)
        double(data)

    store = SharedData(host_bytes=host_bytes)
    layers = single_layers(graph_module)
    run_blocks(graph_module, layers, 3, batches.__getitem__, visit, as_float=no_switch, store=store)
    assert checked == ["a", "b", "c", "d"] and len(store) == 0 and store.disk_bytes == 0


def test_the_whole_network_in_found_blocks() -> None:
    """The last block's targets are the float model's outputs, and its outputs those of the changed model."""
    model = UNet()
    graph_module = graph_of(model)
    batches = [{"x": torch.randn(2, 4), "y": torch.randn(2, 4)} for _ in range(2)]
    expected = [model(**batch) for batch in batches]
    last: dict[str, list[Tensor]] = {}

    def visit(data: BlockData) -> None:
        double(data)
        last["targets"] = [values[0] for values in data.targets]
        last["outputs"] = [values[0] for values in data.outputs()]

    run_blocks(graph_module, find_blocks(graph_module), 2, batches.__getitem__, visit, as_float=no_switch)
    torch.testing.assert_close(last["targets"], expected)
    torch.testing.assert_close(last["outputs"], [graph_module(**batch) for batch in batches])


def test_gradients_reach_parameters_and_not_the_blocks_in_front() -> None:
    graph_module = graph_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    batches = [{"input": torch.randn(8, 4, requires_grad=True)} for _ in range(2)]

    def visit(data: BlockData) -> None:
        (weight,) = (p for m in data.block.modules.values() for p in m.parameters() if p.dim() > 1)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        losses = []
        for _ in range(20):
            for inputs, original, targets in zip(data.inputs, data.float_inputs, data.targets, strict=True):
                assert not inputs[0].requires_grad and not targets[0].requires_grad
                (output,) = data.run(mix(inputs, original, 0.5))
                loss = (output - 3 * targets[0]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    with torch.inference_mode():
        run_blocks(graph_module, find_blocks(graph_module), 2, batches.__getitem__, visit, as_float=no_switch)


def test_mix_takes_each_element_from_one_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    ones, zeros, count = torch.ones(10_000), torch.zeros(10_000), torch.tensor(3)
    mixed, kept, size = mix((ones, count, 7), (zeros, count, 7), 0.25, generator)
    assert set(mixed.tolist()) == {0.0, 1.0} and 0.23 < 1 - mixed.mean() < 0.27 and kept is count and size == 7


class Writes(nn.Module):
    """Writes that stay writes: through views, by item, by an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0].add_(1)
        y[:, 1] = 7
        self.relu(y.flatten())
        x += 1
        return self.last(y + x)


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["memory", "disk"])
def test_writes_are_seen_once_however_often_a_block_is_run(host_bytes: int) -> None:
    model = Writes()
    batches = [{"x": torch.randn(2, 4)} for _ in range(2)]
    kept = [batch["x"].clone() for batch in batches]
    with torch.no_grad():
        expected = [model(x.clone()) for x in kept]
    seen = visited(model, batches, SharedData(host_bytes=host_bytes), runs=3)
    torch.testing.assert_close(seen["last"], expected)
    assert all(torch.equal(batch["x"], x) for batch, x in zip(batches, kept, strict=True))  # the caller's data

    graph_module = graph_of(model)
    targets: list[Tensor] = []

    def visit(data: BlockData) -> None:
        targets[:] = [values[-1] for values in data.targets]

    run_blocks(graph_module, find_blocks(graph_module), 2, batches.__getitem__, visit, as_float=no_switch)
    torch.testing.assert_close(targets, expected)


def test_a_layer_that_two_blocks_call_is_float_again_for_the_targets() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.other.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.fc(self.other(self.fc(x))))

    model, x = Twice(), torch.randn(3, 4)
    graph_module = graph_of(model)
    expected, targets = model(x), []

    def visit(data: BlockData) -> None:
        targets.append(data.targets[0][0])
        double(data)

    run_blocks(graph_module, single_layers(graph_module), 1, lambda index: {"x": x}, visit, as_float=no_switch)
    torch.testing.assert_close(targets[-1], expected)
    weight = graph_module.get_submodule("fc").weight
    torch.testing.assert_close(weight, 4 * model.fc.weight)  # what visits did is there afterwards


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(length)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("with_float", [False, True], ids=["changed", "both"])
def test_values_are_dropped_at_their_last_use(with_float: bool) -> None:
    peak = []

    class Watched(SharedData):
        def put(self, key: Any, value: Any) -> None:
            super().put(key, value)
            peak.append(self.host_bytes)

    batches = [{"x": torch.randn(4, 256)} for _ in range(3)]
    graph_module = graph_of(Chain(12))
    as_float = no_switch if with_float else None
    run_blocks(
        graph_module, find_blocks(graph_module), 3, batches.__getitem__, double, as_float=as_float, store=Watched()
    )
    one = 3 * 4 * 256 * 4
    assert max(peak) == (4 if with_float else 2) * one  # a block's inputs and outputs, nothing else


def test_memory_is_the_budget_whatever_the_number_of_batches() -> None:
    peaks = []
    for num_batches in (4, 32):
        peak = [0]

        class Watched(SharedData):
            def put(self, key: Any, value: Any, peak: list[int] = peak) -> None:
                super().put(key, value)
                peak[0] = max(peak[0], self.host_bytes)

        graph_module = graph_of(Chain(4))
        store = Watched(host_bytes=20_000)
        blocks = find_blocks(graph_module)
        run_blocks(
            graph_module,
            blocks,
            num_batches,
            lambda i: {"x": torch.ones(4, 256)},
            double,
            as_float=no_switch,
            store=store,
        )
        peaks.append(peak[0])
    assert max(peaks) <= 20_000


def test_a_missing_input_takes_its_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    scale = graph.placeholder("scale", default_value=3)
    graph.output(graph.call_module("last", (graph.call_function(torch.mul, (x, scale)),)))
    root = nn.Module()
    root.last = nn.Identity()
    graph_module = fx.GraphModule(root, graph)
    seen: list[Any] = []
    run_blocks(
        graph_module, find_blocks(graph_module), 1, lambda i: {"x": torch.ones(2)}, lambda d: seen.extend(d.outputs())
    )
    torch.testing.assert_close(seen, [(torch.full((2,), 3.0),)])


def test_float_values_need_as_float() -> None:
    graph_module = graph_of(Chain(1))
    with pytest.raises(ConfigError, match=r"targets need `as_float`"):
        run_blocks(
            graph_module, find_blocks(graph_module), 1, lambda i: {"x": torch.ones(1, 256)}, lambda d: len(d.targets)
        )


def test_in_float_needs_as_float_too() -> None:
    graph_module = graph_of(Chain(1))

    def visit(data: BlockData) -> None:
        with data.in_float():
            pass

    with pytest.raises(ConfigError, match=r"in_float\(\) needs `as_float`"):
        run_blocks(graph_module, find_blocks(graph_module), 1, lambda i: {"x": torch.ones(1, 256)}, visit)


def test_values_inside_a_block_are_seen_after_its_outputs() -> None:
    graph_module = graph_of(Chain(2))
    seen: list[Any] = []

    def visit(data: BlockData) -> None:
        inner = [node for node in data.block.nodes if node not in data.block.outputs]
        seen.append((data.seen_at(inner[:1])(data.inputs[0]), data.run(data.inputs[0])))

    run_blocks(graph_module, whole_graph(graph_module), 1, lambda i: {"x": torch.ones(1, 256)}, visit)
    ((values, outputs),) = seen
    assert len(values) == 2 and torch.equal(values[0], outputs[0]) and not torch.equal(values[1], values[0])


def test_an_error_leaves_nothing_behind() -> None:
    store = SharedData(host_bytes=0)

    def visit(data: BlockData) -> None:
        if data.block.name == "b":
            raise KeyboardInterrupt

    graph_module = graph_of(Residual())
    with pytest.raises(KeyboardInterrupt):
        run_blocks(graph_module, single_layers(graph_module), 2, lambda i: {"x": torch.randn(2, 4)}, visit, store=store)
    assert len(store) == 0 and store.disk_bytes == 0


# --- resuming

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from sparsebit.execution.blocks.engine import run_blocks
from sparsebit.execution.blocks.resume import Resume
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.graph.capture import capture
import contextlib

folder, killed_at, result = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Dropout(0.0), nn.ReLU())]).eval()
graph_module = capture(model).regions[""].graph_module
batches = [{"input": torch.randn(4, 8)} for _ in range(3)]
visits = []

def layer(block):
    return next(module for module in block.modules.values() if isinstance(module, nn.Linear))

def visit(data):
    if len(visits) == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    visits.append(data.block.name)
    optimizer = torch.optim.Adam(layer(data.block).parameters(), lr=0.01)
    for inputs, targets in zip(data.inputs, data.targets):
        noise = torch.rand(4, 8)
        loss = (data.run(inputs)[0] - targets[0] * noise).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()

resume = Resume(
    folder, lambda block: layer(block).state_dict(), lambda block, state: layer(block).load_state_dict(state), "lr 0.01"
) if folder else None
run_blocks(graph_module, find_blocks(graph_module), 3, batches.__getitem__, visit,
           as_float=lambda block: contextlib.nullcontext(), resume=resume)
torch.save({"state": graph_module.state_dict(), "random": torch.rand(3), "visits": visits}, result)
"""


def test_a_killed_run_goes_on_and_ends_with_equal_bits(
    tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is killed has a process of its own."""
    script, kept = tmp_path / "resumed.py", tmp_path / "kept"
    script.write_text(SCRIPT)

    def result(folder: str, name: str) -> Any:
        monkeypatch.setattr(sys, "argv", [str(script), folder, "-1", str(tmp_path / name)])
        runpy.run_path(str(script))
        return torch.load(tmp_path / name)

    whole = result("", "whole.pt")
    paths = os.pathsep.join([str(project_root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(kept), "2", str(tmp_path / "none.pt")]
    assert subprocess.run(command, env=environment, timeout=240).returncode == -signal.SIGKILL
    assert sorted(path.name for path in kept.glob("0*")) == ["00000.safetensors", "00001.safetensors"]
    resumed = result(str(kept), "resumed.pt")
    assert len(whole["visits"]) == 5 and resumed["visits"] == whole["visits"][2:]
    assert all(torch.equal(resumed["state"][name], tensor) for name, tensor in whole["state"].items())
    assert torch.equal(resumed["random"], whole["random"])


def start(folder: Path, scale: float = 1.0, data: float = 1.0, names: Any = None, settings: str = "") -> list[str]:
    """One run with a folder; gives the blocks that were visited."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.mul_(scale)
    graph_module = graph_of(model)
    visits: list[str] = []

    def visit(block_data: BlockData) -> None:
        visits.append(block_data.block.name)
        double(block_data)

    def layer(block: Block) -> nn.Module:
        return next(iter(block.modules.values()))

    def load_state(block: Block, state: dict[str, Tensor]) -> None:
        layer(block).load_state_dict(state)

    resume = Resume(folder, lambda block: layer(block).state_dict(), load_state, settings)
    blocks = find_blocks(graph_module, names)
    run_blocks(graph_module, blocks, 1, lambda i: {"input": torch.full((2, 4), data)}, visit, resume=resume)
    return visits


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert start(folder) == ["0", "1", "2"]
    assert start(folder) == []
    for changed, options in {
        "model": {"scale": 2.0},
        "data": {"data": 2.0},
        "blocks": {"names": ["0", "2"]},
        "settings": {"settings": "other"},
    }.items():
        with pytest.raises(CheckpointError, match=rf"its {changed} differ.*delete this one"):
            start(folder, **options)  # type: ignore[arg-type]


def test_a_model_that_differs_in_a_setting_of_a_module_alone_is_refused(tmp_path: Path) -> None:
    def run(activation: nn.Module) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4)).eval()
        graph_module = capture(model).regions[""].graph_module
        resume = Resume(tmp_path / "kept", lambda block: {}, lambda block, state: None)
        blocks = single_layers(graph_module)
        run_blocks(graph_module, blocks, 1, lambda i: {"input": torch.ones(2, 4)}, lambda data: None, resume=resume)

    run(nn.LeakyReLU(0.1))
    run(nn.LeakyReLU(0.1))
    for other in (nn.LeakyReLU(0.2), nn.GELU()):
        with pytest.raises(CheckpointError, match="its model differ"):
            run(other)


def test_a_damaged_file_is_an_error_and_a_missing_one_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    start(folder)
    file = folder / "00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum differs"):
        start(folder)
    file.unlink()
    assert start(folder) == ["1", "2"]
    (folder / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        start(folder)


# --- ranks

RANKS = """
import os, sys, contextlib
import torch
import torch.distributed as dist
from torch import nn
from sparsebit.execution.blocks.engine import run_blocks
from sparsebit.execution.blocks.resume import Resume
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.execution.distributed import gather
from sparsebit.graph.capture import capture

dist.init_process_group("gloo")
rank = dist.get_rank()

def means(batches, folder):
    torch.manual_seed(0)
    graph_module = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()).regions[""].graph_module
    found = []
    def visit(data):
        sums = torch.stack([data.run(inputs)[0].detach().double().sum(0) for inputs in data.inputs]).sum(0)
        mean = torch.stack(gather(sums)).sum(0) / sum(gather(4 * data.num_batches)) if folder is not None else sums / 16
        found.append(mean)
        with torch.no_grad():
            next(iter(data.block.modules.values())).bias.sub_(mean)
    resume = None
    if folder:
        layer = lambda block: next(iter(block.modules.values()))
        resume = Resume(folder, lambda b: layer(b).state_dict(), lambda b, state: layer(b).load_state_dict(state))
    inputs_of = lambda i: {"input": batches[i]}
    run_blocks(graph_module, find_blocks(graph_module), len(batches), inputs_of, visit, resume=resume)
    return found, graph_module.state_dict()

torch.manual_seed(1)
batches = list(torch.randn(4, 4, 4))
alone, _ = means(batches, None)
merged, state = means(batches[rank::2], sys.argv[1])
torch.testing.assert_close(alone, merged)
none, again = means(batches[rank::2], sys.argv[1])
assert none == [] and all(torch.equal(again[name], tensor) for name, tensor in state.items())
dist.destroy_process_group()
print("rank", rank, "agrees")
"""


@pytest.mark.slow
def test_two_ranks_agree_with_one_process(tmp_path: Path) -> None:
    assert_two_ranks_agree(tmp_path, RANKS, str(tmp_path / "kept"))
