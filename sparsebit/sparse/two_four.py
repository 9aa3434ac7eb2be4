"""2:4 on the GPU: whether torch's semi-structured kernels are faster than dense ones here, measured for each shape.

A weight with two zeros in every four neighbours takes half the products on tensor cores that support the pattern.
Whether this is faster depends on the shape, the GPU and the library, so it is measured, in turns with the dense
product, and only the faster shapes are recommended.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.graph.values.copying import copy_model
from sparsebit.sparse.scoring.element_masks import n_of_m_mask

# Samples in seconds of each run, taken in turns: those of a round belong together.
Timer = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, Sequence[float]]]
Compress = Callable[[Tensor], Tensor]

_DENSE = "dense"
_MARGIN = 1.03  # a smaller speedup is within the noise of a GPU's clock
_ROUNDS, _SAMPLE_S = 25, 2e-3


@dataclass(frozen=True)
class TwoFourAdvice:
    """The measurement of one shape: an input of (rows, in_features) times a weight of (out_features, in_features).

    `ratio`: the time of the dense product over that of the 2:4 product, the median over rounds; None if it cannot
    run. `low`: its lower quartile. `kernels`: the fastest backend: `cutlass`, `cusparselt`, or `cusparselt:4` if
    its fourth algorithm is faster than its default one. `use`: recommended; `reason`: why, or why not.
    """

    rows: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    ratio: float | None
    low: float | None
    dense_ms: float | None
    kernels: str
    use: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        shape = f"{self.rows} x {self.in_features} -> {self.out_features}"
        return f"{shape}: {'2:4' if self.use else 'dense'}: {self.reason}"


def recommend_2_4(
    model: nn.Module,
    example_inputs: Any,
    *,
    dtype: torch.dtype = torch.float16,
    device: str | torch.device = "cuda",
    timer: Timer | None = None,
) -> dict[str, TwoFourAdvice]:
    """For each linear layer of the model: 2:4, or dense, by a measurement of its shape on this GPU.

    `example_inputs`: a batch of the size that counts; the time depends on it. Each shape is measured once. Weights
    need no zeros yet: kernels take as long for any. Without a GPU that has 2:4 kernels, everything stays dense and
    the reason says so. Convolutions are not in the list: torch has no 2:4 kernels for them.

    >>> advice = recommend_2_4(model, batch)  # doctest: +SKIP
    >>> print(advice["encoder.layer.0.intermediate.dense"])  # doctest: +SKIP
    8192 x 8192 -> 8192: 2:4: 1.41 times as fast as dense (cusparselt)
    """
    shapes = _linear_shapes(model, example_inputs)
    known = {
        shape: measure_2_4(*shape, dtype=dtype, device=device, timer=timer) for shape in dict.fromkeys(shapes.values())
    }
    return {name: known[shape] for name, shape in shapes.items()}


def measure_2_4(
    rows: int,
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype = torch.float16,
    device: str | torch.device = "cuda",
    timer: Timer | None = None,
    kernels: Mapping[str, Compress] | None = None,
) -> TwoFourAdvice:
    """Time one shape on the GPU. `kernels`: functions that compress a pruned weight to 2:4, by name; or torch's."""
    shape = (rows, out_features, in_features)

    def dense(reason: str) -> TwoFourAdvice:
        return TwoFourAdvice(*shape, dtype, None, None, None, "", use=False, reason=reason)

    if kernels is None and (missing := _missing(torch.device(device))):
        return dense(missing)
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device)
    weight = (weight * n_of_m_mask(weight.abs(), 2, 4)).to(dtype)
    runs: dict[str, Callable[[], object]] = {_DENSE: functools.partial(F.linear, x, weight)}
    refused = []
    for name, compress in (kernels or _kernels(x, weight)).items():
        try:
            sparse = compress(weight)
            error = (F.linear(x, sparse) - F.linear(x, weight)).float().norm() / F.linear(x, weight).float().norm()
        except Exception as failure:  # each backend has its own limits on shapes and types
            refused.append(f"{name}: {(str(failure).splitlines() or [type(failure).__name__])[0]}")
            continue
        if float(error) < 0.01:
            runs[name] = functools.partial(F.linear, x, sparse)
        else:
            refused.append(f"{name}: its result is {float(error):.2g} off")
    if len(runs) == 1:
        return dense(f"no 2:4 kernel takes this shape ({'; '.join(refused)})")
    with torch.no_grad():
        samples = dict((timer or gpu_times)(runs))
    times = samples.pop(_DENSE)
    pairs = {name: [a / b for a, b in zip(times, own, strict=True)] for name, own in samples.items()}
    kind = max(pairs, key=lambda name: statistics.median(pairs[name]))
    ratio, own = statistics.median(pairs[kind]), pairs[kind]
    low = statistics.quantiles(own, n=4, method="inclusive")[0] if len(own) > 1 else own[0]
    dense_ms = statistics.median(times) * 1e3
    use = ratio >= _MARGIN and low > 1
    reason = f"{ratio:.2f} times as fast as dense ({kind})"
    reason += "" if use else f", lower quartile {low:.2f}: not clearly faster"
    return TwoFourAdvice(*shape, dtype, ratio, low, dense_ms, kind, use, reason)


def accelerate_2_4(model: nn.Module, advice: Mapping[str, TwoFourAdvice]) -> nn.Module:
    """A copy of the model in the dtype of the advice, whose recommended layers have semi-structured weights.

    Their weights must be 2:4 already (`GRANULARITY: 2:4`). The copy is for inference.
    """
    wanted = {name: entry for name, entry in advice.items() if entry.use}
    for name in wanted:
        weight = model.get_submodule(name).get_parameter("weight")
        if int((weight.detach().unflatten(1, (-1, 4)) != 0).sum(-1).max()) > 2:
            raise ConfigError(f"{name}.weight is not 2:4; prune it with GRANULARITY: 2:4 before accelerate_2_4()")
    types = {entry.dtype for entry in advice.values()}
    if len(types) > 1:
        raise ConfigError(f"the advice is for several dtypes ({', '.join(sorted(map(str, types)))}); give it for one")
    fast: nn.Module = copy_model(model).eval().to(dtype=next(iter(types), None))
    for name, entry in wanted.items():
        layer = fast.get_submodule(name)
        layer.weight = nn.Parameter(_compress(entry.kernels)(layer.get_parameter("weight").detach()), False)
    return fast


def gpu_times(runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of one call on the GPU: in turns, by CUDA events."""
    calls = {}
    for name, run in runs.items():
        _timed(run, 3)  # warm up
        calls[name] = max(1, math.ceil(_SAMPLE_S / max(_timed(run, 3), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(_ROUNDS):
        for name in runs if done % 2 == 0 else reversed(list(runs)):
            found[name].append(_timed(runs[name], calls[name]))
    return found


def _timed(run: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def _missing(device: torch.device) -> str:
    """Why there are no 2:4 kernels here; empty if there are."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "2:4 kernels need a CUDA GPU, and there is none here"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"2:4 kernels need compute capability 8.0; this GPU has {major}.{minor}"


def _kernels(x: Tensor, weight: Tensor) -> dict[str, Compress]:
    """Functions that pack a 2:4 weight, for each of torch's backends, and for cuSPARSELt's best algorithm here."""
    names = ["cusparselt", "cutlass"]
    try:
        found = torch._cslt_sparse_mm_search(torch._cslt_compress(weight), x.t())
        names += [f"cusparselt:{int(found)}"] if int(found) > 0 else []
    except (RuntimeError, AttributeError):  # no cuSPARSELt in this torch, or not for this shape: reported when tried
        pass
    return {name: _compress(name) for name in names}


def _compress(kernels: str) -> Compress:
    """A function that packs a weight for these kernels (`TwoFourAdvice.kernels`)."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    name, _, algorithm = kernels.partition(":")
    if name == "cutlass":
        return SparseSemiStructuredTensorCUTLASS.from_dense

    def compress(weight: Tensor) -> Tensor:
        packed = SparseSemiStructuredTensorCUSPARSELT.from_dense(weight)
        packed.alg_id_cusparselt = int(algorithm or 0)  # `from_dense` of torch before 2.13 does not take it
        return packed

    return compress


@torch.no_grad()
def _linear_shapes(model: nn.Module, example_inputs: Any) -> dict[str, tuple[int, int, int]]:
    """(rows of the input, out_features, in_features) of each linear layer, the largest of its calls."""
    found: dict[str, tuple[int, int, int]] = {}
    watched = copy_model(model, share_parameters=True).eval()
    for path, module in watched.named_modules():
        if isinstance(module, nn.Linear):

            def note(layer: Any, args: tuple[Tensor, ...], output: Tensor, path: str = path) -> None:
                rows = output.numel() // max(1, output.shape[-1])
                found[path] = (max(found.get(path, (0,))[0], rows), layer.out_features, layer.in_features)

            module.register_forward_hook(note)
    args, kwargs = to_device(as_call(example_inputs, model), next((p.device for p in model.parameters()), None))
    watched(*args, **kwargs)
    return found
