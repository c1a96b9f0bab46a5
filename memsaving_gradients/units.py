"""Budgets as people write them: bytes, ``"2GiB"``, a share of what plain training takes.

GB is 10⁹ bytes and GiB is 2³⁰, as the standards (SI, IEC 80000-13) have it and memory vendors do not: a card of "80 GB"
holds about 80 GiB. Case does not matter but where a small b after a capital letter may mean bits ("2 Gb").
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from memsaving_gradients.errors import ArgumentError

__all__ = ["UNITS", "format_bytes", "format_share", "parse_budget", "parse_bytes"]

#: Bytes of each unit.
UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}

#: More bytes than this are a mistake.
MOST = 2**100

_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d[\d_]*"
_WRITTEN = re.compile(rf"\s*([+-]?(?:(?:{_WHOLE})\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.I)
_ACCEPTED = (
    f"give an int (bytes) or a string with one of the units {', '.join(UNITS)}, such as '2GiB'"
)
_SHARE = ", or a float in (0, 1]: a fraction of what plain training takes"


def parse_budget(value: Any, argument: str = "budget") -> int | float:
    """A budget as an int of bytes, or as a float in (0, 1], a fraction of what plain training takes.

    Raises
    ------
    ArgumentError
        For what is no budget; ``argument`` is the name to give in it.

    Examples
    --------
    >>> parse_budget("1.5 GiB"), parse_budget("2GB"), parse_budget(4096), parse_budget(0.5)
    (1610612736, 2000000000, 4096, 0.5)
    >>> parse_budget("2 gigs")
    Traceback (most recent call last):
        ...
    memsaving_gradients.errors.ArgumentError: budget='2 gigs': unknown unit 'gigs'; give an int (bytes) or a string with \
one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '2GiB', or a float in (0, 1]: a fraction of what plain \
training takes
    """
    if isinstance(value, (float, np.floating)):
        return _share(float(value), argument)
    return _bytes(value, argument, _ACCEPTED + _SHARE)


def parse_bytes(value: Any, argument: str) -> int:
    """An int of bytes from an int or a string with a unit.

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
            "a float is a fraction of what plain training takes and at most 1; for bytes, give an int"
            + (f": {int(value)}" if math.isfinite(value) else "")
            + ", or a string with a unit such as '2GiB'"
        )
    raise ArgumentError(argument, value, problem)


def _bytes(value: Any, argument: str, accepted: str) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
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
        raise ArgumentError(argument, text, f"is no number with a unit; {decimal}{accepted}")
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


def format_bytes(size: float) -> str:
    """Bytes for people, in binary units.

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
    """Bytes, exactly and to be read.

    Examples
    --------
    >>> exact_bytes(3_145_728)
    '3,145,728 bytes (3.00 MiB)'
    """
    return f"{size:,} bytes ({format_bytes(size)})"


def format_share(share: float, digits: int = 0) -> str:
    """A share for people, in percent.

    Examples
    --------
    >>> format_share(0.583), format_share(0.0125, 1)
    ('58 %', '1.2 %')
    """
    return f"{100 * share:.{digits}f} %"
