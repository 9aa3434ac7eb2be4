"""The fake-quant operator against the limit of memory, and against torch's own operators, in one run.

    python benchmarks/fake_quant.py [--device cpu] [--output results/fake_quant.jsonl]

GPU: 256 x 256 x 64 x 64. `limit` is the time in which the device's own copy moves as many bytes as have to move: read x
and write y forward; read grad and x and write grad_x backward. Every figure is a ratio to it. CPU: ratios to torch's
fake-quant operator on one thread. Times are medians of interleaved runs; a GPU's begin when Python has handed it all of
the work (what handing over costs is in `qat_step.py`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import emit
from sparsebit.numerics.fake_quant import decomposed
from sparsebit.quantization import Granularity, PerChannel, PerTensor, TensorSpec, fake_quantize

GPU_SHAPE = (256, 256, 64, 64)
BUSY_CYCLES = 2_000_000  # about a millisecond
CPU_SHAPES = ((32, 64, 56, 56), (256, 256, 3, 3), (197, 1536))


def gpu_times(what: str, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        _warm_up(f"{what}/{name}", call)
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # the GPU waits for Python, not the clock
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in found.items()}


def _warm_up(what: str, call: Callable[[], Any]) -> None:
    try:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    except Exception as error:  # a GPU does not recover from most: the next run has to leave it out
        raise SystemExit(f"--without {what}: it failed with {str(error)[:500]}") from error


def cpu_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn > 1:
                found[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


class Case:
    """One tensor with its parameters, and every way to fake-quantize it."""

    def __init__(self, shape: tuple[int, ...], granularity: Granularity, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(shape, device=device, generator=generator).to(dtype)
        self.grad = torch.randn(shape, device=device, generator=generator).to(dtype)
        self.spec = TensorSpec(4, True, granularity)
        size = () if granularity.axis is None else (shape[granularity.axis],)
        self.scale = torch.rand(size, device=device, generator=generator) * 0.1 + 0.2
        self.zero_point = torch.zeros_like(self.scale)
        self.ends = (self.spec.qmin, self.spec.qmax)
        torch._dynamo.reset()  # else sizes that differ from the last case's become symbols
        self.compiled = torch.compile(self._algebra) if device == "cuda" else None

    def own(self, x: Tensor, scale: Tensor, gradient: Any) -> Tensor:
        return fake_quantize(x, scale, self.zero_point, self.spec, gradient=gradient)

    def torch_op(self, x: Tensor) -> Tensor:
        zero_point = self.zero_point.int()
        if self.spec.granularity.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, self.scale, zero_point, *self.ends)
        return torch.fake_quantize_per_channel_affine(x, self.scale, zero_point, self.spec.granularity.axis, *self.ends)

    def torch_learnable(self, x: Tensor, scale: Tensor) -> Tensor:
        factor = (x.numel() / scale.numel() * self.spec.qmax) ** -0.5
        if self.spec.granularity.axis is None:
            one = (scale.reshape(1), self.zero_point.reshape(1))
            return torch._fake_quantize_learnable_per_tensor_affine(x, *one, *self.ends, factor)
        axis = self.spec.granularity.axis
        return torch._fake_quantize_learnable_per_channel_affine(x, scale, self.zero_point, axis, *self.ends, factor)

    def _algebra(self, x: Tensor) -> Tensor:
        """Forward as algebra, for a compiler."""
        granularity = self.spec.granularity
        rest = (granularity.axis, granularity.size, *self.ends)
        return decomposed.fake_quantize(x, self.scale, self.zero_point, *rest)

    def forwards(self) -> dict[str, Callable[[], Any]]:
        x = self.x
        calls: dict[str, Callable[[], Any]] = {"sparsebit": lambda: self.own(x, self.scale, "ste")}
        if x.dtype == torch.float32 or self.spec.granularity.axis is None:
            calls["torch_op"] = lambda: self.torch_op(x)
        if self.compiled is not None:
            compiled = self.compiled
            calls["torch_compile"] = lambda: compiled(x)
        return calls

    def both_ways(self, learned: bool) -> dict[str, Callable[[], Any]]:
        x, scale = self.x.clone().requires_grad_(), self.scale.clone().requires_grad_()

        def run(function: Callable[[Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(function(x, scale), inputs, self.grad)

        if not learned:
            calls = {"sparsebit": run(lambda x, _: self.own(x, self.scale, "ste"), (x,))}
            if x.dtype == torch.float32:
                calls["torch_op"] = run(lambda x, _: self.torch_op(x), (x,))
            return calls
        calls = {"sparsebit": run(lambda x, s: self.own(x, s, "lsq"), (x, scale))}
        if self.compiled is not None:
            whole = torch.compile(lambda x, s: self.own(x, s, "lsq"), fullgraph=True)
            calls["torch_compile"] = run(whole, (x, scale))
        if x.dtype == torch.float32:
            calls["torch_learnable"] = run(self.torch_learnable, (x, scale))
        return calls


def on_gpu(rounds: int, output: Path | None, without: list[str]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("contiguous", "channels_last"):
            for granularity in (PerTensor(), PerChannel(1)):
                case = Case(GPU_SHAPE, granularity, dtype, "cuda")
                if layout == "channels_last":
                    case.x = case.x.to(memory_format=torch.channels_last)
                    case.grad = case.grad.to(memory_format=torch.channels_last)
                works = {
                    "forward": (2, case.forwards()),
                    "forward_backward_ste": (5, case.both_ways(learned=False)),
                    "forward_backward_lsq": (5, case.both_ways(learned=True)),
                }
                for work, (moves, calls) in works.items():
                    what = f"{work}/{granularity.kind}"
                    calls = {name: call for name, call in calls.items() if f"{what}/{name}" not in without}
                    source = case.x.detach()
                    copied = torch.empty_like(source)
                    found = gpu_times(what, {"copy": lambda s=source, c=copied: c.copy_(s), **calls}, rounds)
                    limit = found.pop("copy") / 2 * moves
                    emit(
                        {
                            "benchmark": "fake_quant",
                            "device": "cuda",
                            "work": work,
                            "granularity": granularity.kind,
                            "layout": layout,
                            "dtype": str(dtype).removeprefix("torch."),
                            "limit_ms": round(limit, 4),
                            "copy_gb_s": round(2 * source.nbytes / (limit / moves * 2) / 1e6),
                            "ratio_to_limit": {name: round(value / limit, 3) for name, value in found.items()},
                        },
                        output,
                    )


def on_cpu(rounds: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    for shape in CPU_SHAPES:
        for granularity in (PerTensor(), PerChannel(0 if shape[-1] in (3, 1536) else 1)):
            case = Case(shape, granularity, torch.float32, "cpu")
            forward = cpu_times(case.forwards(), rounds)
            ste = cpu_times(case.both_ways(learned=False) | {"lsq": case.both_ways(learned=True)["sparsebit"]}, rounds)
            emit(
                {
                    "benchmark": "fake_quant",
                    "device": "cpu",
                    "shape": list(shape),
                    "granularity": granularity.kind,
                    "ratio_to_torch_op": {
                        "forward": round(forward["sparsebit"] / forward["torch_op"], 3),
                        "forward_backward_ste": round(ste["sparsebit"] / ste["torch_op"], 3),
                        "forward_backward_lsq": round(ste["lsq"] / ste["torch_op"], 3),
                    },
                },
                output,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--without", action="append", default=[], metavar="WORK/GRANULARITY/WAY", help="that fails here"
    )
    options = parser.parse_args()
    if options.device == "cuda":
        on_gpu(options.rounds, options.output, options.without)
    else:
        on_cpu(options.rounds, options.output)


if __name__ == "__main__":
    main()
