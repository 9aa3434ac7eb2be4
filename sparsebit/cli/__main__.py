"""`python -m sparsebit.cli`: the command line where its script is not on the PATH."""

from __future__ import annotations

from sparsebit.cli.main import app

if __name__ == "__main__":
    app(prog_name="sparsebit")
