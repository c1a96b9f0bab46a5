"""Modes of foreign tests: plain, with recomputation wherever possible, and within a budget."""

from __future__ import annotations

from typing import Any

__all__ = ["MODES", "PATCHED", "PLAIN", "options_of"]

PLAIN = "plain"
#: Modes with gradients that recompute.
PATCHED = ("recompute", "budget")
MODES = (PLAIN, *PATCHED)


def options_of(mode: str, planning_seconds: float) -> dict[str, Any] | None:
    """Return the options of each gradient computation; ``None``: it stays TensorFlow's own."""
    if mode == PLAIN:
        return None
    if mode == "recompute":
        return {"checkpoints": None, "progress": False}
    if mode == "budget":
        return {"budget": 0.5, "planning_seconds": planning_seconds, "progress": False}
    raise ValueError(f"mode={mode!r}: none of {', '.join(MODES)}")
