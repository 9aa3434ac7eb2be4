"""`quiet_conversion`: vendors' converters print, log, warn and draw progress bars; inside, they do none of it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator

from sparsebit.deploy.exporting.export_errors import quiet
from sparsebit.deploy.sessions.native_output import native_output_read


@contextlib.contextmanager
def quiet_conversion() -> Iterator[Callable[[], str]]:
    """The function returns what native code wrote."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with quiet(), warnings.catch_warnings(), native_output_read() as read:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield read
    finally:
        logging.disable(before)
