"""A budget as it is to be kept and as its user wrote it, and the error that says which one would do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsaving_gradients.device import DeviceMemory
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.units import exact_bytes, format_bytes

__all__ = ["Goal", "too_small"]


@dataclass(frozen=True)
class Goal:
    """A budget, as it is to be kept and as it was asked for.

    Attributes
    ----------
    budget
        Bytes in chunks.
    plain_need
        What plain training may need of them.
    base
        What fractions are of: `plain_bytes`.
    value
        The budget as the user wrote it; a `DeviceMemory`, if it is what that leaves.
    """

    budget: int
    plain_need: int
    base: int
    value: object


def too_small(goal: Goal, least: int, stopped: str = "") -> BudgetError:
    """The error for a budget below ``least``, which is the least that works, or that was found so far."""
    base, value = goal.base, goal.value
    fraction = min(1.0, math.ceil(least / base * 10_000) / 10_000)
    while fraction < 1 and int(fraction * base) < least:
        fraction = min(1.0, round(fraction + 0.0001, 4))
    of_plain = f"{fraction:g} of the {base:,} bytes of plain training"
    if least > base:
        of_plain = f"as much as plain training, which needs {base:,} or more (budget=1.0)"
    because, which = "no plan that fits was found", "that works is"
    if stopped:
        because = f"planning was {'interrupted' if stopped == 'interrupted' else 'stopped, out of time'}, and no plan so far fits"
        which = "that was found so far is"
    if isinstance(value, DeviceMemory):
        device, whole = value, value.enough_for(least)
        argument, value = "device_memory", value.value
        problem = (
            f"{because}: {device.taken}, which leaves {exact_bytes(goal.budget)} for a step; the "
            f"least device memory {which} {exact_bytes(whole)}, of which a step gets {least:,} "
            f"({format_bytes(least)}), {of_plain}"
        )
    else:
        argument, asked = "budget", "" if value == goal.budget else f" ({goal.budget:,} bytes)"
        problem = f"{because}{asked}; the least budget {which} {exact_bytes(least)}, {of_plain}"
    return BudgetError(
        argument, value, f"{problem}; give that, or a smaller batch", goal.budget, least, fraction
    )
