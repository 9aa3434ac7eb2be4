"""Options of inductor for a quantized model (`QuantModel.compile`)."""

from __future__ import annotations

from typing import Any

# Values that are cheap to compute are computed in every kernel that reads them, rather than being written to memory as
# soon as they depend on five tensors. A normalization with a quantizer after it does.
_FEWER_BYTES = {"realize_reads_threshold": 12, "realize_acc_reads_threshold": 16, "realize_opcount_threshold": 200}


def compiler_options(device_type: str) -> dict[str, Any]:
    from sparsebit.quantization.speed.compiler.inductor_fusions import FuseQuantizers  # inductor is slow to import

    return {"pre_grad_custom_pass": FuseQuantizers()} | (_FEWER_BYTES if device_type == "cuda" else {})


def with_options(settings: dict[str, Any], device_type: str) -> dict[str, Any]:
    """`torch.compile`'s settings with this package's options added; the user's options win.

    torch accepts either a mode or options, so a mode is replaced by its options.
    """
    settings = dict(settings)
    mode, own = settings.pop("mode", None), settings.pop("options", None) or {}
    return settings | {"options": compiler_options(device_type) | _options_of(mode, settings.get("dynamic")) | own}


def _options_of(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return list_mode_options(mode, dynamic)
