"""2:4 is recommended only where it was measured to be faster; timers and kernels are injected, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.sparse import accelerate_2_4, recommend_2_4
from sparsebit.sparse.two_four import Timer, TwoFourAdvice, measure_2_4


def as_it_is(weight: Tensor) -> Tensor:
    return weight


def refusing(_: Tensor) -> Tensor:
    raise RuntimeError("columns must be a multiple of 64")


def clock(**seconds: list[float]) -> Timer:
    def times(runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        for run in runs.values():
            run()
        return {name: seconds[name] for name in runs}

    return times


def measured(**seconds: list[float]) -> TwoFourAdvice:
    kernels = {name: as_it_is for name in seconds if name != "dense"}
    return measure_2_4(8, 16, 32, dtype=torch.float32, device="cpu", timer=clock(**seconds), kernels=kernels)


def test_faster_is_recommended_with_the_fastest_kernels() -> None:
    found = measured(dense=[3.0, 3.0, 3.3], cutlass=[2.0, 2.0, 2.2], cusparselt=[1.5, 1.5, 1.65])
    assert found.use and found.kernels == "cusparselt" and found.ratio == pytest.approx(2.0)
    assert "2.00 times as fast as dense (cusparselt)" in str(found) and found.to_dict()["dtype"] == "float32"


@pytest.mark.parametrize(
    "sparse",
    [
        pytest.param([2.0, 2.0, 2.0, 2.0], id="slower"),
        pytest.param([1.0, 1.0, 1.0, 1.0], id="equal"),
        pytest.param([0.98, 0.98, 0.98, 0.98], id="within the noise of a clock"),
        pytest.param([0.7, 0.7, 1.2, 1.2], id="in half of the rounds only"),
    ],
)
def test_what_is_not_clearly_faster_stays_dense(sparse: list[float]) -> None:
    found = measured(dense=[1.0] * 4, cusparselt=sparse)
    assert not found.use and "not clearly faster" in found.reason and found.ratio is not None


def test_a_shape_that_no_kernel_takes_stays_dense_and_says_why() -> None:
    found = measure_2_4(8, 16, 32, dtype=torch.float32, device="cpu", timer=clock(), kernels={"cutlass": refusing})
    assert not found.use and found.reason.endswith("(cutlass: columns must be a multiple of 64)")


def test_kernels_with_wrong_results_are_not_timed() -> None:
    kernels = {"cutlass": torch.zeros_like, "cusparselt": as_it_is}
    timer = clock(dense=[2.0], cusparselt=[1.0])
    assert measure_2_4(8, 16, 32, dtype=torch.float32, device="cpu", timer=timer, kernels=kernels).use


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


def test_every_linear_layer_has_advice_by_its_own_shape() -> None:
    model = Net().train()
    found = recommend_2_4(model, torch.randn(3, 5, 8), device="cpu")
    assert [(e.rows, e.in_features, e.out_features) for e in found.values()] == [(15, 8, 16), (15, 16, 8), (15, 8, 16)]
    assert list(found) == ["a", "b", "c"] and model.a.training
    assert not any(entry.use for entry in found.values())
    assert all("need a CUDA GPU" in entry.reason for entry in found.values())


def test_accelerating_a_layer_that_is_not_2_4_is_an_error() -> None:
    advice = measured(dense=[2.0], cutlass=[1.0])
    with pytest.raises(ConfigError, match=r"a\.weight is not 2:4; prune it with GRANULARITY: 2:4"):
        accelerate_2_4(Net(), {"a": advice})


def test_what_is_not_recommended_stays_as_it_is() -> None:
    model = Net()
    fast = accelerate_2_4(model, {"a": measured(dense=[1.0], cutlass=[1.0])})
    assert fast is not model and torch.equal(fast.get_parameter("a.weight"), model.a.weight)


def test_a_layer_is_packed_for_the_algorithm_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []

    def from_dense(weight: Tensor) -> Tensor:  # as in torch 2.11, where it takes no algorithm
        packed.append(weight.clone())
        return cast("Tensor", packed[-1])

    monkeypatch.setattr(torch.sparse.SparseSemiStructuredTensorCUSPARSELT, "from_dense", from_dense)
    model = Net()
    with torch.no_grad():
        for layer in (model.a, model.c):
            layer.weight.mul_(torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 1]))
    advice = replace(measured(dense=[2.0], cusparselt=[1.0]), kernels="cusparselt:4")
    accelerate_2_4(model, {"a": advice, "c": replace(advice, kernels="cusparselt")})
    assert [weight.alg_id_cusparselt for weight in packed] == [4, 0]


@pytest.mark.gpu
def test_the_gpu_kernels_compute_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096)).cuda().half()
    found = recommend_2_4(model, torch.randn(4096, 4096, device="cuda").half())
    assert found["0"].ratio is not None, found["0"].reason
