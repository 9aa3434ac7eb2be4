"""`parse_qconfig`: a quantization config out of a YAML file, a dict or YAML text."""

from __future__ import annotations

# The names of the built-in observers and quantizers are filed when these packages are imported.
import sparsebit.quantization.observers
import sparsebit.quantization.quantizers  # noqa: F401
from sparsebit.config.reading import Source, read
from sparsebit.config.schema import QuantConfig


def parse_qconfig(source: Source | QuantConfig) -> QuantConfig:
    """The checked, frozen config; everything wrong in it is named in one ConfigError.

    `source` is the path of a YAML file, a mapping, or YAML text. A config that is checked already comes back as it is.

    >>> qconfig = parse_qconfig("{W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}")
    >>> qconfig.W.QUANTIZER.BIT, qconfig.A.QSCHEME
    (4, 'per-tensor-affine')
    """
    return source if isinstance(source, QuantConfig) else QuantConfig.from_dict(read(source))
