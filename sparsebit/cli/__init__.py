"""The command line: what a person types. Importing it loads no torch; every verb loads what it needs when it runs."""

from __future__ import annotations
