"""What the works share: jobs that make results, and lines with a published figure and ours.

A job is a function that runs, or plans, something and returns JSON; what it returns is kept by its
name. Lines are worked out of all results of a work that are there, so that they can be printed
without anything being run again. A job may as well fetch rows of another benchmark, which are
measured only if they are in no file of results.

*Planned* means that nothing ran: the step was built from shapes, differentiated, planned,
rewritten, and its memory simulated; its extra time is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.experiment import Results
from benchmarks.measuring import fresh
from benchmarks.probes import plan_of
from benchmarks.steps import make_step

#: How far a figure that should be *the same* may be off.
SAME = 0.20


@dataclass(frozen=True)
class Line:
    """A published figure and ours.

    Attributes
    ----------
    what
        Of what, with sizes.
    published, ours
        The figures; ``None``: there is none, and `note` says why.
    unit
        How they are printed: ``"GB"`` (2^30 bytes), ``"MB"`` (10^6), ``"x"``, ``"%"``, ``""``.
    how
        ``"measured"`` or ``"planned"``.
    better
        Which figures are better than the published one; ``"same"``: it is what one begins with, and
        should be met.
    note
        What is different here.
    failed
        Whether it was tried, and there is no figure of ours for that reason.
    """

    what: str
    published: float | None
    ours: float | None
    unit: Literal["GB", "MB", "x", "%", ""] = "x"
    how: Literal["measured", "planned"] = "measured"
    better: Literal["less", "more", "same"] = "more"
    note: str = ""
    failed: bool = False

    @property
    def passed(self) -> bool:
        """Whether ours is the published figure or better; without one, whether it did not fail."""
        if self.published is None or self.ours is None:
            return not self.failed
        if self.better == "same":
            return abs(self.ours / self.published - 1) <= SAME
        return self.ours <= self.published if self.better == "less" else self.ours >= self.published


@dataclass(frozen=True)
class Work:
    """A founding work.

    Attributes
    ----------
    key
        What names of its jobs begin with.
    title, source
        Who, what, where; and where in it the figures stand.
    about
        What was done here, and what was not, in sentences.
    jobs
        By name; they are told whether to measure what other benchmarks have results of.
    lines
        Of the results by name of the job, as far as there are any.
    """

    key: str
    title: str
    source: str
    about: str
    jobs: Mapping[str, Callable[[bool], dict[str, Any]]]
    lines: Callable[[Results], list[Line]]


def in_process(target: str, **arguments: Any) -> Callable[[bool], dict[str, Any]]:
    """Return a job that is a function of this package, in a process of its own."""

    def job(again: bool) -> dict[str, Any]:
        found: dict[str, Any] = fresh(target, **arguments)
        return found

    return job


def planned_step(
    model: str, options: dict[str, Any], settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Plan a step of a network, which is built and rewritten, but not run (in a fresh process)."""
    step = make_step(model, options, ours=True, settings=settings or {"checkpoints": "memory"})
    found = plan_of(step)
    assert found is not None, "nothing was saved"
    return found
