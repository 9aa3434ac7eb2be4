"""The command line. Importing it does not load torch; every verb imports the modules that it needs when it runs."""

from __future__ import annotations
