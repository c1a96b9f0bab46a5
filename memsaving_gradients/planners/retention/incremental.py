"""Simulate decisions that differ from others in a few gaps, from the first difference on.

A search simulates many changes of the same decisions, the *base*, and most of a step is the same
each time. So the state of the base is marked every √n of n events, which balances the cost of marks
against the events between them. A change is simulated from the last mark before the first event at
which the simulation reads a changed gap. That is an event that the gap's decision names, or the
event at its end; or one in the gap for which a recipe that reads or makes the value is run again.
Before this event, only the presence of the value differs.

The result is the same, to the last bit, as the result of
:func:`~memsaving_gradients.planners.retention.simulate.run`. The first change of a base costs one
more run; a change takes about half a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from memsaving_gradients.planners.retention.problem import EARLY, Problem, is_gone
from memsaving_gradients.planners.retention.simulate import (
    Appointments,
    Run,
    State,
    advance,
    begin,
    outcome,
    run,
)

__all__ = ["Base", "Change", "changed"]

#: Gaps, each with the decision on it.
Change = list[tuple[int, int]]


def changed(decisions: list[int], *changes: Change) -> list[int]:
    """Return a copy of ``decisions`` with ``changes`` applied."""
    others = decisions.copy()
    for change in changes:
        for gap, what in change:
            others[gap] = what
    return others


@dataclass(frozen=True, eq=False, slots=True)
class _Mark:
    """A `State` before an event, with the lengths of the lists that the base's run has in full."""

    now: int
    there: bytearray
    at: list[int]
    gap_of: list[int]
    last: list[int]
    steps: int
    again: int
    extra_seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class _Marked:
    """The record of the base's run: the gaps whose decisions name events, the marks,
    `State.beside`, and, for each recipe, the events before which it is run again."""

    appointed: list[int]
    marks: list[_Mark]
    beside: list[int]
    again: dict[int, list[int]]


class Base:
    """Decisions to which changes are applied, and their run.

    Attributes
    ----------
    decisions, run
        The decisions and their run.
    """

    def __init__(self, problem: Problem, decisions: list[int], found: Run | None = None) -> None:
        self.problem, self.decisions = problem, decisions
        self.run = run(problem, decisions) if found is None else found

    @cached_property
    def _marked(self) -> _Marked:
        """The record of the base's run, made at the first change."""
        problem, decisions = self.problem, self.decisions
        appointments = Appointments(decisions, range(len(decisions)))
        state = begin(problem, decisions, appointments)
        # Decisions that do not respect the border have no marks: all changes of them are simulated
        # from the first event.
        respected = state.now == problem.border
        marks: list[_Mark] = []
        events, apart = len(problem.reads), _apart(problem)
        while respected and state.now < events:
            marks.append(_mark(state))
            advance(problem, decisions, appointments, state, min(state.now + apart, events))
        again: dict[int, list[int]] = {}
        for event, recipe in state.again:
            again.setdefault(recipe, []).append(event)
        return _Marked(appointments.gaps, marks, state.beside, again)

    def simulate(self, change: Change) -> Run:
        """Return the run of the decisions with a change applied."""
        problem, decisions = self.problem, changed(self.decisions, change)
        gaps = {gap for gap, _ in change if decisions[gap] != self.decisions[gap]}
        marks = self._marked.marks
        if not marks or not all(problem.respects(gap, decisions[gap]) for gap in gaps):
            return run(problem, decisions)
        first = min(
            (self._first_look(gap, decisions[gap]) for gap in gaps), default=len(problem.reads)
        )
        number = max(first - problem.border, 0) // _apart(problem)
        state = self._state(marks[min(number, len(marks) - 1)])
        for gap in gaps:
            value, before, _ = problem.gaps[gap]
            if before < state.now and problem.recipe[value] >= 0:
                state.there[value] = not is_gone(decisions[gap], state.now)
        appointments = Appointments(decisions, sorted(gaps.union(self._marked.appointed)))
        advance(problem, decisions, appointments, state, len(problem.reads))
        return outcome(problem, state)

    def _first_look(self, gap: int, what: int) -> int:
        """Return the first event, in or after a gap, at which the simulation may read the decision
        on it or the presence of its value."""
        problem, decisions, again = self.problem, self.decisions, self._marked.again
        value, before, end = problem.gaps[gap]
        gaps = range(problem.first_gap[value], problem.first_gap[value + 1])
        # A value is in its first gap before it is first made, too.
        before = before if gap > gaps.start else 0
        found = [end]
        if what >= EARLY:
            found.append((what - EARLY) // 2)
        for other in gaps:
            # The decision on another gap may name an event in this one.
            event = (decisions[other] - EARLY) // 2
            if decisions[other] >= EARLY and (other == gap or event >= before):
                found.append(event)
        for recipe in problem.touching[value]:
            found += [event for event in again.get(recipe, ()) if event >= before][:1]
        return min(found)

    def _state(self, mark: _Mark) -> State:
        """Return the state at a mark, to be simulated further."""
        run, steps, made = self.run, mark.steps, len(mark.last)
        return State(
            mark.now,
            mark.there.copy(),
            mark.at.copy(),
            mark.gap_of.copy(),
            self._marked.beside[:steps],
            run.event[:steps],
            run.again[: mark.again],
            run.born[:made],
            mark.last.copy(),
            run.value[:made],
            run.gap[:made],
            mark.extra_seconds,
        )


def _apart(problem: Problem) -> int:
    """Return the number of events from one mark to the next."""
    return math.isqrt(len(problem.reads))


def _mark(state: State) -> _Mark:
    return _Mark(
        state.now,
        state.there.copy(),
        state.at.copy(),
        state.gap_of.copy(),
        state.last.copy(),
        len(state.beside),
        len(state.again),
        state.extra_seconds,
    )
