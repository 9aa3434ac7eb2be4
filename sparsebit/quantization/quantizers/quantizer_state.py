"""`QuantizerState`: the switches of a quantizer, and how they, scale and zero point are saved in a state_dict.

Scale, zero point, `calibrated` and `fused` are buffers. The switches and the number format are one byte tensor, the
extra state: `[number of switches, switches..., JSON of the format]`. Loading raises if the saved format differs from
the model's, or if the backend cannot run the zero point.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError, CalibrationError, CheckpointError, ConfigError
from sparsebit.numerics.qparams import SMALLEST_SCALE, check_backend
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.observers import Observer

_NUM_FLAGS = 2  # the least number of `flags`; subclasses add more


class QuantizerState(nn.Module):
    """The state of a `Quantizer`, which is its only subclass and defines what the numbers mean."""

    ALWAYS_FOLLOWS: ClassVar[bool] = False
    # Quantizers with the same NUMBERS can load each other's scale and zero point: calibrated ones and learned ones.
    NUMBERS: ClassVar[str] = "uniform"

    scale: Tensor
    zero_point: Tensor
    calibrated: Tensor
    fused: Tensor
    spec: TensorSpec
    name: str
    backend: str
    use_quant: bool
    follows: bool
    fake_fused: bool
    was_unseen: bool
    observing: bool
    observer: Observer[Any]
    replaced_by: dict[str, QuantizerState]

    @property
    def is_enable(self) -> bool:
        return self.use_quant and not self.fake_fused

    @property
    def is_calibrated(self) -> bool:
        return bool(self.calibrated)

    # --- switches

    def enable_quant(self) -> None:
        if not self.is_calibrated and not self.fake_fused:
            raise CalibrationError(
                f"{self.name} has no scale yet; call prepare_calibration(), run a few batches, then calc_qparams() "
                "(or load a calibrated state_dict) before quantization is switched on"
            )
        if not all(other.use_quant for other in self.replaced_by.values()):
            self._refuse_elsewhere("enable_quant()")
        self.use_quant = True

    def disable_quant(self) -> None:
        if any(other.is_enable for other in self.replaced_by.values()):
            self._refuse_elsewhere("disable_quant()")
        self.use_quant = False

    def follow_range(self, wanted: bool = True) -> None:
        """Whether training moves the grid with the data from now on. Learned numbers move by their gradient instead."""
        self.follows = (wanted or self.ALWAYS_FOLLOWS) and not self.learns_numbers and not self.fake_fused

    @property
    def learns_numbers(self) -> bool:
        return not {"scale", "zero_point"} <= self._buffers.keys()

    def set_fake_fused(self) -> None:
        """Switch off permanently, without a change of the graph: scale 1, zero point 0, no gradient."""
        if not all(other.fake_fused for other in self.replaced_by.values()):
            self._refuse_elsewhere("set_fake_fused()")
        self.fake_fused = True
        self.fused.fill_(True)
        self.observing = False
        self.requires_grad_(False)
        self.observer.reset()
        with torch.no_grad():
            for name, value in (("scale", 1.0), ("zero_point", 0.0)):
                if name in self._buffers or name in self._parameters:
                    getattr(self, name).fill_(value)

    def revive(self) -> None:
        """Undo `set_fake_fused` for a quantizer that is off because an earlier calibration never reached it."""
        if self.was_unseen:
            self.fake_fused = self.was_unseen = False
            self.fused.fill_(False)
            self.requires_grad_(True)

    def _refuse_elsewhere(self, wish: str) -> None:
        if self.fake_fused and self.replaced_by:
            raise ConfigError(
                f"{self.name}.{wish}: this quantizer is off, because others read the same tensor; it is quantized by "
                f"{', '.join(self.replaced_by)}: call {wish} there (qmodel.quantizers() lists all; qmodel.set_quant() "
                "switches the whole model), or write A.SPECIFIC for this layer before the QuantModel is built"
            )

    # --- numbers

    def _store(self, name: str, value: Tensor) -> None:
        """Write `scale`, `zero_point` or `alpha`, of any shape. The tensor object stays: an optimizer may hold it."""
        tensor = getattr(self, name)
        value = value.detach().to(tensor)
        with torch.no_grad():
            if tensor.numel() == value.numel():
                tensor.copy_(value.reshape(tensor.shape))
            else:
                tensor.set_(value.clone())

    # --- state

    def get_extra_state(self) -> Tensor:
        """The switches, so that training continues in a fresh model as before, and the format of the numbers."""
        flags = self.flags()
        return torch.tensor([len(flags), *flags, *json.dumps(self._format()).encode()], dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        self.set_flags(_read_extra_state(state)[0])

    def flags(self) -> list[bool]:
        return [self.use_quant, self.follows]

    def set_flags(self, flags: list[bool]) -> None:
        self.use_quant, self.follows = flags[:2]

    def _format(self) -> list[str]:
        """The format of the saved numbers."""
        spec = self.spec
        return [self.NUMBERS, spec.dtype_name, repr(spec.granularity), "narrow" if spec.narrow else "full"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state = state_dict.setdefault(prefix + "_extra_state", self.get_extra_state())  # of an older version: unchanged
        saved = _read_extra_state(state)[1]
        if saved is not None and saved != self._format() and not bool(state_dict.get(prefix + "fused", False)):
            then, now = (", ".join(form) for form in (saved, self._format()))
            args[-1].append(
                f"{self.name}: saved as ({then}), but this model's config makes it ({now}); use the config that the "
                "state was saved with, as QuantModel.load() does"
            )
            return
        # A per-channel activation learns its number of channels in calibration, so a fresh model has another shape.
        for name in ("scale", "zero_point", "alpha"):
            stored, own = state_dict.get(prefix + name), getattr(self, name, None)
            if stored is not None and own is not None and stored.shape != own.shape:
                if stored.numel() == own.numel():  # one number, () or (1,)
                    state_dict[prefix + name] = stored.reshape(own.shape)
                else:
                    self._store(name, stored)
        super()._load_from_state_dict(state_dict, prefix, *args)
        # A learned scale may have become negative; the quantizer used its magnitude. A buffer must be positive.
        scale = self._buffers.get("scale")
        if scale is not None and bool((scale < SMALLEST_SCALE).any()):
            self._buffers["scale"] = scale.abs().clamp_min(SMALLEST_SCALE)
        try:
            check_backend(self.spec, self.zero_point.detach(), self.backend, self.name)
        except BackendError as error:
            args[-1].append(str(error))
        if bool(self.fused) and not self.fake_fused:
            self.set_fake_fused()
            self.was_unseen = True  # it was planned, and calibration switched it off
        elif self.was_unseen and not bool(self.fused):
            self.revive()


def _read_extra_state(state: Tensor) -> tuple[list[bool], list[str] | None]:
    """The switches, and the saved format; None for an older version."""
    try:
        values = state.tolist()
        if state.dtype == torch.bool and len(values) >= _NUM_FLAGS:
            return values, None
        num_flags = values[0]
        flags, form = [bool(flag) for flag in values[1 : 1 + num_flags]], json.loads(bytes(values[1 + num_flags :]))
        if len(flags) >= _NUM_FLAGS and isinstance(form, list) and all(isinstance(word, str) for word in form):
            return flags, form
    except (AttributeError, IndexError, TypeError, ValueError):
        pass
    raise CheckpointError("the state of a quantizer (_extra_state) is damaged; save the model again")
