"""The version (a test keeps it equal to the metadata), and a warning if another project's package is installed."""

from __future__ import annotations

import warnings
from importlib import metadata

__version__ = "0.1.0"
_SCRIPT = "sparsebit.cli.main:app"  # every installation of this project has this entry point


def warn_of_the_index_package() -> None:
    """Warn if pip has installed the other project while this code runs from a checkout.

    On the package index the name `sparsebit` belongs to that project: one release, 0.0.1.dev0, which is empty.
    """
    try:
        installed = metadata.distribution("sparsebit")
    except metadata.PackageNotFoundError:
        return
    if not any(point.value == _SCRIPT for point in installed.entry_points):
        warnings.warn(
            f"the installed distribution 'sparsebit {installed.version}' is a package of another project, from the "
            "package index; pip uninstall sparsebit, then pip install path/to/sparsebit (the checkout)",
            stacklevel=3,
        )
