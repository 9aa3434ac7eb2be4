"""`as_device`: the device of a given name, if it exists."""

from __future__ import annotations

import torch

from sparsebit.errors import ConfigError


def as_device(device: torch.device | str) -> torch.device:
    """The device; one that does not exist here is a ConfigError.

    >>> as_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={str(device)!r}: allowed: cpu, cuda or cuda:N") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(f"device={str(device)!r}: torch sees {count} GPUs here; use cpu, or a lower number")
    return found
