"""A pause of cyclic garbage collection.

Tracing and planning make millions of small objects that live until they end. The search for cycles
among these objects took half of the planning time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch cyclic garbage collection off inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
