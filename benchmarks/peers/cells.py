"""Compares ours with each peer, at the peer's memory and at its time; judges exactness of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiment import Figure, Results

#: Ratios of memory and of time above which ours is worse than the peer.
MEMORY, TIME = 1.02, 1.03
#: A peer with at least this share of the plain peak saves nothing.
IDLE = 0.98
#: The deviation of gradients or moving averages from plain ones, as a share of the largest number,
#: above which they are wrong.
WRONG = 1e-3


def idle(peak: float, plain: float) -> bool:
    """Return whether a peer saves nothing."""
    return peak >= IDLE * plain


def noise(time: Mapping[str, float]) -> float:
    """Return the ratio up to which times are equal: 3 % more, or twice the control's deviation."""
    return max(TIME, 1 + 2 * abs(time["control"] - 1))


class Beside(NamedTuple):
    """A peer's results and ours, and the name of the ``run`` that timed both in one process."""

    peer: Mapping[str, Any]
    ours: Mapping[str, Any]
    run: str

    @property
    def times(self) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Our times and the peer's; ``None``: the run has not timed both."""
        mine, theirs = (found.get("times", {}).get(self.run) for found in (self.ours, self.peer))
        return (mine, theirs) if mine and theirs else None

    @property
    def as_fast(self) -> bool:
        """Whether ours takes no more time than the peer, or was not timed."""
        if self.times is None:
            return True
        mine, theirs = self.times
        return mine["ratio"] <= theirs["ratio"] * max(noise(mine), noise(theirs))


def at_its_time(case: Mapping[str, Any], peer: Mapping[str, Any]) -> Beside | None:
    """Return our least memory among the results as fast as the peer; else our fastest result."""
    if "at_time" not in peer:  # not measured yet
        return None
    asked = (
        (peer.get(which), run) for which, run in (("at_time", "time"), ("at_memory", "memory"))
    )
    tried = [Beside(peer, case["ours"].get(key, {}), run) for key, run in asked]
    tried = [one for one in tried if "peak" in one.ours]
    fast = [one for one in tried if one.as_fast]
    if fast or not tried:
        return min(fast, key=lambda one: one.ours["peak"], default=None)
    return min(tried, key=lambda one: one.ours["times"][one.run]["ratio"])


def differences(plain: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return deviations of gradients and state from plain, as shares of the largest number."""
    equal = all(np.array_equal(plain[name], other[name], equal_nan=True) for name in plain)
    found: dict[str, Any] = {"equal": equal, "count": len(plain)}
    for kind in ("gradient", "state"):
        names = [name for name in plain if name.startswith(kind)]
        largest = max((float(np.abs(plain[name]).max()) for name in names), default=0.0)
        off = [float(np.abs(other[name] - plain[name]).max()) for name in names]
        found[kind] = max(off, default=0.0) / (largest or 1.0)
    return found


def nearest(plain: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `differences` from the nearest of several plain steps."""
    found = [differences(one, other) for one in plain]
    return min(found, key=lambda one: (not one["equal"], one["gradient"] + one["state"]))


def exact(found: Mapping[str, Any]) -> bool:
    """Return whether numbers equal plain ones, or are within twice the spread of plain steps."""
    if "equal" not in found:
        return False
    spread = found.get("spread", {"gradient": 0.0, "state": 0.0})
    return found["equal"] or all(found[kind] <= 2 * spread[kind] for kind in spread)


def verdict(found: Mapping[str, Any]) -> str:
    """Return the exactness in words.

    Examples
    --------
    >>> verdict({"equal": False, "gradient": 3e-7, "state": 0.0})
    'off by 3e-07'
    >>> spread = {"gradient": 2e-7, "state": 0.0}
    >>> verdict({"equal": False, "gradient": 3e-7, "state": 0.0, "spread": spread})
    'as plain steps (3e-07)'
    >>> verdict({"equal": False, "gradient": 0.4, "state": 0.2})
    'wrong: gradients off by 40 %, moving averages off by 20 %'
    """
    if "failed" in found:
        return f"not comparable: {found['failed']}"
    if "refused" in found:
        return "not comparable: no plan fits under op determinism"
    if found["equal"]:
        return "bit for bit"
    wrong = [
        f"{what} {value:.2g} %"
        for what, value in (
            ("gradients off by", 100 * found["gradient"]),
            ("moving averages off by", 100 * found["state"]),
        )
        if value > 100 * WRONG
    ]
    if wrong:
        return "wrong: " + ", ".join(wrong)
    off = max(found["gradient"], found["state"])
    return f"as plain steps ({off:.0e})" if exact(found) else f"off by {off:.0e}"


def judge(results: Results) -> list[Figure]:
    """Return the bars on our memory, time, lines and exactness, for each network and peer."""
    return [figure for name, case in results.items() for figure in _of(name, case)]


def _of(name: str, case: Mapping[str, Any]) -> Iterator[Figure]:
    ours_lines = case.get("lines", {}).get("ours")
    for peer, found in case.get("peers", {}).items():
        if "peak" not in found:
            continue
        where = f"{name}, {peer}"
        same_memory = case["ours"].get(found.get("at_memory"))
        if same_memory is not None:
            if "peak" not in same_memory:
                least = same_memory.get("refused", {}).get("least", float("inf"))
                yield Figure(f"{where}: least memory / its memory", least / found["peak"], MEMORY)
            else:
                used = same_memory["peak"] / found["peak"]
                yield Figure(f"{where}: memory at its memory / its memory", used, MEMORY)
                beside = Beside(found, same_memory, "memory")
                yield from _time(f"{where}: time at its memory / its time", beside)
        if (same_time := at_its_time(case, found)) is not None:
            used = same_time.ours["peak"] / found["peak"]
            yield Figure(f"{where}: memory at its time / its memory", used, MEMORY)
            yield from _time(f"{where}: time at its time / its time", same_time)
        if ours_lines is not None:
            lines = case["lines"][peer]
            yield Figure(f"{where}: our lines", ours_lines, lines)
    for settings, found in case.get("ours", {}).items():
        if "equal" in found.get("exact", {}):
            yield Figure(f"{name}, ours, {settings}: not exact", not exact(found["exact"]), 0)


def _time(what: str, beside: Beside) -> Iterator[Figure]:
    """Yield the bar on the ratio of times, if both were timed in one process."""
    if (times := beside.times) is not None:
        mine, theirs = times
        yield Figure(what, mine["ratio"] / theirs["ratio"], max(noise(mine), noise(theirs)))
