"""No cyclic garbage collection for a while.

Tracing and planning make millions of small objects that live to their end; looking for cycles among
them took half of planning's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection inside."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
