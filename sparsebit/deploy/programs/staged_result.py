"""`staged_result`: a file or a folder that replaces an older one in one step when it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sparsebit.folders import exchange, flush, put_in_place, staging_folder
from sparsebit.interrupts import ignored_interrupts


@contextlib.contextmanager
def staged_result(target: Path) -> Iterator[Path]:
    """A path in a hidden folder next to `target` to write to; after an exception or a kill the target is as it was."""
    target = target.resolve()  # what a link points to is replaced, not the link
    with staging_folder(target) as folder:
        made = folder / target.name
        yield made
        for path in (made, *made.rglob("*")) if made.is_dir() else (made,):
            flush(path)
        with ignored_interrupts():
            if made.is_file():
                os.replace(made, target)
            elif not target.exists():
                put_in_place(made, target)
            elif not exchange(made, target):  # the older folder is removed with the staging folder
                os.rename(target, folder / "older")
                os.rename(made, target)
            flush(target.parent)
