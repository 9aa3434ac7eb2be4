"""Placement by measurement: times on this machine decide which layers run in integers."""

from __future__ import annotations

from sparsebit.quantization.placement_search.profile import Choice, PlacementProfile
from sparsebit.quantization.placement_search.search import MeasuredPlacement, apply_placement, measure_placement

__all__ = ["Choice", "MeasuredPlacement", "PlacementProfile", "apply_placement", "measure_placement"]
