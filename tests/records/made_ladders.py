"""Ladders for tests, made by hand."""

from __future__ import annotations

from sparsebit.records import Environment

ENVIRONMENT = Environment("1", "3.11", "2.13", {}, "Linux", "a CPU", 2)
