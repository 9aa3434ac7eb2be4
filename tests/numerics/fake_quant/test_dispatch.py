from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparsebit.numerics.fake_quant.dispatch import PLAIN, Kernels, fake_quantize, register_kernels
from sparsebit.numerics.spec import TensorSpec

INT8 = TensorSpec(8, True)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Kernels for the CPU that note when they are called; taken out again after the test."""
    noted: list[str] = []

    def forward(*arguments: Any) -> torch.Tensor:
        noted.append("forward")
        return PLAIN.forward(*arguments)

    def backward(*arguments: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        noted.append("backward")
        return PLAIN.backward(*arguments)

    register_kernels("cpu", Kernels(forward, backward))
    yield noted
    register_kernels("cpu", None)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_registered_kernels_run_for_their_device(calls: list[str], compiled: bool) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x, scale, zero_point, INT8, gradient="lsq")

    call = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    x, scale = torch.randn(5, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    call(x, scale, torch.tensor(0.0)).sum().backward()
    assert calls == ["forward", "backward"]


def test_without_kernels_plain_torch_runs(calls: list[str]) -> None:
    register_kernels("cpu", None)
    fake_quantize(torch.randn(5), torch.tensor(0.1), torch.tensor(0.0), INT8)
    assert calls == []


def test_importing_compiles_nothing_and_touches_no_gpu() -> None:
    program = (
        "import sys, torch, sparsebit.numerics.fake_quant.dispatch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'triton', 'torch._dynamo.eval_frame', 'torch._inductor.codecache'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
