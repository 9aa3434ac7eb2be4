"""`sensitivity`: the loss that each quantized tensor causes at each number of bits, if it alone is quantized.

Two ways. "gradient" scores all sites and bits with one forward and backward per batch: hooks replace each watched
tensor by a leaf, and when its gradient arrives, multiply it by the rounding error of every candidate
(`sensitivity_math.py` has the derivation). "kl" and "sqnr" run the model once per site and number of bits. All of it
runs on the float model (`in_float`); the model and its switches are restored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.config.selectors import near_names
from sparsebit.errors import CalibrationError, ConfigError, RecordError
from sparsebit.execution.batches import calls, num_samples, require_repeatable
from sparsebit.graph.state.modes import evaluating, without_gradients
from sparsebit.graph.values.inference_mode import ordinary_tensors
from sparsebit.progress import track
from sparsebit.quantization.calibrating.model_state import in_float, warn_if_lost
from sparsebit.quantization.mixed_precision.candidates import Candidates, candidates_of, quantized
from sparsebit.quantization.mixed_precision.sensitivity_math import (
    divergence,
    fisher_direction,
    products,
    value_direction,
)
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.ops.layer_call import current_weight, forward_with
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.text_table import text_table

Method = Literal["gradient", "sqnr", "kl"]
Bits = Sequence[int]
Outputs = Literal["auto", "scores", "values"]
# Returns the mean loss of a batch, from the model's output and the batch as the data yields it, labels included.
Loss = Callable[[Any, Any], Tensor]
WEIGHT_BITS = (2, 3, 4, 6, 8)
# Chosen on training images of CIFAR-10 that calibration did not use: docs/benchmarks/mixed-precision.md.
TEMPERATURE = 4.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensitivity:
    """`scores[site][bits]`: the loss of quantizing this tensor alone to that number of bits.

    `gradient` and `kl`: nats of divergence from the float model's outputs per sample (or of the given loss);
    `gradient` on values, and `sqnr`: noise of the output relative to its signal. `seconds`: the time it took.
    """

    method: Method
    num_samples: int
    scores: Mapping[str, Mapping[int, float]]
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sensitivity:
        """The sensitivity from a result of `to_dict`, also after JSON."""
        try:
            scores = {
                site: {int(bits): float(score) for bits, score in row.items()} for site, row in values["scores"].items()
            }
            return cls(values["method"], int(values["num_samples"]), scores, float(values.get("seconds", 0.0)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"not a sensitivity ({error!r}); write it with Sensitivity.to_dict()") from None

    def __str__(self) -> str:
        """A table: a row per site, the most sensitive (at the fewest bits) first."""
        columns = sorted({bits for row in self.scores.values() for bits in row})
        order = sorted(self.scores.items(), key=lambda item: -max(item[1].values(), default=0.0))
        cells = [(site, *(f"{row[bits]:.3g}" if bits in row else "-" for bits in columns)) for site, row in order]
        return text_table([("site", *(f"{bits} bits" for bits in columns)), *cells], numbers=True)


@ordinary_tensors()
def sensitivity(
    qmodel: QuantModel,
    data: Any,
    *,
    method: Method = "gradient",
    weight_bits: Bits = WEIGHT_BITS,
    activation_bits: Bits = (),
    loss: Loss | None = None,
    outputs: Outputs = "auto",
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> Sensitivity:
    """The loss of each site of a calibrated model at each number of bits, on `data` (batches as for calibration).

    `method`: "gradient", one forward and backward pass per batch: half the squared product of the error and the
    gradient, whose mean is the divergence of the outputs to second order. "kl": that divergence itself; "sqnr": noise
    of the outputs relative to their signal. These run the model once per batch, site and number of bits.

    `weight_bits`, `activation_bits`: the numbers of bits to try, in addition to a site's own; those that the backend
    cannot run are left out. Weights that an algorithm has changed (`gptq`) are scored with their float values.
    `outputs`: "scores" of classes along the last axis, or "values"; by default a single
    output of two dimensions has scores. `temperature`: for "gradient", the divisor of scores before their softmax:
    a model is overconfident on its training samples, and then no small change seems to matter. `loss`: instead of
    both, for "gradient", a function of the output and the batch, whose labels it may use: it returns the mean loss of
    the batch. `seed`: of the random vectors that replace labels.

    >>> sensitivity(qmodel, batches, weight_bits=(2, 4, 8))  # doctest: +SKIP
    Sensitivity(method='gradient', num_samples=256, scores={'conv1.weight': {2: 0.31, 4: 0.012, 8: 3e-05}, ...
    """
    _check(method, outputs, temperature, loss)
    if isinstance(data, (Tensor, Mapping)):
        data = [data]
    if activation_bits:  # the ranges of these candidates need another pass over the data
        require_repeatable(data, "sensitivity() and the ranges of activations")
    start = time.monotonic()
    wanted = _wanted_bits(qmodel, weight_bits, activation_bits)

    warn_if_lost(qmodel, "the scores are of rounding the changed weights again")
    with in_float(qmodel), evaluating(qmodel.model), without_gradients(qmodel.model):
        found = candidates_of(qmodel.model, qmodel.plan, wanted, calls(data, qmodel.original, qmodel.device))
        run = _Run(qmodel, found, outputs, temperature)
        for batch in track(data, f"sensitivity ({method})"):
            (call,) = calls([batch], qmodel.original, qmodel.device)
            if method == "gradient":
                generator = torch.Generator().manual_seed(seed + run.num_batches)
                run.backward(call, generator, None if loss is None else (loss, batch))
            else:
                run.one_by_one(call, method)
    if not run.num_samples:
        raise CalibrationError("sensitivity() was given no data; give a few dozen samples or more")
    scores = run.scores()
    if missing := [(site, bits) for site, row in scores.items() for bits, score in row.items() if math.isnan(score)]:
        raise CalibrationError(
            "sensitivity(): the score of {} at {} bits is NaN; look for NaN and infinity in the data and in the "
            "outputs (or the loss) of the float model".format(*missing[0])
        )
    return Sensitivity(method, run.num_samples, scores, time.monotonic() - start)


def _check(method: Method, outputs: Outputs, temperature: float, loss: Loss | None) -> None:
    for setting, is_known, allowed in (
        (f"method={method!r}", method in get_args(Method), ", ".join(get_args(Method))),
        (f"outputs={outputs!r}", outputs in get_args(Outputs), ", ".join(get_args(Outputs))),
        (f"temperature={temperature}", temperature > 0, "numbers above 0"),
        (f"loss=..., method={method!r}", loss is None or method == "gradient", "a loss with method='gradient'"),
        ("outputs='values', method='kl'", (method, outputs) != ("kl", "values"), "method='sqnr' for values"),
    ):
        if not is_known:
            raise ConfigError(f"sensitivity({setting}): allowed: {allowed}")


def _wanted_bits(qmodel: QuantModel, weight_bits: Bits, activation_bits: Bits) -> dict[str, list[int]]:
    own = {q.name: q for q in qmodel.model.modules() if isinstance(q, Quantizer)}
    live = [site for site in qmodel.plan if site in own and not own[site].fake_fused]
    if not live or not all(own[site].is_calibrated for site in live):
        raise CalibrationError("sensitivity() needs a calibrated model; call calc_qparams() first")
    wanted = {"weight": weight_bits, "activation": activation_bits}
    return {site: _bits(wanted[own[site].target], own[site].spec.bits) for site in live}


class _Run:
    """Gathers the sums of all sites, batch after batch."""

    def __init__(self, qmodel: QuantModel, candidates: Candidates, outputs: Outputs, temperature: float = 1.0) -> None:
        self.qmodel, self.candidates, self.outputs, self.temperature = qmodel, candidates, outputs, temperature
        self.num_samples = self.num_batches = 0
        self.sums = {site: dict.fromkeys(group, 0.0) for site, group in candidates.items()}
        layers = [module for module in qmodel.model.modules() if isinstance(module, WeightedQuantOpr)]
        self.layers = {m.weight_quantizer.name: m for m in layers if m.weight_quantizer.name in candidates}
        others = candidates.keys() - self.layers.keys()
        self.quantizers = {quantizer.name: quantizer for quantizer in qmodel.quantizers() if quantizer.name in others}
        with torch.no_grad():
            self.weights = {
                site: {bits: quantized(q, current_weight(layer.op)) for bits, q in candidates[site].items()}
                for site, layer in self.layers.items()
            }

    def scores(self) -> dict[str, dict[int, float]]:
        return {
            site: {bits: value / self.num_samples for bits, value in sorted(row.items())}
            for site, row in self.sums.items()
        }

    # --- all sites in one backward pass

    def backward(self, call: Any, generator: torch.Generator, loss: tuple[Loss, Any] | None) -> None:
        watch = _Watch(self)
        with contextlib.ExitStack() as stack:
            for layer in self.layers.values():
                stack.callback(layer.register_forward_hook(watch.layer, with_kwargs=True).remove)
            for quantizer in self.quantizers.values():
                stack.callback(quantizer.register_forward_hook(watch.quantizer).remove)
            with torch.enable_grad():
                output = self.qmodel(*call[0], **call[1])
                count = watch.count = num_samples(call, output)
                target = self._target(output, generator) if loss is None else _mean_loss(*loss, output) * count
                if not watch.leaves or not target.requires_grad:
                    raise CalibrationError(
                        "no gradient reaches the quantized tensors (the model's own code runs without gradients); use "
                        'method="sqnr" or "kl"'
                    )
                torch.autograd.grad(target, watch.leaves, allow_unused=True)
        for (site, bits), product in watch.found.items():
            self.sums[site][bits] += 0.5 * float(product.double().square().sum())
        self.num_samples += count
        self.num_batches += 1

    def _target(self, output: Any, generator: torch.Generator) -> Tensor:
        tensors = _float_tensors(output)
        draw = partial(fisher_direction, temperature=self.temperature) if self._has_scores(tensors) else value_direction
        parts = [(draw(tensor.detach(), generator) * tensor).sum() for tensor in tensors if tensor.requires_grad]
        return torch.stack([part.float() for part in parts]).sum() if parts else torch.zeros(())

    def _has_scores(self, tensors: Sequence[Tensor]) -> bool:
        is_plain = len(tensors) == 1 and tensors[0].ndim == 2 and tensors[0].shape[-1] > 1
        return self.outputs == "scores" or (self.outputs == "auto" and is_plain)

    # --- one site after the other

    @torch.no_grad()
    def one_by_one(self, call: Any, method: Method) -> None:
        def run() -> list[Tensor]:
            given = pytree.tree_map_only(Tensor, Tensor.clone, call)  # a model may write into its inputs
            return [tensor.float() for tensor in _float_tensors(self.qmodel(*given[0], **given[1]))]

        original = run()
        count = num_samples(call, original)
        if method == "kl" and not self._has_scores(original):
            raise ConfigError(
                f'sensitivity(method="kl"): the model returns {len(original)} outputs of shapes '
                f'{[tuple(tensor.shape) for tensor in original]}; if they are scores of classes, set outputs="scores", '
                'else use method="sqnr"'
            )
        for site, group in self.candidates.items():
            for bits, quantizer in group.items():
                with self._only(site, quantizer):
                    changed = run()
                pairs = list(zip(changed, original, strict=True))
                if method == "kl":
                    value = sum(float(divergence(a, b)) for a, b in pairs)
                else:
                    noise, signal = (
                        sum(float(part.double().square().sum()) for part in parts)
                        for parts in ([a - b for a, b in pairs], original)
                    )
                    value = noise / signal * count if signal else 0.0
                self.sums[site][bits] += value
        self.num_samples += count
        self.num_batches += 1

    @contextlib.contextmanager
    def _only(self, site: str, quantizer: Quantizer) -> Iterator[None]:
        """Inside, this site alone is quantized, by this quantizer."""
        with contextlib.ExitStack() as stack:
            if site in self.layers:
                layer = self.layers[site]
                stack.callback(layer._modules.__setitem__, "weight_quantizer", layer.weight_quantizer)
                stack.callback(setattr, quantizer, "use_quant", quantizer.use_quant)
                layer._modules["weight_quantizer"], quantizer.use_quant = quantizer, True
            else:
                hooked = self.quantizers[site]
                hook = hooked.register_forward_hook(lambda _, inputs, __: quantized(quantizer, inputs[0]))
                stack.callback(hook.remove)
            yield


class _Watch:
    """The hooks of one forward and backward pass; `found` gets the products of errors and gradients of each site.

    `count`: the number of samples, which is set before the first gradient is known.
    """

    def __init__(self, run: _Run) -> None:
        self.run, self.count = run, 0
        self.found: dict[tuple[str, int], Tensor] = {}
        self.leaves: list[Tensor] = []

    def layer(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        before, bias = output.detach(), layer.stored_bias()

        def error(site: str, bits: int) -> Tensor:
            changed: Tensor = forward_with(layer.op, self.run.weights[site][bits], bias, args, kwargs)
            return changed - before

        return self._watched(output, error, layer.weight_quantizer.name)

    def quantizer(self, quantizer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.layout is not torch.strided:
            return None
        x, candidates = output.detach(), self.run.candidates
        return self._watched(output, lambda site, bits: quantized(candidates[site][bits], x) - x, quantizer.name)

    def _watched(self, output: Tensor, error_of: Callable[[str, int], Tensor], site: str) -> Tensor:
        """Replaces `output` by a tensor with a hook that measures when its gradient is known."""
        leaf = output if output.requires_grad else output.detach().requires_grad_()
        if leaf is not output:
            self.leaves.append(leaf)

        @torch.no_grad()
        def measure(gradient: Tensor) -> None:
            for bits in self.run.candidates[site]:
                product = products(gradient, error_of(site, bits), self.count)
                known = self.found.get((site, bits))
                self.found[site, bits] = product if known is None else known + product

        # Hooked on a view, because other ops that read the same tensor unquantized must not count. Of a leaf a copy is
        # hooked: the model may write into it in place, which torch forbids for leaves that require a gradient.
        onward = leaf.clone() if leaf is not output else output.view_as(output)
        onward.register_hook(measure)
        return onward


def _mean_loss(loss: Loss, batch: Any, output: Any) -> Tensor:
    found = loss(output, batch)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"sensitivity(loss=...): it returned {shown}; it must return the mean loss of the batch, a tensor of one "
            "number that gradients can be taken of"
        )
    return found.reshape(())


def _bits(candidates: Sequence[int], own: int) -> list[int]:
    given = candidates if isinstance(candidates, Iterable) else [candidates]
    are_whole = all(isinstance(bits, Integral) and bits is not True and 1 <= bits <= 16 for bits in given)
    if given is not candidates or not are_whole:
        raise ConfigError(f"candidate bits {candidates!r}: allowed: a list of whole numbers from 1 to 16, as [2, 4, 8]")
    return sorted({*candidates, own})


def _float_tensors(output: Any) -> list[Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]


def require_sites(given: Iterable[str], known: Iterable[str], what: str = "the sensitivity") -> None:
    """Raise for the sites of another model."""
    names = dict.fromkeys(known)
    if missing := [site for site in given if site not in names]:
        near = ", ".join(near_names(missing[0], list(names)))
        raise ConfigError(f"{what} has a site {missing[0]!r}, allowed: sites of the model; near names: {near}")
