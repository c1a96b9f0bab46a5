"""Types of settings: a wrong value is refused before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.experiment import Setting


def count(least: int, text: str) -> int:
    """Return a whole number of at least ``least``."""
    number = int(text)
    if number < least:
        raise ValueError(f"{text} is less than {least}")
    return number


def shares(text: str) -> list[float]:
    """Return the numbers of a text such as ``0.8,0.45``."""
    return [float(part) for part in text.split(",")]


def list_of(text: str) -> list[int]:
    """Return the whole numbers of a text such as ``500,1000``."""
    return [int(part) for part in text.split(",")]


def flag(text: str) -> bool:
    """Return whether a text says yes."""
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def one_of(*known: str) -> Callable[[str], str]:
    """Return a type: one of some names."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type: several of some names, with commas between them."""
    one = one_of(*known)
    return lambda text: [one(part) for part in text.split(",")]


def pairs(default: int) -> Setting:
    """Return a setting: pairs of steps for ratios of times."""
    return Setting(default, partial(count, 0), "pairs of steps for times; 0: no times")


def planner(default: str = "auto") -> Setting:
    """Return a setting: who plans."""

    def parse(text: str) -> str:
        # Imported only here: processes that measure plain steps have no part of ours.
        from memsaving_gradients.planners import PLANNERS

        return one_of(*PLANNERS)(text)

    return Setting(default, parse, "who plans: a name that planner= of gradients takes")
