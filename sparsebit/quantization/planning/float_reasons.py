"""Why a layer stays float: the texts that plan, passes, coverage and export share."""

from __future__ import annotations

SWITCHED_OFF = ("QUANTIZER.DISABLE is true in the config", "SKIP_TRACE_MODULES keeps it in float")
COMPLEX = "it computes with complex numbers, which have no integer format"
HIDDEN = "a mask hides values in it with minus infinity (or a number as large), and no grid fits both"
MASKED = "it holds numbers of a mask, far beyond all other values: a grid with them has one code for all others"
VECTOR = "biases, norms and other vectors stay float"
TABLE = "no matrix product reads it: tables and elementwise factors stay float"
UNEXPLAINED = "its module's own code reads it, and it is not known how: pass example_inputs"
UNCALLED = "the captured path does not read it, and it is not known how other paths do"
