"""Verdict on results of the same tests in several modes: figures of each mode, and the tests that
pass only with plain gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tests.foreign.known import is_known
from tests.foreign.modes import PLAIN
from tests.foreign.results import Result
from tests.foreign.tally import alike

__all__ = ["Failure", "differentiating", "failures", "table"]

#: Results of all tests, by mode and name.
Results = Mapping[str, Mapping[str, Result]]


@dataclass(frozen=True)
class Failure:
    """A test that passes plain, and not in ``mode``."""

    mode: str
    test: str
    why: str

    @property
    def known(self) -> bool:
        """Whether a documented limit explains the failure."""
        return is_known(self.test, self.mode)

    def __str__(self) -> str:
        return f"{self.mode}: {self.test}: {self.why}{' (a known limit)' if self.known else ''}"


def differentiating(results: Mapping[str, Result]) -> list[str]:
    """Return the tests that asked for gradients, or failed."""
    return [test for test, one in results.items() if one.asked or one.outcome == "failed"]


def failures(found: Results) -> list[Failure]:
    """Return the tests that pass plain and, in another mode, do not pass or train models to other
    weights."""
    listed: list[Failure] = []
    left_out: set[str] = set()
    for mode, results in found.items():
        if mode == PLAIN:
            continue
        for test, plain in found[PLAIN].items():
            if plain.outcome != "passed" or (test in left_out and test not in results):
                continue
            if why := _difference(plain, results.get(test)):
                listed.append(Failure(mode, test, why))
        left_out |= {*results}.difference(differentiating(results))
    return listed


def _difference(plain: Result, patched: Result | None) -> str:
    if patched is None:
        return "was not run"
    if patched.outcome != "passed":
        lines = ["", *patched.error.strip().splitlines()]
        # The first line of the last error in pytest's traceback.
        begins = [
            line.removeprefix("E").strip()
            for before, line in pairwise(lines)
            if line.startswith("E ") and not before.startswith("E ")
        ]
        last = begins[-1] if begins else lines[-1]
        return f"{patched.outcome}: {last}" if last else patched.outcome
    if not alike(plain.trained, patched.trained):
        return "trained a model to other weights"
    return ""


def table(found: Results) -> str:
    """Return a table with the figures of each mode."""
    head = f"{'mode':10}{'tests':>7}{'passed':>8}{'failed':>8}{'skipped':>9}{'only here':>11}"
    lines = [head + f"{'gradients':>11}{'plans':>8}{'rewired':>9}{'too small':>11}{'minutes':>9}"]
    failed = failures(found)
    for mode, results in found.items():
        count = {
            outcome: sum(one.outcome == outcome for one in results.values())
            for outcome in ("passed", "failed", "skipped")
        }
        here = sum(one.mode == mode for one in failed)
        total = {
            what: sum(getattr(one, what) for one in results.values())
            for what in ("asked", "planned", "rewired", "infeasible", "seconds")
        }
        lines.append(
            f"{mode:10}{len(results):7}{count['passed']:8}{count['failed']:8}{count['skipped']:9}"
            f"{here:11}{total['asked']:11}{total['planned']:8}{total['rewired']:9}"
            f"{total['infeasible']:11}{total['seconds'] / 60:9.1f}"
        )
    return "\n".join(lines)
