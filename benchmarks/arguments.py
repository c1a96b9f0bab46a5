"""Types of arguments that benchmarks have in common: what is wrong with one is said before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["at_least_one", "count", "new_file", "shares", "some_of"]


def count(text: str, least: int = 0) -> int:
    """A whole number that an argument names, at least ``least``."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def at_least_one(text: str) -> int:
    """`count` without zero."""
    return count(text, 1)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A type of arguments: names with commas between them, of those that are known."""
    names = list(known)

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is none of {', '.join(names)}; several with commas between them"
            )
        return found

    return parse


def new_file(text: str) -> Path:
    """A path to write to, in a folder that is there."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    return path


def shares(text: str) -> list[float]:
    """The numbers of an argument such as ``0.8,0.45``."""
    return [float(part) for part in text.split(",")]
