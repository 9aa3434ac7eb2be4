"""Language models with weights of 2 to 8 bits: quantized block by block, kept packed, measured packed."""

from __future__ import annotations
