"""The files of the two packages, for tests that read the code."""

from __future__ import annotations

from tests.helpers.documented import ROOT

__all__ = ["ROOT", "SOURCES"]

SOURCES = sorted(
    path for room in ("graph_tools", "memsaving_gradients") for path in (ROOT / room).rglob("*.py")
)
