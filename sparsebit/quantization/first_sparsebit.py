"""State dicts of the first Sparsebit (2022-2023): recognises them, and loads their weights into the float model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from sparsebit.config.selectors import node_name
from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.numerics.spec import PerChannel, TensorSpec

_HOW = (
    "this state_dict was saved by the first Sparsebit, whose quantizers had other names and numbers; take its weights "
    "over with `float_model.load_state_dict(weights_of_first_sparsebit(state_dict, float_model))` "
    "(sparsebit.quantization.first_sparsebit), build the QuantModel from that model and calibrate it"
)


def is_of_first_sparsebit(names: Iterable[str]) -> bool:
    """Whether these are the keys of a state_dict that the first Sparsebit made."""
    ends = {name.rpartition("_quantizer.")[2] for name in names if "_quantizer." in name}
    is_ours = not ends.isdisjoint({"calibrated", "fused"})
    return not ends.isdisjoint({"observer.min_val", "observer.max_val"}) or ("scale" in ends and not is_ours)


def refuse_first_sparsebit(names: Iterable[str]) -> None:
    """Raise for keys of the first Sparsebit, with an explanation of what to do."""
    if is_of_first_sparsebit(names):
        raise CheckpointError(_HOW)


def weights_of_first_sparsebit(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The weights in a state_dict of the first Sparsebit, by the names of the float `model`.

    It named layers after torch.fx nodes (`model.layer1_0_conv1.weight`). Scales are left out: calibrate again. If it
    had folded batch norms, their tensors are missing, and that is an error.
    """
    given = {_plain(name): value for name, value in state_dict.items() if "_quantizer." not in name}
    found: dict[str, Tensor] = {}
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        found.update((name, given[key]) for key in (f"{node_name(path)}.{leaf}", name) if key in given)
    if missing := [n for n in model.state_dict() if n not in found and not n.endswith("num_batches_tracked")]:
        names = f"{len(missing)} of {type(model).__name__}'s ({', '.join(missing[:3])})"
        raise CheckpointError(
            f"the state_dict has no tensor for {names}; it is of another model, or was saved with batch norms folded "
            "(SCHEDULE.FUSE_BN): load such weights into a model without those norms"
        )
    return {**model.state_dict(), **found}


class FormerNames:
    """A quantizer's number format, and its mark for exporters, by the names that the first Sparsebit had."""

    spec: TensorSpec
    export_onnx: bool

    @property
    def bit(self) -> int:
        return self.spec.bits

    @property
    def is_symmetric(self) -> bool:
        return self.spec.symmetric

    @property
    def is_perchannel(self) -> bool:
        return isinstance(self.spec.granularity, PerChannel)

    @property
    def ch_axis(self) -> int:
        """The axis of the channels, per channel; else 0, which nothing depends on."""
        return self.spec.granularity.axis if isinstance(self.spec.granularity, PerChannel) else 0

    @property
    def cfg(self) -> NoReturn:
        raise ConfigError(
            "Quantizer.cfg is of the first Sparsebit; today quantizer.spec is the number format, .options are the keys"
        )

    def enable_export_onnx(self) -> None:
        """Mark for an exporter. The arithmetic stays the same: what is simulated is what is written."""
        self.export_onnx = True

    def disable_export_onnx(self) -> None:
        self.export_onnx = False


def _plain(name: str) -> str:
    """`model.bn1.module.weight` -> `bn1.weight`."""
    parts = name.removeprefix("model.").split(".")
    return ".".join(part for part in parts if part not in ("module", "op"))
