from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.checking.outcome import Snapshot, cloned, outcome_of, seed_generators, state_kept, with_gradients


class Writes(nn.Module):
    """Another function for a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if x.is_leaf else 3
        return self.fc(x.mul_(1.5)) * factor


def test_copies_of_results_are_results() -> None:
    """Torch forbids writes into a leaf that learns, and tells code what is one."""
    model, leaf = Writes(), torch.randn(2, 4)
    result = (leaf.clone().requires_grad_() * 1,)
    (copied,), _ = cloned((result, {}))
    assert copied.requires_grad and not copied.is_leaf
    torch.testing.assert_close(outcome_of(model, ((copied,), {})).output, model(result[0]))
    (plain,), _ = cloned(((leaf,), {}))
    assert plain.is_leaf and plain.data_ptr() != leaf.data_ptr()


def test_gradients_of_a_module_that_writes_into_its_input() -> None:
    model, x = Writes(), torch.randn(2, 4)
    found = with_gradients(model, ((x,), {}), torch.sum, {"weight": model.fc.weight}).gradients
    torch.testing.assert_close(found["input 0"], 4.5 * model.fc.weight.sum(0).expand(2, 4))
    assert model.fc.weight.grad is None


def test_state_behind_a_captured_graph_is_kept_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.seen = nn.Linear(4, 4), []

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            self.block.seen.append(1)
            return self.block(x)

    model = capture(Net()).model
    with state_kept(model):
        model(torch.randn(2, 4))
        assert model.block.seen == [1]
    assert model.block.seen == []


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_state_kept_undoes_writes_into_tensors_inside_of_lists_and_into_compiled_modules() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = [torch.zeros(2)]
            self.compiled = torch.jit.script(nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Tensor:
            self.cache[0].add_(1)
            return self.compiled(x)

    model = Caching()
    with state_kept(model):
        model(torch.randn(4, 2))
        model.eval()
    assert model.cache[0].tolist() == [0, 0]
    assert model.compiled.training and int(model.compiled.num_batches_tracked) == 0


def test_a_snapshot_copies_parameters_only_where_code_writes_into_them() -> None:
    class Clips(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    for layer, count in ((nn.Linear(4, 4), 1), (Clips(4, 4), 3)):
        layer.table = torch.zeros(3)  # a plain attribute
        snapshot, weight = Snapshot(layer), layer.weight.detach().clone()
        assert len(snapshot.values) == count
        layer(torch.ones(1, 4))
        layer.table += 1
        snapshot.restore()
        torch.testing.assert_close(layer.weight, weight)
        assert not layer.table.any()


@pytest.mark.parametrize("in_use", [False, True])
def test_a_gpu_is_seeded_only_where_it_is_in_use(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    drawn = []
    for _ in range(2):
        seed_generators(3)
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn) and seeded == [3, 3] * in_use
