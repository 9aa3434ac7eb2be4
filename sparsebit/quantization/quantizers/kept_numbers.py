"""`KeptNumbers`: how numbers and switches of a quantizer get into a state_dict, and how they are checked on loading."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.errors import BackendError, CheckpointError
from sparsebit.numerics.qparams import SMALLEST_SCALE, check_backend
from sparsebit.numerics.spec import TensorSpec

_NUM_FLAGS = 2  # number of `flags`; subclasses have more


class KeptNumbers(nn.Module):
    """Scale, zero point and switches of a `Quantizer`, which defines their meaning and use."""

    NUMBERS: ClassVar[str] = "uniform"  # kind of the numbers in a state_dict; calibrated and learned steps: one kind

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

    def set_fake_fused(self) -> None:
        """As `Quantizer.set_fake_fused`."""
        raise NotImplementedError

    def revive(self) -> None:
        """As `Quantizer.revive`."""
        raise NotImplementedError

    def _store(self, name: str, value: Tensor) -> None:
        """Write a number of any shape; the tensor object (an optimizer may hold it) stays the same."""
        tensor = getattr(self, name)
        value = value.detach().to(tensor)
        with torch.no_grad():
            if tensor.numel() == value.numel():
                tensor.copy_(value.reshape(tensor.shape))
            else:
                tensor.set_(value.clone())

    def get_extra_state(self) -> Tensor:
        """The switches, so that training continues in a fresh model as before, and the format of the numbers."""
        flags = self.flags()
        return torch.tensor([len(flags), *flags, *json.dumps(self._format()).encode()], dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        flags, _ = _read_extra_state(state)
        self.set_flags(flags)

    def flags(self) -> list[bool]:
        return [self.use_quant, self.follows]

    def set_flags(self, flags: list[bool]) -> None:
        self.use_quant, self.follows = flags[:2]

    def _format(self) -> list[str]:
        """The format of the saved numbers."""
        return [
            self.NUMBERS,
            self.spec.dtype_name,
            repr(self.spec.granularity),
            "narrow" if self.spec.narrow else "full",
        ]

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
        # Per-channel activations know their number of channels only from data: a checkpoint has its own shape.
        for name in ("scale", "zero_point", "alpha"):
            stored, own = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(stored, Tensor) and isinstance(own, Tensor) and stored.shape != own.shape:
                if stored.numel() == own.numel():  # one number, () or (1,)
                    state_dict[prefix + name] = stored.reshape(own.shape)
                else:
                    self._store(name, stored)
        super()._load_from_state_dict(state_dict, prefix, *args)
        # A learned scale may have crossed zero: its magnitude was in use, and is what a file stores.
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
