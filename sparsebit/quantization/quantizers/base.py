"""`Quantizer`: observes a tensor, computes scale and zero point, fake-quantizes.

It is built from a `TensorSpec` and keeps scale and zero point as buffers, or as parameters if they are learned. Three
states: observing (calibration; the output is the input), enabled (fake-quant), and permanently off (`fake_fused`).
Calibration copies its numbers into the existing tensor objects, because an optimizer may hold them.

The arithmetic is in `numerics/fake_quant`; switches and the state_dict are in `quantizer_state.py`. Quantizers know
nothing about graphs: a `QuantOpr` calls them, calibration and export read them by their name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsebit.backends import Format
from sparsebit.config.section import Section
from sparsebit.config.targets import ACTIVATION, Target, as_target
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.values.nested import unwrapped
from sparsebit.numerics import xnnpack_kernels
from sparsebit.numerics.fake_quant import dispatch
from sparsebit.numerics.fake_quant.gradients import Gradient
from sparsebit.numerics.fake_quant.operator import is_transformed
from sparsebit.numerics.qparams import check_backend, checked_qparams, dequantized_range, qparams_from_range
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.first_sparsebit import FormerNames
from sparsebit.quantization.observers import Observer, build_observer
from sparsebit.quantization.observers.magnitudes import ANYWHERE, BEFORE_SOFTMAX, Apart, Magnitudes
from sparsebit.quantization.quantizers.quantizer_state import QuantizerState


class Quantizer(QuantizerState, FormerNames):
    """Base of all quantizers, and by itself the uniform one.

    Subclasses change how values are quantized (`transform`, `fake_quantize`), or how scales are learned
    (`make_parameters`, `qparams`).
    """

    TYPE: ClassVar[str] = "base"
    TARGETS: ClassVar[tuple[Target, ...]] = ("weight", ACTIVATION)
    OPTIONS: ClassVar[type[Section]] = Section
    FORMAT: ClassVar[Format] = "integer"
    GRADIENT: ClassVar[Gradient] = "ste"

    options: Section  # those that it was registered with (`register_quantizer`), with the config's values

    def __init__(
        self,
        spec: TensorSpec,
        target: Target,
        *,
        name: str = "",
        backend: str = "virtual",
        num_scales: int = 1,
        observer: str = "minmax",
        observer_options: Section | None = None,
        options: Section | None = None,
        observed_as: Target | None = None,
        ema_ratio: float = 0.9,
    ) -> None:
        """`observed_as`: how the observer treats the tensor, if that differs from its target: a weight that is computed
        in the forward is observed like an activation, over many forwards. `ema_ratio`: the weight of the past in the
        range of an activation that follows the data.
        """
        super().__init__()
        if spec.format != self.FORMAT:
            spec = spec.replace(format=self.FORMAT, narrow=False)
        self.spec, self.target, self.name, self.backend = spec, as_target(target), name, backend
        self.observer_name, self.observer_options, self.ema_ratio = observer, observer_options, ema_ratio
        self.options = self.OPTIONS() if options is None else options
        self.observed_as = as_target(observed_as or target)
        self.observer: Observer[Any] = self._new_observer()
        self.use_quant = self.fake_fused = self.observing = self.export_onnx = self.was_unseen = False
        # Whether the grid follows the data in training, and whether `freeze("observers")` holds it at present.
        self.follows, self.is_held = self.ALWAYS_FOLLOWS, False
        self.held_parameters: set[str] = set()  # names of frozen parameters, which `unfreeze` lets learn again
        # The separate quantizers that round this op's inputs instead of this one, by the names that errors show.
        self.replaced_by: dict[str, QuantizerState] = {}
        # Whether the runtime multiplies by the scale's reciprocal instead of dividing (set by `attach_integer_ops`).
        self.by_reciprocal = False
        # Observed in calibration, to find tensors that hold a mask's numbers: these have no grid, and stay in float.
        self.saw_infinity, self.magnitudes = False, Magnitudes()
        self.feeds_softmax = False  # whether a softmax reads the tensor, perhaps after sums and moves
        self.float_reason = ""  # why calibration has switched it off
        self.make_parameters(num_scales)
        # Both are saved in the state_dict, so that a fresh model equals the saved one. They are 0 or 1 in float:
        # averages of models (`torch.optim.swa_utils`) subtract and divide every buffer.
        self.register_buffer("calibrated", torch.tensor(0.0))
        self.register_buffer("fused", torch.tensor(0.0))

    # --- overridden by subclasses

    def make_parameters(self, num_scales: int) -> None:
        """Create `scale` and `zero_point`, one per scale; a learned one is an `nn.Parameter` from the start.

        A learned number has shape `(1,)`, not `()`: sharded training (`fully_shard`) does not support scalars.
        """
        shape = () if num_scales == 1 else (num_scales,)
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("zero_point", torch.zeros(shape))

    def transform(self, x: Tensor) -> Tensor:
        """The tensor that is observed and quantized instead of `x` (DoReFa: its tanh)."""
        return x

    def prepare_folding(self, weight: Tensor) -> None:
        """Called before per-channel factors are folded into the weight."""

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The current scale and zero point."""
        return self.scale, self.zero_point

    def operands(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point as arguments of the fake-quant operator, which itself takes the scale's magnitude."""
        return self.qparams()

    def fake_quantize(self, x: Tensor) -> Tensor:
        """`transform(x)` rounded to the grid, with the gradients of this quantizer."""
        scale, zero_point = self.operands()
        if self.is_following:  # the next forward changes them in place, but this one's backward needs today's values
            scale, zero_point = scale.clone(), zero_point.clone()
        x = self.transform(x)
        if self.by_reciprocal and self._runs_as_its_runtime(x):
            x = xnnpack_kernels.quantized(x, scale, zero_point, self.spec.qmin, self.spec.qmax)  # stays what it is now
        return dispatch.fake_quantize(x, scale, zero_point, self.spec, gradient=self.GRADIENT, tag=self.name)

    def _runs_as_its_runtime(self, x: Tensor) -> bool:
        """Whether the last bit matters: in eval mode, where no gradient is asked for and nothing is traced."""
        is_plain = not self.training and x.dtype == torch.float32 and self.spec.granularity.kind == "tensor"
        return is_plain and not (torch.is_grad_enabled() and x.requires_grad) and not torch.compiler.is_compiling()

    # --- forward

    def forward(self, x: Tensor) -> Tensor:
        """`x` unchanged while off; sizes, indices, masks and sparse tensors are never quantized."""
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided):
            return x
        if self.observing:
            if self.target == "activation":
                self.magnitudes.update(x)
            self.update_observer(x)
        if not self.is_enable:
            return x
        if not torch.compiler.is_compiling() and is_transformed():
            self._require_own_calibration()
        if self.is_following:
            self.follow(x)
        return self.fake_quantize(x)

    def _require_own_calibration(self) -> None:
        """Raise if scale and zero point were never calibrated.

        `torch.func.stack_module_state` runs one layer with the states of several, which were not observed.
        """
        if all(map(bool, unwrapped(self.calibrated))) and not any(map(bool, unwrapped(self.fused))):
            return
        raise CalibrationError(
            f"{self.name}: torch.func calls this layer with the state of several, and calibration saw only this one; "
            "give it their parameters alone (its own buffers stay), call the layers one after the other, or set "
            "QUANTIZER.DISABLE for them"
        )

    @property
    def is_following(self) -> bool:
        """Whether a forward now changes the grid: in training, but not if a backward recomputes it (checkpointing)."""
        if not self.follows or self.is_held or not self.training or not torch.is_grad_enabled():
            return False
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1

    # --- from statistics to scale and zero point

    def update_observer(self, x: Tensor) -> None:
        x = x.detach()
        try:
            self.observer.update(self.transform(x))
        except CalibrationError as error:
            has_nan = bool(torch.isnan(x).any())
            if self.target == "activation" and not has_nan and bool(torch.isinf(x).any()):
                self.saw_infinity = True
            elif has_nan or self.masked_numbers() is None:
                raise CalibrationError(f"{self.name}: {error}") from None
            # Else: a mask's numbers, too large for the statistic. The calibration run leaves such a site in float.

    def masked_numbers(self) -> Apart | None:
        """Observed values that come from a mask, recognized by their size; None if there are none."""
        return self.magnitudes.apart(BEFORE_SOFTMAX if self.feeds_softmax else ANYWHERE)

    def start_observing(self) -> None:
        """Forget the observed statistics, and observe from now on."""
        self.observer.reset()
        self.saw_infinity, self.magnitudes, self.float_reason = False, Magnitudes(), ""
        self.observing = True

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        """Set and return scale and zero point of the observed range; the statistics are dropped.

        A quantizer that is permanently off does not change.
        """
        if self.fake_fused:
            return self.qparams()
        if self.observer.is_empty:
            raise CalibrationError(
                f"{self.name}: no data was observed; run forwards between prepare_calibration() and calc_qparams()"
            )
        numbers = self.calc_qparams_with_minmax(*self.observer.calc_range())
        self.observer.reset()
        return numbers

    def calc_qparams_with_minmax(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Set and return scale and zero point of a given range."""
        if self.fake_fused:
            return self.qparams()
        self._calibrate(*qparams_from_range(min_val, max_val, self.spec))
        return self.qparams()

    def _calibrate(self, scale: Tensor, zero_point: Tensor) -> None:
        check_backend(self.spec, zero_point, self.backend, self.name)
        self.revive()
        self._store("scale", scale)
        self._store("zero_point", zero_point)
        self.calibrated.fill_(True)

    @torch.no_grad()
    def store_qparams(self, scale: Tensor | float, zero_point: Tensor | float = 0) -> None:
        """Set scale and zero point; the quantizer then counts as calibrated.

        One number for all channels or groups, or one for each. The tensors stay the same objects, as an optimizer may
        hold them. Numbers that the number format or the backend does not support raise an error. So does a quantizer
        that computes its scale from other numbers (PACT: `alpha`), unless its class defines this method.
        """
        self._refuse_elsewhere("store_qparams()")
        if not {"scale", "zero_point"} <= {**self._parameters, **self._buffers}.keys():
            raise ConfigError(
                f"{self.name}: the quantizer {self.TYPE!r} computes its scale from other numbers "
                f"({', '.join(self._parameters)}); set those instead, or define store_qparams() in its class"
            )
        # The number of an activation's channels is known only after calibration.
        is_open = self.spec.granularity.kind != "tensor" and self.observed_as == "activation" and not self.is_calibrated
        num_scales = None if is_open else self.scale.numel()
        scale, zero_point = (torch.as_tensor(number).detach().to(self.scale) for number in (scale, zero_point))
        self._calibrate(*checked_qparams(scale, zero_point, self.spec, num_scales, self.name))

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        """Move the grid to the range that the observer finds in `x`: immediately for a weight, for an activation by a
        moving average with the weight EMA_RATIO of the past.

        The average lives in scale and zero point, which is therefore not rounded: there is no other state.
        """
        self.update_observer(x)
        if self.observer.is_empty:
            return
        low, high = self.observer.calc_range(check=False)
        self.observer.reset()
        spec, past = self.spec, 0.0 if self.observed_as == "weight" else self.ema_ratio
        scale, zero_point = qparams_from_range(low, high, spec, check=False)
        if past:  # average the scale and the lower end of the range; the zero point follows from both
            start = (spec.qmin - self.zero_point) * self.scale
            scale, low = torch.lerp(scale, self.scale, past), torch.lerp(low, start, past)
            zero_point = zero_point if spec.symmetric else (spec.qmin - low / scale).clamp_(spec.qmin, spec.qmax)
        has_range = (high > low) & torch.isfinite(high - low)  # a batch of zeros, or with NaN, changes nothing
        self._store("scale", torch.where(has_range, scale, self.scale))
        self._store("zero_point", torch.where(has_range, zero_point, self.zero_point))

    def dequantized_range(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value on the grid."""
        return dequantized_range(*self.qparams(), self.spec)

    # --- another grid

    def set_backend(self, backend: str) -> None:
        """Move to another backend; a format or zero point that it cannot run raises an error."""
        check_backend(self.spec, self.zero_point.detach(), backend, self.name)
        self.backend = backend

    def set_bit(self, bit: int) -> None:
        """Change the bit-width over the same range of values; one that the backend cannot run raises an error."""
        self._refuse_elsewhere(f"set_bit({bit})")
        if bit == self.spec.bits:
            return
        spec = self.spec.replace(bits=bit, narrow=self.spec.narrow and bit == 8)
        check_backend(spec, torch.zeros(()), self.backend, self.name)
        low, high = self.dequantized_range()
        self.spec = spec
        self.observer = self._new_observer()
        if self.is_calibrated:
            self.calc_qparams_with_minmax(low.detach(), high.detach())

    def _new_observer(self) -> Observer[Any]:
        return build_observer(self.observer_name, self.spec, self.observer_options, self.observed_as)

    # --- state

    def describe(self) -> dict[str, Any]:
        """The number format and its origin, for JSON."""
        return {
            "quantizer": self.TYPE,
            "bits": self.spec.bits,
            "symmetric": self.spec.symmetric,
            "granularity": repr(self.spec.granularity),
            "observer": self.observer_name,
            "calibrated": self.is_calibrated,
        }

    def summary(self) -> str:
        """`uint8 scale=0.021 zero_point=12` and the like, for reprs and tables."""
        if self.fake_fused:
            return "off"
        text = self.spec.dtype_name
        if not self.is_calibrated:
            return f"{text} uncalibrated"
        scale, zero_point = (value.detach().float() for value in self.qparams())
        if scale.numel() == 1:
            text += f" scale={float(scale):.4g} zero_point={int(zero_point.round())}"
        else:
            text += f" scale=[{float(scale.min()):.4g}..{float(scale.max()):.4g}]x{scale.numel()}"
            text += f" zero_point=[{int(zero_point.min().round())}..{int(zero_point.max().round())}]"
        return text if self.use_quant else f"{text} (off)"

    def extra_repr(self) -> str:
        return f"{self.TYPE} {self.summary()}"


def read_copies(quantizer: Quantizer) -> None:
    """Read a copy of each input from now on: the model's own code may overwrite the input before the backward."""
    # A hook, not an attribute: torch.compile would guard on an attribute before every call.
    if not reads_copies(quantizer):
        quantizer.register_forward_pre_hook(_read_copy)


def reads_copies(quantizer: Quantizer) -> bool:
    return _read_copy in quantizer._forward_pre_hooks.values()


def _read_copy(quantizer: Quantizer, args: tuple[Any, ...]) -> Any:
    """A forward pre-hook: the quantizer reads a copy of its input, so that the backward finds it unchanged."""
    is_kept = quantizer.is_enable and torch.is_grad_enabled()
    return (args[0].clone(),) if is_kept and isinstance(args[0], Tensor) else None


def rounds_by_operator(quantizer: Quantizer) -> bool:
    """Whether it rounds with the package's operator after `transform`. A user's own quantizer may do anything else."""
    return has_our_methods(quantizer, "fake_quantize", "operands")


def has_our_methods(quantizer: Quantizer, *methods: str) -> bool:
    """Whether its class inherits these methods from this package."""
    kind: Any = type(quantizer)
    return _are_ours(kind, *methods)


@lru_cache(maxsize=256)
def _are_ours(kind: Any, *methods: str) -> bool:
    return all(getattr(kind, method).__module__.startswith("sparsebit.") for method in methods)


def as_number(param: Tensor) -> Tensor:
    """A single number as `()`, the shape that `qparams` returns; one per channel or group is unchanged."""
    return param.reshape(()) if param.numel() == 1 else param
