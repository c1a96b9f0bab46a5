"""What became of tests, in a file with a line for each, written as they end: a process that dies
loses only the test that it was in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Result", "begin", "note", "read"]


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Attributes
    ----------
    outcome
        ``"passed"``, ``"failed"``, ``"skipped"``; ``"began"``: the process died in it.
    seconds
        How long it took.
    asked, planned, rewired, infeasible
        See `tests.foreign.tally.Tally.counts`.
    trained
        See `tests.foreign.tally.Tally`.
    error
        What a failure printed.
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
    """Start a file of results, or go on with it; ``key`` says what they depend on.

    Results of another key are removed, and tests that were interrupted are run again.
    """
    ended = {}
    if file.exists() and _key(file) == key:
        ended = {test: one for test, one in read(file).items() if one.outcome != "began"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key}) + "\n")
    for test, result in ended.items():
        note(file, test, result)


def note(file: Path, test: str, result: Result) -> None:
    """Write what became of ``test``, in place of what was written before."""
    with file.open("a") as lines:
        lines.write(json.dumps({"test": test, **asdict(result)}) + "\n")


def read(file: Path) -> dict[str, Result]:
    """What became of the tests, by name."""
    if not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines()[1:]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            # The process died while it wrote.
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
