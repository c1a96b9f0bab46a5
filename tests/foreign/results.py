"""Outcomes of tests in a file, one line each, written as the tests end: if a process dies, only the
outcome of its current test is lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Result", "begin", "note", "read"]


@dataclass(frozen=True)
class Result:
    """The outcome of one test.

    Attributes
    ----------
    outcome
        ``"passed"``, ``"failed"``, ``"skipped"``; ``"began"``: the test runs, or its process died.
    seconds
        Duration of the test.
    asked, planned, rewired, infeasible
        See `tests.foreign.tally.Tally.counts`.
    trained
        See `tests.foreign.tally.Tally`.
    error
        Report of a failure.
    """

    outcome: str
    seconds: float = 0.0
    asked: int = 0
    planned: int = 0
    rewired: int = 0
    infeasible: int = 0
    trained: list[list[float]] = field(default_factory=list)
    error: str = ""


def begin(file: Path, key: str) -> None:
    """Start a file of results, or continue it; ``key`` names everything that they depend on.

    Results with another key, and results of interrupted tests, are removed.
    """
    ended = {}
    if file.exists() and _key(file) == key:
        ended = {test: one for test, one in read(file).items() if one.outcome != "began"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key}) + "\n")
    for test, result in ended.items():
        note(file, test, result)


def note(file: Path, test: str, result: Result) -> None:
    """Write the outcome of ``test``, which replaces an earlier one."""
    with file.open("a") as lines:
        lines.write(json.dumps({"test": test, **asdict(result)}) + "\n")


def read(file: Path) -> dict[str, Result]:
    """Return the outcomes of the tests, by name."""
    if not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines()[1:]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            # The process died while it wrote this line.
            continue
        test = entry.pop("test")
        found[test] = Result(**entry)
    return found


def _key(file: Path) -> str:
    first, _, _ = file.read_text().partition("\n")
    try:
        return str(json.loads(first)["key"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return ""
