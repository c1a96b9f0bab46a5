"""Budgets: bytes as people write them, the bytes that a device's memory leaves for a step, and the
error that names the least budget that works.

A budget is an int (bytes), a string such as ``"2GiB"``, or a fraction of plain training's bytes. GB
is 10⁹ bytes and GiB is 2³⁰, as in the standards (SI, IEC 80000-13). Memory vendors differ: a card
of "80 GB" holds about 80 GiB. Case does not matter, except that a small b after a capital letter,
or alone, may mean bits ("2 Gb") and is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_tools.memory.timeline import Timeline
from memsaving_gradients.errors import ArgumentError, BudgetError

__all__ = [
    "BATCHES",
    "RESERVE",
    "UNITS",
    "DeviceMemory",
    "Goal",
    "chunk_bytes",
    "exact_bytes",
    "format_bytes",
    "format_share",
    "is_integer",
    "parse_budget",
    "parse_bytes",
    "plain_bytes",
    "safe_bytes",
    "too_small",
]

#: Fact: bytes of each unit.
UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}

#: Fact: no memory has more bytes; a larger number is a mistake.
MOST = 2**100

_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d[\d_]*"
_WRITTEN = re.compile(rf"\s*([+-]?(?:(?:{_WHOLE})\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.I)
_ACCEPTED = (
    f"give an int (bytes) or a string with one of the units {', '.join(UNITS)}, such as '2GiB'"
)
_SHARE = ", or a float in (0, 1]: a fraction of plain training's bytes"


def parse_budget(value: Any, argument: str = "budget") -> int | float:
    """Return a budget as an int of bytes, or as a float in (0, 1], a fraction of plain training's
    bytes.

    Raises
    ------
    ArgumentError
        If ``value`` is no budget. The error names ``argument``.

    Examples
    --------
    >>> parse_budget("1.5 GiB"), parse_budget("2GB"), parse_budget(4096), parse_budget(0.5)
    (1610612736, 2000000000, 4096, 0.5)
    >>> parse_budget("2 gigs")
    Traceback (most recent call last):
        ...
    memsaving_gradients.errors.ArgumentError: budget='2 gigs': unknown unit 'gigs'; \
give an int (bytes) or a string with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such \
as '2GiB', or a float in (0, 1]: a fraction of plain training's bytes
    """
    if isinstance(value, (float, np.floating)):
        return _share(float(value), argument)
    return _bytes(value, argument, _ACCEPTED + _SHARE)


def parse_bytes(value: Any, argument: str) -> int:
    """Return bytes, given as an int or a string with a unit, as an int.

    Examples
    --------
    >>> parse_bytes("80 GiB", "device_memory")
    85899345920
    """
    return _bytes(value, argument, _ACCEPTED)


def _share(value: float, argument: str) -> float:
    if 0 < value <= 1:
        return value
    if math.isnan(value):
        problem = "is not a number; " + _ACCEPTED + _SHARE
    elif value <= 0:
        problem = "is not positive; " + _ACCEPTED + _SHARE
    else:
        problem = (
            "a float is a fraction of plain training's bytes and at most 1; for bytes, give an int"
            + (f": {int(value)}" if math.isfinite(value) else "")
            + ", or a string with a unit such as '2GiB'"
        )
    raise ArgumentError(argument, value, problem)


def _bytes(value: Any, argument: str, accepted: str) -> int:
    if is_integer(value):
        found = int(value)
    elif isinstance(value, str):
        found = _written(value, argument, accepted)
    else:
        raise ArgumentError(argument, value, accepted)
    if found <= 0:
        raise ArgumentError(argument, value, f"is not positive; {accepted}")
    if found > MOST:
        raise ArgumentError(argument, value, f"is more than any memory; {accepted}")
    return found


def _written(text: str, argument: str, accepted: str) -> int:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        decimal = "a decimal comma is not read, write a point; " if "," in text else ""
        raise ArgumentError(argument, text, f"is not a number with a unit; {decimal}{accepted}")
    number, unit = match.groups()
    if not unit:
        raise ArgumentError(argument, text, f"has no unit; {accepted}")
    if (unit.endswith("b") and unit != unit.lower()) or unit == "b":
        raise ArgumentError(
            argument, text, f"{unit!r} may mean bits; for bytes write B; {accepted}"
        )
    if unit.lower() not in _BY_LOWER:
        raise ArgumentError(argument, text, f"unknown unit {unit!r}; {accepted}")
    size = float(number.replace(",", "").replace("_", "")) * _BY_LOWER[unit.lower()]
    if not math.isfinite(size):
        raise ArgumentError(argument, text, f"is too large; {accepted}")
    return int(size)


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is an int, of Python or NumPy but no bool, from ``least`` to ``most``.

    Examples
    --------
    >>> is_integer(3, least=1), is_integer(3.0), is_integer(True)
    (True, False, False)
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and bool(least <= value <= most)


def format_bytes(size: float) -> str:
    """Return bytes as text for people, in binary units.

    Examples
    --------
    >>> format_bytes(999), format_bytes(2**30), format_bytes(1_800_000)
    ('999 B', '1.00 GiB', '1.72 MiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size:.0f} B"


def exact_bytes(size: int) -> str:
    """Return the exact number of bytes as text, with a rounded number in binary units.

    Examples
    --------
    >>> exact_bytes(3_145_728)
    '3,145,728 bytes (3.00 MiB)'
    """
    return f"{size:,} bytes ({format_bytes(size)})"


def format_share(share: float, digits: int = 0) -> str:
    """Return a share as text, in percent.

    Examples
    --------
    >>> format_share(0.583), format_share(0.0125, 1)
    ('58 %', '1.2 %')
    """
    return f"{100 * share:.{digits}f} %"


RESERVE = 1 / 20
"""The share of a device's memory that plans leave free: for metrics, libraries, holes between
chunks, and inputs if their bytes are not known."""
#: Fact: batches in memory at a time: the one in use, and the one that is fetched meanwhile.
BATCHES = 2


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, and the bytes of it that are taken before a step begins.

    Attributes
    ----------
    value
        The memory as the user wrote it.
    weights, slots
        Bytes of the model's variables, and of the optimizer's.
    buffers
        Bytes of the buffers in which microbatches add up gradients.
    inputs
        Bytes of the batches in memory at a time (`BATCHES`); 0: they are not known, and the reserve
        covers them.

    Examples
    --------
    >>> device = DeviceMemory("1 MB", weights=200_000, slots=400_000)
    >>> device.left
    350000
    >>> device.enough_for(400_000)
    1052631
    """

    value: int | str
    weights: int = 0
    slots: int = 0
    buffers: int = 0
    inputs: int = 0

    def __post_init__(self) -> None:
        parse_bytes(self.value, "device_memory")

    @property
    def whole(self) -> int:
        """The whole memory, bytes."""
        return parse_bytes(self.value, "device_memory")

    @property
    def left(self) -> int:
        """The bytes that a step may take; zero or less: nothing is left."""
        return _left(self.whole, self._taken)

    def check_room(self, argument: str, advice: str) -> None:
        """Raise an `ArgumentError`, which names ``argument``, if nothing is left for a step."""
        if self.left <= 0:
            raise ArgumentError(
                argument,
                self.value,
                f"{self.taken}: nothing is left for training, which needs a device of more than"
                f" {self.enough_for(1):,} bytes; {advice}",
            )

    @property
    def _taken(self) -> int:
        return self.weights + self.slots + self.buffers + self.inputs

    def enough_for(self, budget: int) -> int:
        """Return the least memory, bytes, of a device that leaves ``budget`` bytes for a step."""
        whole = int((budget + self._taken) / (1 - RESERVE)) - 2
        while _left(whole, self._taken) < budget:
            whole += 1
        return whole

    @property
    def taken(self) -> str:
        """A phrase that lists the bytes taken before a step."""
        buffers = f"a buffer of gradients {exact_bytes(self.buffers)}, " if self.buffers else ""
        inputs = f"the batch and the next one {exact_bytes(self.inputs)}, " if self.inputs else ""
        return (
            f"the model's variables take {exact_bytes(self.weights)}, the optimizer's"
            f" {exact_bytes(self.slots)}, {buffers}{inputs}and"
            f" {exact_bytes(int(self.whole * RESERVE))} are kept in reserve"
        )

    def __str__(self) -> str:
        return f"device_memory={self.value!r}"


def _left(whole: int, taken: int) -> int:
    return whole - int(whole * RESERVE) - taken


@dataclass(frozen=True)
class Goal:
    """A budget: its limit in bytes, and the value that the user gave.

    Attributes
    ----------
    budget
        The limit, bytes in chunks.
    plain_need
        Bytes in chunks that plain training may need.
    base
        The bytes that fractions refer to: `plain_bytes`.
    value
        The budget as the user wrote it; a `DeviceMemory`, if the budget is the rest of that.
    unknown
        Why the budget could not be given in bytes; ``None``: it could.
    """

    budget: int
    plain_need: int
    base: int
    value: object
    unknown: ArgumentError | None = None


def too_small(goal: Goal, least: int, stopped: str = "") -> BudgetError:
    """Return the error for a budget below ``least``: the least budget that works or, if planning
    was ``stopped``, that was found so far."""
    base, value = goal.base, goal.value
    fraction = min(1.0, math.ceil(least / base * 10_000) / 10_000)
    while fraction < 1 and int(fraction * base) < least:
        fraction = min(1.0, round(fraction + 0.0001, 4))
    of_plain = f"{fraction:g} of the {base:,} bytes of plain training"
    if least > base:
        of_plain = f"as much as plain training, which needs {base:,} or more (budget=1.0)"
    because, which = "no plan that fits was found", "that works is"
    if stopped:
        because = (
            f"planning {'was interrupted' if stopped == 'interrupted' else 'ran out of time'}, and"
            " no plan so far fits"
        )
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
        named = f"{exact_bytes(least)}, {of_plain}"
        if goal.unknown is not None:
            asked, named = "", f"budget={fraction!r}, a fraction of plain training's bytes"
        problem = f"{because}{asked}; the least budget {which} {named}"
    if goal.unknown is None:
        problem += "; give at least that, or use a smaller batch"
    else:
        # Users may take `BudgetError.least` and give bytes, which are refused.
        known = "the shapes of all tensors" if goal.unknown.value else f"{goal.unknown.argument}="
        problem += (
            f"; these bytes are a guess without {known}: give {known}, with which less may do, or"
            f" at least that budget (a budget in bytes needs {known})"
        )
    return BudgetError(argument, value, problem, goal.budget, least, fraction)


def chunk_bytes(simulation: Timeline, gating: str) -> int:
    """Return a simulated peak as TensorFlow's allocator counts it: in chunks, which are larger than
    the buffers in them.

    XLA (``gating="data"``) asks for one buffer for a whole program: there, the peak itself counts.
    """
    return simulation.peak if gating == "data" else simulation.allocated_peak


def plain_bytes(simulation: Timeline, gating: str) -> int:
    """Return the bytes that fractions refer to: the least that plain training may take in chunks,
    whatever the allocator held before.

    An empty allocator may need more bytes than one with holes that buffers fit into. So the result
    is at most `chunk_bytes`, and a larger fraction is never a smaller budget.
    """
    if gating == "data":
        return simulation.peak
    return min(simulation.allocated_least, simulation.allocated_peak)


def safe_bytes(simulation: Timeline, gating: str) -> int:
    """Return the bytes of a budget that a simulated step may need: its chunks and an allowance for
    chance, but at least the bytes of the worst of many steps."""
    chunks = int(chunk_bytes(simulation, gating) * (1 + simulation.margin))
    return chunks if gating == "data" else max(chunks, simulation.allocated_worst)
