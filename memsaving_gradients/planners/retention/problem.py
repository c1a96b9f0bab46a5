"""Retention: for every value and every gap between two of its uses, whether it is kept, or dropped
and recomputed.

Planners search for plans in this form. The original ops run in a fixed order, as *events*. The uses
of a value are the event that makes it and the events that read it. A *gap* is the time between two
uses; the last use begins a gap without end. In a gap a value is

- kept: it is there for the next use, and for any recomputation in between;
- dropped: it is freed after its last reader; the next reader, an event or a recipe, recomputes it,
  recursively if inputs are missing, and from then on it is there until the next use;
- dropped strictly: likewise, but freed after each event for which it was recomputed as an input;
- dropped and recomputed early, at an event in the gap, while its inputs are still there;
- dropped late: kept until an event in the gap for which a recipe reads it, and dropped afterwards.

Such decisions express all schedules of Chen et al. 2016, every other plan that recomputes a value
at most once in a gap, and the retention intervals of Moccasin (Bartan et al. 2023, arXiv
2304.14463). An event is one op, or a stretch of ops of which only the bytes matter
(:mod:`memsaving_gradients.planners.retention.coarsen` makes them). These bytes include all values
on which no decision is taken.

:mod:`~memsaving_gradients.planners.retention.simulate` evaluates a set of decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memsaving_gradients.schedules.arrays import IntArray

__all__ = [
    "DROPPED",
    "EARLY",
    "KEPT",
    "LATE",
    "NEAR",
    "STRICT",
    "Execution",
    "Problem",
    "decide",
    "is_gone",
]


#: Decisions whose peak is at most this many times the budget are near it. Chosen by judgement.
NEAR = 1.15
#: Fact: the codes of decisions on a gap; a decision that names an event is ``EARLY + 2 * event`` or
#: ``LATE + 2 * event``.
KEPT, DROPPED, STRICT, EARLY, LATE = 0, 1, 2, 3, 4

#: An event, and the recipe that is run again before it.
Execution = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Problem:
    """The events in their order, the bytes of their values, and the recipes that recompute these.

    Attributes
    ----------
    reads, writes
        For each event, the values that it reads and makes.
    size
        For each value, its bytes.
    recipe
        For each value, the number of the recipe that recomputes it; -1: it cannot be recomputed.
    inputs, outputs, seconds, scratch
        For each recipe: the values that it reads, the values that it makes, its time, and the bytes
        that it takes in addition to both.
    during
        For each event, the most bytes of anything but values while it runs.
    between
        For each event, the bytes of anything but values just before it, while values are recomputed
        for it.
    border
        The first event for which values may be recomputed, since all forward ops run first.
        Planners respect it; `run` simulates any decisions.
    """

    reads: Sequence[tuple[int, ...]]
    writes: Sequence[tuple[int, ...]]
    size: Sequence[int]
    recipe: Sequence[int]
    inputs: Sequence[tuple[int, ...]]
    outputs: Sequence[tuple[int, ...]]
    seconds: Sequence[float]
    scratch: Sequence[int]
    during: Sequence[int]
    between: Sequence[int]
    border: int = 0

    @cached_property
    def uses(self) -> list[list[int]]:
        """For each value, the events that use it; the one that makes it is first."""
        uses: list[list[int]] = [[] for _ in self.size]
        for event, (read, made) in enumerate(zip(self.reads, self.writes, strict=True)):
            for value in (*read, *made):
                if not uses[value] or uses[value][-1] != event:
                    uses[value].append(event)
        return uses

    @cached_property
    def first_gap(self) -> list[int]:
        """For each value, the number of its first gap; at the end, the number of all gaps."""
        return [0, *np.cumsum([len(uses) for uses in self.uses]).tolist()]

    @cached_property
    def gaps(self) -> list[tuple[int, int, int]]:
        """For each gap: its value, the event before it, and the event after it (the number of
        events if there is none)."""
        return [
            (value, begin, end)
            for value, uses in enumerate(self.uses)
            for begin, end in zip(uses, (*uses[1:], len(self.reads)), strict=True)
        ]

    @cached_property
    def sizes(self) -> IntArray:
        """``size``, as an array."""
        return np.array(self.size, np.int64)

    @cached_property
    def touching(self) -> list[list[int]]:
        """For each value, the recipes that read or make it."""
        touching: list[list[int]] = [[] for _ in self.size]
        for recipe, (read, made) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for value in {*read, *made}:
                touching[value].append(recipe)
        return touching

    def gap_at(self, value: int, event: int) -> int:
        """Return the gap of ``value`` that contains ``event``; the gap that ends with ``event`` if
        it is a use."""
        return self.first_gap[value] + bisect_right(self.uses[value], event - 1) - 1

    def respects(self, gap: int, what: int) -> bool:
        """Return whether the decision ``what`` on ``gap`` respects the border: it recomputes
        nothing before the border, and a value that it drops there is gone at the border."""
        value, begin, end = self.gaps[gap]
        if what == KEPT or (what < EARLY and end >= self.border):
            return True
        event = (what - EARLY) // 2
        late = what % 2 == 0 and begin <= event and self.recipe[value] >= 0
        return end >= self.border and (event >= self.border or (late and begin < self.border))

    @cached_property
    def owner(self) -> list[int]:
        """For each gap, its value."""
        return [value for value, _, _ in self.gaps]

    def plain(self) -> list[int]:
        """Return the decisions of plain training: every value is kept until its last use."""
        last = {self.first_gap[v + 1] - 1 for v in range(len(self.size))}
        return [DROPPED if gap in last else KEPT for gap in range(self.first_gap[-1])]


def is_gone(what: int, event: int) -> bool:
    """Return whether the decision ``what`` on a gap drops a value, if it can be recomputed, before
    ``event``."""
    return what != KEPT and (what < LATE or what % 2 == 1 or (what - LATE) // 2 < event)


def decide(problem: Problem, executions: Iterable[Execution]) -> list[int]:
    """Return decisions that lead to these executions, or nearly: decisions cannot express that a
    value is dropped twice in one gap.

    Executions before the border are ignored.

    Examples
    --------
    >>> chain = Problem(
    ...     reads=[(), (0,), (1,), (2,), (3, 1), (4, 0)],
    ...     writes=[(0,), (1,), (2,), (3,), (4,), (5,)], size=[1] * 6,
    ...     recipe=[0, 1, 2, -1, -1, -1], inputs=[(), (0,), (1,)], outputs=[(0,), (1,), (2,)],
    ...     seconds=[1.0, 1.0, 1.0],
    ...     scratch=[0, 0, 0], during=[0] * 6, between=[0] * 6)
    >>> from memsaving_gradients.planners.retention.simulate import run
    >>> run(chain, decide(chain, [(5, 0)])).again
    [(5, 0)]
    """
    again: dict[int, list[int]] = {}
    for event, number in executions:
        if event >= problem.border:
            again.setdefault(event, []).append(number)
    decisions = problem.plain()
    gap_of = problem.first_gap[:-1].copy()
    # For each value, in its current gap: the last use of the copy that was there at the beginning,
    # the event for which it was recomputed, and the first use of the recomputed copy.
    before: list[int | None] = [None] * len(gap_of)
    made = before.copy()
    behind = before.copy()

    def use(value: int, event: int) -> None:
        if made[value] is None:
            before[value] = event
        elif behind[value] is None:
            behind[value] = event

    def close(value: int) -> None:
        last, again_at, first = before[value], made[value], behind[value]
        if problem.recipe[value] >= 0:
            what = decisions[gap_of[value]]
            if again_at is None:
                what = KEPT if last is not None else what
            elif last is not None:
                what = LATE + 2 * last
            else:
                early = first is not None and first > again_at
                what = EARLY + 2 * again_at if early else DROPPED
            decisions[gap_of[value]] = what
        gap_of[value] += 1
        before[value] = made[value] = behind[value] = None

    for event, read in enumerate(problem.reads):
        for number in again.get(event, ()):
            for value in problem.inputs[number]:
                use(value, event)
            for value in problem.outputs[number]:
                if made[value] is None:
                    made[value] = event
        for value in read:
            use(value, event)
            close(value)
    for value in range(len(gap_of)):
        close(value)
    return decisions
