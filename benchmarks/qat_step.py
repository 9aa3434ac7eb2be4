"""One whole training step (forward, backward, SGD) of a quantized model beside its float twin, in one run.

    python benchmarks/qat_step.py resnet50 vit_small [--batch 128] [--output results/qat_step.jsonl]

bfloat16 autocast, channels-last, 224 x 224, W4A4 LSQ as in the examples' configs. Figures are ratios of median step
times and of peak memory, eager against float eager, compiled against float compiled (`opaque`: the operator as one
node, not as algebra; `same_options`: float with the options of `qmodel.compile`), and both captured as CUDA graphs
(`graphed`), where Python's part is nothing. `in_a_row`: the time of a step where the next one does not wait for its
end, as in a training loop. `start_us`: what the host takes to start a kernel. `torch_ao` is torch's own QAT, which
runs in tf32 only; its ratio is to float tf32.

    python benchmarks/qat_step.py resnet50 vit_small --ablate [--output results/qat_ablation.jsonl]

has a row for each saving of a training step, left out alone, beside the whole in the same run: eager, graphed, and
compiled where a compiler is concerned. Ratios are to the step with all savings: above 1 is what a saving gives.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import ROOT, emit
from sparsebit.numerics.fake_quant import decomposed
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.speed import Savings
from sparsebit.quantization.speed.compiler.inductor_options import compiler_options


def recipe(name: str) -> Path:
    """The examples' config for models of this kind."""
    return ROOT / "examples" / "configs" / ("deit_w4a4_lsq.yaml" if "vit" in name else "imagenet_w4a4_lsq.yaml")


def build(name: str) -> nn.Module:
    if name == "resnet50":
        from torchvision.models import resnet50

        return resnet50()
    from timm import create_model

    return create_model({"vit_small": "vit_small_patch16_224", "vit_tiny": "vit_tiny_patch16_224"}.get(name, name))


class Stepper:
    """A model, its optimizer and one batch that it trains on again and again."""

    def __init__(self, model: nn.Module, batch: int, size: int, device: str, half: bool) -> None:
        self.model, self.device, self.half = model, device, half
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(batch, 3, size, size, device=device, generator=generator)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (batch,), device=device, generator=generator)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def capture(self) -> None:
        """From now on the whole step is one CUDA graph: nothing is started from Python any more."""
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.step = graph.replay  # type: ignore[method-assign]

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            loss = F.cross_entropy(self.model(self.x), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def quantized(name: str, float_model: nn.Module, example: torch.Tensor) -> QuantModel:
    config = parse_qconfig(recipe(name)).to_dict() | {"DEVICE": example.device.type}
    qmodel = QuantModel(float_model, parse_qconfig(config))
    qmodel.prepare_calibration(keep_inputs=False)
    with torch.no_grad():
        qmodel(example[:16])
    qmodel.init_QAT()
    return qmodel.to(memory_format=torch.channels_last).train()


def torch_ao(float_model: nn.Module, example: torch.Tensor) -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    model = prepare_qat_fx(float_model.train(), get_default_qat_qconfig_mapping("x86"), (example[:2].cpu(),))
    return model.to(example.device, memory_format=torch.channels_last).train()


# way: how the model is made, in bfloat16, and what it is compared with; a graph is captured of the way in front of it.
Ways: TypeAlias = dict[str, tuple[Callable[[], nn.Module], bool, str]]


class Measured(NamedTuple):
    """Median step in milliseconds; the mean of steps in a row; the peak memory in MiB of steps that follow a first."""

    step: float
    in_a_row: float
    peak: float


def measure(stepper: Stepper, seconds: float) -> Measured:
    is_gpu = stepper.device == "cuda"
    for _ in range(3):
        stepper.step()
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        start = time.perf_counter()
        stepper.step()
        if is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    for _ in times:
        stepper.step()
    if is_gpu:
        torch.cuda.synchronize()
    in_a_row = (time.perf_counter() - start) * 1e3 / len(times)
    peak = torch.cuda.max_memory_allocated() / 2**20 if is_gpu else 0.0
    return Measured(statistics.median(times), in_a_row, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, each way")
    parser.add_argument("--ways", default="", help="only these, with commas between")
    parser.add_argument("--ablate", action="store_true", help="a row for each saving, left out alone")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.compiler.config.force_disable_caches = True  # they do not tell the opaque form from the other
    for name in options.models:
        compare(name, options, ablated_ways(name, options) if options.ablate else ways_of(name, options))


def ablated_ways(name: str, options: argparse.Namespace) -> Ways:
    """The whole, and each saving left out alone."""
    device = options.device
    example = torch.randn(16, 3, options.size, options.size, device=device)

    def without(*savings: str) -> nn.Module:
        torch.manual_seed(0)
        qmodel = quantized(name, build(name), example)
        qmodel.accelerate(without=savings)
        return qmodel

    def compiled(*savings: str, **inductor: Any) -> nn.Module:
        qmodel = without(*savings)
        assert isinstance(qmodel, QuantModel)
        qmodel.compile(fullgraph=True, options=inductor)
        return qmodel

    def plain() -> nn.Module:
        qmodel = without()
        assert isinstance(qmodel, QuantModel)
        qmodel.accelerate(False)
        return qmodel

    from torch._inductor import config

    thresholds = {key: getattr(config, key) for key in compiler_options("cuda") if "threshold" in key}
    makers: dict[str, Callable[[], nn.Module]] = {"all": without}
    makers |= {f"without_{field.name}": partial(without, field.name) for field in fields(Savings)}
    makers |= {"plain": plain, "compiled_all": compiled}
    makers["compiled_without_first_layer"] = partial(compiled, "first_layer")
    makers["compiled_without_fusions"] = partial(compiled, pre_grad_custom_pass=None)
    makers["compiled_without_thresholds"] = partial(compiled, **thresholds)
    ways: Ways = {}
    for way, make in makers.items():
        base = "compiled_all" if way.startswith("compiled") else "all"
        ways[way] = (make, True, base)
        if device == "cuda":
            ways[f"{way}_graphed"] = (make, True, f"{base}_graphed")
    return ways


def ways_of(name: str, options: argparse.Namespace) -> Ways:
    """Float, quantized and torch's own QAT, in all forms."""
    device = options.device

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return build(name)

    def on_device() -> nn.Module:
        return plain().to(device, memory_format=torch.channels_last).train()

    example = torch.randn(16, 3, options.size, options.size, device=device)

    def packed() -> nn.Module:
        qmodel = quantized(name, plain(), example)
        qmodel.pack_saved_activations(True)
        return qmodel

    def unpacked() -> nn.Module:
        qmodel = quantized(name, plain(), example)
        qmodel.pack_saved_activations(False)
        return qmodel

    def opaque() -> nn.Module:
        from torch._inductor import decomposition

        decomposed.register()
        for operator in (torch.ops.sparsebit.fake_quantize, torch.ops.sparsebit.fake_quantize_backward):
            decomposition.decompositions.pop(operator.default, None)
        decomposition.fast_random_decomps.cache_clear()
        return compiled()

    def compiled() -> nn.Module:
        qmodel = quantized(name, plain(), example)
        qmodel.compile(fullgraph=True)
        return qmodel

    def float_compiled(**settings: Any) -> nn.Module:
        return torch.compile(on_device(), **settings)  # type: ignore[return-value]

    def eager() -> nn.Module:
        return quantized(name, plain(), example)

    return {
        "float_bf16_compiled": (float_compiled, True, ""),
        "float_bf16_compiled_graphed": (float_compiled, True, ""),
        "sparsebit_bf16_compiled": (compiled, True, "float_bf16_compiled"),
        "sparsebit_bf16_compiled_graphed": (compiled, True, "float_bf16_compiled_graphed"),
        "float_bf16": (on_device, True, ""),
        "float_bf16_graphed": (on_device, True, ""),
        "sparsebit_bf16": (eager, True, "float_bf16"),
        "sparsebit_bf16_graphed": (eager, True, "float_bf16_graphed"),
        "sparsebit_bf16_packed": (packed, True, "float_bf16"),
        "sparsebit_bf16_packed_graphed": (packed, True, "float_bf16_graphed"),
        "sparsebit_bf16_unpacked": (unpacked, True, "float_bf16"),
        "float_tf32": (on_device, False, ""),
        "sparsebit_tf32": (eager, False, "float_tf32"),
        "torch_ao_tf32": (lambda: torch_ao(plain(), example), False, "float_tf32"),
        "float_bf16_compiled_same_options": (
            lambda: float_compiled(options=compiler_options(device)),
            True,
            "float_bf16_compiled",
        ),
        "sparsebit_bf16_compiled_opaque": (opaque, True, "float_bf16_compiled"),
    }


def compare(name: str, options: argparse.Namespace, ways: Ways) -> None:
    device, benchmark = options.device, "qat_ablation" if options.ablate else "qat_step"
    if options.ways:
        ways = {way: ways[way] for way in options.ways.split(",")}
    found: dict[str, Measured] = {}
    stepper: Stepper | None = None
    start = start_us(device)
    for way, (make, half, base) in ways.items():
        record: dict[str, Any] = {"benchmark": benchmark, "model": name, "batch": options.batch, "way": way}
        record |= {"start_us": start} if start is not None else {}
        is_graphed = way.endswith("_graphed")
        try:
            if not is_graphed or stepper is None:
                stepper = None
                forget(device)
                stepper = Stepper(make(), options.batch, options.size, device, half)
            if is_graphed:
                stepper.capture()
            found[way] = measured = measure(stepper, options.seconds)
        except Exception as error:  # a peer that cannot do it is a result too
            record["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            stepper = None
        else:
            record |= {"step_ms": round(measured.step, 2), "in_a_row_ms": round(measured.in_a_row, 2)}
            counts_memory = device == "cuda" and not is_graphed  # a graph has memory of its own
            if counts_memory:
                record["peak_mib"] = round(measured.peak)
            if base in found:
                record["time_ratio"] = round(measured.step / found[base].step, 3)
                record["in_a_row_ratio"] = round(measured.in_a_row / found[base].in_a_row, 3)
                if counts_memory:
                    record["memory_ratio"] = round(measured.peak / found[base].peak, 3)
        emit(record, options.output)
    forget(device)


def start_us(device: str) -> float | None:
    """How long the host takes to start one small kernel from Python: what is no graph is bound by it."""
    if device != "cuda":
        return None
    number, times = torch.zeros((), device=device), []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            number.add_(1.0)
        times.append((time.perf_counter() - start) * 1e6 / 200)
    return round(statistics.median(times), 2)


def forget(device: str) -> None:
    """What an earlier way has left."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # of the streams that graphs were captured on
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
