"""Tests that pass plain and cannot pass with gradients that recompute, each because of a documented
limit."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

from tests.foreign.modes import PATCHED

__all__ = ["KNOWN", "Known", "is_known"]


@dataclass(frozen=True)
class Known:
    """Tests that fail because of a limit.

    Attributes
    ----------
    tests
        A pattern of their names in pytest.
    limit
        A part of the line of ``docs/limits.md`` about the limit.
    modes
        The modes in which they fail.
    """

    tests: str
    limit: str
    modes: tuple[str, ...] = PATCHED


KNOWN: tuple[Known, ...] = ()


def is_known(test: str, mode: str) -> bool:
    """Whether ``test`` is expected to fail in ``mode``."""
    return any(mode in known.modes and fnmatch(test, known.tests) for known in KNOWN)
