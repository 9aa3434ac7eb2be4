"""Why a layer stays float: the words that plan, passes, coverage and export share."""

from __future__ import annotations

SWITCHED_OFF = ("QUANTIZER.DISABLE is true in the config", "SKIP_TRACE_MODULES keeps it in float")
