"""`hooked`: hooks that run inside a `with` block alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch.utils.hooks import RemovableHandle


@contextlib.contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes the hooks at the end of the block, also after an error."""
    with contextlib.ExitStack() as removed:
        for handle in handles:
            removed.callback(handle.remove)
        yield
