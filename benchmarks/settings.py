"""Types of settings, which refuse a wrong value before anything is measured."""

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
    """Return a type for one of the known names."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return parse


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type for several of the known names, separated by commas."""
    one = one_of(*known)
    return lambda text: [one(part) for part in text.split(",")]


def pairs(default: int) -> Setting:
    """Return a setting for the number of pairs of steps to time."""
    return Setting(default, partial(count, 0), "pairs of steps for times; 0: no times")


def planner(default: str = "auto") -> Setting:
    """Return a setting for the name of the planner."""

    def parse(text: str) -> str:
        # A late import: processes that measure plain steps must not import the package.
        from memsaving_gradients.planners import PLANNERS

        return one_of(*PLANNERS)(text)

    return Setting(default, parse, "name of the planner, as planner= of gradients takes it")
