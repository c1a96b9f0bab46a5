"""Simulate decisions that differ in a few gaps from others, from where that makes a difference.

A search simulates a set of decisions with one change after the other, and most of a step is the
same each time. So of the decisions that are changed, the *base*, it is noted every √n of n events
how things stand (which balances what notes cost and the way from one to the next); and a change is
simulated from the last of these places in front of the first event at which somebody looks at a
changed gap. Who looks at the gap of a value? The events that its decision names; the event at its
end; and in between, what is run again and reads or makes the value. Before that, nothing differs
but whether the value is there.

What comes of it is what :func:`~memsaving_gradients.planners.retention.problem.run` gives, to the
last bit. With the first change of a base goes one run; a change takes half of one or so.
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
    """Other decisions: those of ``changes``, else the same."""
    others = decisions.copy()
    for change in changes:
        for gap, what in change:
            others[gap] = what
    return others


@dataclass(frozen=True, eq=False, slots=True)
class _Mark:
    """How things stand in front of an event: a `State` whose lists are only as long as so far."""

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
    """What is known of the base on the way: the gaps whose decisions name events, the marks,
    `State.beside`, and the events of each recipe."""

    appointed: list[int]
    marks: list[_Mark]
    beside: list[int]
    again: dict[int, list[int]]


class Base:
    """Decisions that are going to be changed, and what comes of them.

    Attributes
    ----------
    decisions, run
        Those, and that.
    """

    def __init__(self, problem: Problem, decisions: list[int], found: Run | None = None) -> None:
        self.problem, self.decisions = problem, decisions
        self.run = run(problem, decisions) if found is None else found

    @cached_property
    def _marked(self) -> _Marked:
        """How things stand on the way; not noted before there is a change."""
        problem, decisions = self.problem, self.decisions
        appointments = Appointments(decisions, range(len(decisions)))
        state = begin(problem, decisions, appointments)
        # Decisions that do not respect the border have no marks: all that they are changed to is
        # simulated from the first event.
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
        """What comes of the decisions with a change."""
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
        """The first event in or behind a gap at which somebody may look at the decision on it, or
        whether its value is there."""
        problem, decisions, again = self.problem, self.decisions, self._marked.again
        value, before, end = problem.gaps[gap]
        gaps = range(problem.first_gap[value], problem.first_gap[value + 1])
        # Before a value is made first it is in its first gap, too.
        before = before if gap > gaps.start else 0
        found = [end]
        if what >= EARLY:
            found.append((what - EARLY) // 2)
        for other in gaps:
            # What is decided on another gap may name an event in this one.
            event = (decisions[other] - EARLY) // 2
            if decisions[other] >= EARLY and (other == gap or event >= before):
                found.append(event)
        for recipe in problem.touching[value]:
            found += [event for event in again.get(recipe, ()) if event >= before][:1]
        return min(found)

    def _state(self, mark: _Mark) -> State:
        """How things stood, to be simulated further."""
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
    """Events from one mark to the next."""
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
