"""Jobs that make results, and lines with a published figure and ours: the parts of all works.

A job is a function that runs or plans something and returns JSON, which is stored under its name.
Lines are computed from all stored results of a work, so that they can be printed without running
anything again. A job can also read rows of another benchmark, which are measured only if that
benchmark's file lacks them.

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

#: The relative deviation at which two figures still are *the same*.
SAME = 0.20


@dataclass(frozen=True)
class Line:
    """A published figure and ours.

    Attributes
    ----------
    what
        Name of the figure, with sizes.
    published, ours
        The figures; ``None``: there is none, and `note` says why.
    unit
        Unit for printing: ``"GB"`` (2^30 bytes), ``"MB"`` (10^6), ``"x"``, ``"%"``, ``""``.
    how
        ``"measured"`` or ``"planned"``.
    better
        Which figures are better than the published one; ``"same"``: the figure is a starting point,
        and ours should equal it.
    note
        Differences from the published setting.
    failed
        Whether a trial failed, so that there is no figure of ours.
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
        """Whether ours is at least as good as published; without a figure, whether none failed."""
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
        Prefix of the names of its jobs.
    title, source
        Authors, year and title; the publication, and the place of the figures in it.
    about
        Sentences about the part of the work that is repeated here, and the part that is not.
    jobs
        Jobs by name; their argument: whether to measure existing rows of other benchmarks again.
    lines
        Returns the lines for the existing results, which are given by name of the job.
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
