"""Why a layer stays float: the texts that plan, passes, coverage and export share."""

from __future__ import annotations

SWITCHED_OFF = ("QUANTIZER.DISABLE is true in the config", "SKIP_TRACE_MODULES keeps it in float")
COMPLEX = "it computes with complex numbers, which have no integer format"
HIDDEN = "a mask hides values in it with minus infinity (or a number as large): it has no grid"
MASKED = "it holds numbers of a mask, far beyond all other values, and a grid that reaches them has one code for these"
VECTOR = "biases, norms and other vectors stay float"
TABLE = "no matrix product reads it: tables and factors of values stay float"
UNEXPLAINED = "its module's own code reads it, and how is not known: pass example_inputs"
UNCALLED = "the captured path does not read it, and how other paths do is not known"
