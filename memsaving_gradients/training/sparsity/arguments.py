"""Checks of numbers that a user gives."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from memsaving_gradients.budget import is_integer
from memsaving_gradients.errors import ArgumentError

__all__ = ["real", "seed_of"]


def real(argument: str, value: Any, fits: Callable[[float], bool], way_out: str) -> float:
    """Return a real number, of any type but bool, as a float; raise unless it fits."""
    # Comparisons with nan are false.
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(float(value)):
        raise ArgumentError(argument, value, way_out)
    return float(value)


def seed_of(value: Any) -> int:
    """Return a seed as an int; raise unless it is a whole number from 0 on."""
    if not is_integer(value, 0):
        raise ArgumentError("seed", value, "give a whole number, 0 or more")
    return int(value)
