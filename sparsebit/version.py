"""The one place of the version's number in the code; a test keeps it equal to the package's metadata."""

from __future__ import annotations

__version__ = "0.1.0"
