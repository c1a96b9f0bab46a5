"""Evaluate decisions of :mod:`~memsaving_gradients.planners.retention.problem`: the bytes alive and
the extra time, from any event to any other.

The time is linear in the steps and their inputs. The forward pass is simulated once for a problem;
:mod:`~memsaving_gradients.planners.retention.incremental` simulates decisions that differ little.

The code is plain Python on lists, since steps depend on each other and lists are then faster than
arrays. It takes a third of a microsecond for each event, and about one microsecond for each recipe
that is run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memsaving_gradients.planners.retention.problem import (
    EARLY,
    KEPT,
    LATE,
    STRICT,
    Execution,
    Problem,
    is_gone,
)
from memsaving_gradients.schedules.arrays import IntArray

__all__ = ["Appointments", "Run", "State", "advance", "begin", "opening", "outcome", "run"]


@dataclass(frozen=True, eq=False)
class Run:
    """The simulation of a set of decisions.

    Attributes
    ----------
    bytes_alive
        For each step (a recipe that is run again, or an event), the bytes alive.
    peak
        The most bytes alive.
    extra_seconds
        Time of the recipes that were run again.
    event
        For each step, its event: the event itself, or the one for which the recipe is run again.
    again
        The recipes that were run again, in order, as pairs of an event and a recipe.
    born, last, value, gap
        For each computation of a value: its step, the last step that reads the result, the value,
        and the gap in which it was computed.
    """

    bytes_alive: IntArray
    peak: int
    extra_seconds: float
    event: list[int]
    again: list[tuple[int, int]]
    born: list[int]
    last: list[int]
    value: list[int]
    gap: list[int]

    def excess(self, budget: int, power: int = 1) -> float:
        """Return the bytes above ``budget``, as a share of it, to ``power``, summed over steps."""
        over = np.maximum(self.bytes_alive - budget, 0) / max(budget, 1)
        return float((over**power).sum())

    def worth(self, budget: int) -> tuple[float, float]:
        """Return a rank, less being better: the excess over ``budget``, then the extra time."""
        return self.excess(budget), self.extra_seconds


@dataclass(eq=False, slots=True)
class State:
    """The state of a run just before an event.

    Attributes
    ----------
    now
        The event.
    there
        For each value, whether it is in memory.
    at
        For each value, the index of its latest computation in ``born`` and the lists like it.
    gap_of
        For each value, its current gap.
    beside
        For each step, bytes of anything but values.
    event, again, born, last, value, gap, extra_seconds
        As in `Run`.
    """

    now: int
    there: bytearray
    at: list[int]
    gap_of: list[int]
    beside: list[int]
    event: list[int]
    again: list[Execution]
    born: list[int]
    last: list[int]
    value: list[int]
    gap: list[int]
    extra_seconds: float = 0.0

    @classmethod
    def first(cls, problem: Problem) -> State:
        """Return the state before the first event: nothing is in memory."""
        many = len(problem.size)
        gap_of = problem.first_gap[:-1].copy()
        return cls(0, bytearray(many), [0] * many, gap_of, [], [], [], [], [], [], [])

    def copy(self) -> State:
        """Return a copy that may be simulated further."""
        return State(
            self.now,
            self.there.copy(),
            self.at.copy(),
            self.gap_of.copy(),
            self.beside.copy(),
            self.event.copy(),
            self.again.copy(),
            self.born.copy(),
            self.last.copy(),
            self.value.copy(),
            self.gap.copy(),
            self.extra_seconds,
        )


class Appointments:
    """The decisions that name events: for each event, the gaps whose values are recomputed before
    it, and the gaps whose values are dropped after it."""

    def __init__(self, decisions: Sequence[int], gaps: Iterable[int]) -> None:
        self.gaps = [gap for gap in gaps if decisions[gap] >= EARLY]
        self.returns: dict[int, list[int]] = {}
        self.leaves: dict[int, list[int]] = {}
        for gap in self.gaps:
            what = decisions[gap]
            which = self.returns if what % 2 else self.leaves
            which.setdefault((what - EARLY) // 2, []).append(gap)


def advance(
    problem: Problem,
    decisions: Sequence[int],
    appointments: Appointments,
    state: State,
    until: int,
) -> None:
    """Simulate from the event of ``state``, which is changed, to ``until`` (excluded).

    The algorithm is one function because searches spend their time here: a call for each event
    would take as long as all the rest.
    """
    recipe, inputs, outputs = problem.recipe, problem.inputs, problem.outputs
    seconds, scratch, size_of = problem.seconds, problem.scratch, problem.size
    reads, writes, during, between = problem.reads, problem.writes, problem.during, problem.between
    returns, leaves, owner = appointments.returns, appointments.leaves, problem.owner
    there, at, gap_of = state.there, state.at, state.gap_of
    beside, event_of, recipes = state.beside, state.event, state.again
    born, last, value_of, made_in = state.born, state.last, state.value, state.gap
    extra, step = state.extra_seconds, len(beside)
    for event in range(state.now, until):
        read = reads[event]
        if not read and event not in returns and event not in leaves and not writes[event]:
            beside.append(during[event])
            event_of.append(event)
            step += 1
            continue
        wanted = read
        if event in returns:
            wanted = (*(owner[gap] for gap in returns[event]), *read)
        again: list[int] = []
        for first in wanted:
            if there[first]:
                continue
            stack = [first]
            while stack:
                value = stack[-1]
                if there[value]:
                    stack.pop()
                    continue
                number = recipe[value]
                missing = [v for v in inputs[number] if not there[v]]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                for v in inputs[number]:
                    last[at[v]] = step
                # Outputs that are still in memory are computed once more in passing.
                twice = 0
                for v in outputs[number]:
                    if there[v]:
                        twice += size_of[v]
                    else:
                        at[v] = len(born)
                        born.append(step)
                        last.append(step)
                        value_of.append(v)
                        made_in.append(gap_of[v])
                        there[v] = 1
                        again.append(v)
                extra += seconds[number]
                recipes.append((event, number))
                beside.append(between[event] + scratch[number] + twice)
                event_of.append(event)
                step += 1
        for v in read:
            last[at[v]] = step
            gap_of[v] = gap = gap_of[v] + 1
            # Inlined: a call would take as long as all the rest.
            what = decisions[gap]
            if what and (what < LATE or what % 2) and recipe[v] >= 0:
                there[v] = 0
        for v in writes[event]:
            at[v] = len(born)
            born.append(step)
            last.append(step)
            value_of.append(v)
            made_in.append(gap_of[v])
            what = decisions[gap_of[v]]
            there[v] = not (what and (what < LATE or what % 2) and recipe[v] >= 0)
        for v in again:
            if decisions[gap_of[v]] == STRICT:
                there[v] = 0
        if event in leaves:
            for gap in leaves[event]:
                there[owner[gap]] = 0
        beside.append(during[event])
        event_of.append(event)
        step += 1
    state.now, state.extra_seconds = until, extra


@dataclass(frozen=True, eq=False)
class Opening:
    """The common beginning of all decisions that respect the border: nothing is recomputed.

    Attributes
    ----------
    state
        The state before the border, with every value kept.
    before
        The gaps that end before the border: they are kept.
    across
        The gaps across the border of values that can be recomputed: decisions drop these values
        there or not.
    """

    state: State
    before: tuple[int, ...]
    across: tuple[int, ...]


_openings: weakref.WeakKeyDictionary[Problem, Opening] = weakref.WeakKeyDictionary()


def opening(problem: Problem) -> Opening:
    """Return the common beginning of all decisions that respect the border, simulated once for
    each problem."""
    if problem not in _openings:
        _openings[problem] = _open(problem)
    return _openings[problem]


def _open(problem: Problem) -> Opening:
    state = State.first(problem)
    kept = [KEPT] * problem.first_gap[-1]
    advance(problem, kept, Appointments(kept, ()), state, problem.border)
    across = [
        gap
        for gap, (value, begin, end) in enumerate(problem.gaps)
        if begin < problem.border <= end and problem.recipe[value] >= 0
    ]
    before = [gap for gap, (_, _, end) in enumerate(problem.gaps) if end < problem.border]
    return Opening(state, tuple(before), tuple(across))


def run(problem: Problem, decisions: Sequence[int]) -> Run:
    """Simulate ``decisions`` (one for each gap).

    Examples
    --------
    A chain of four values of a byte each, of which the backward pass reads the second and the
    first. Dropping the first one between its uses costs a second run of its recipe, and saves a
    byte:

    >>> from memsaving_gradients.planners.retention.problem import DROPPED
    >>> chain = Problem(
    ...     reads=[(), (0,), (1,), (2,), (3, 1), (4, 0)],
    ...     writes=[(0,), (1,), (2,), (3,), (4,), (5,)], size=[1] * 6,
    ...     recipe=[0, 1, 2, -1, -1, -1], inputs=[(), (0,), (1,)], outputs=[(0,), (1,), (2,)],
    ...     seconds=[1.0, 1.0, 1.0],
    ...     scratch=[0, 0, 0], during=[0] * 6, between=[0] * 6)
    >>> plain = chain.plain()
    >>> run(chain, plain).peak, run(chain, plain).extra_seconds
    (4, 0.0)
    >>> plain[chain.first_gap[0] + 1] = DROPPED
    >>> run(chain, plain).peak, run(chain, plain).extra_seconds
    (3, 1.0)
    """
    appointments = Appointments(decisions, range(len(decisions)))
    state = begin(problem, decisions, appointments)
    advance(problem, decisions, appointments, state, len(problem.reads))
    return outcome(problem, state)


def begin(problem: Problem, decisions: Sequence[int], appointments: Appointments) -> State:
    """Return the state where `advance` may begin: at the border if the decisions respect it, else
    at the first event."""
    shared, border = opening(problem), problem.border
    respected = not any(map(decisions.__getitem__, shared.before)) and all(
        problem.respects(gap, decisions[gap]) for gap in appointments.gaps
    )
    if shared.state.again or not respected:
        return State.first(problem)
    state = shared.state.copy()
    for gap in shared.across:
        if is_gone(decisions[gap], border):
            state.there[problem.owner[gap]] = 0
    return state


def outcome(problem: Problem, state: State) -> Run:
    """Return the `Run` of decisions that were simulated to the end."""
    size = problem.sizes[np.array(state.value, np.int64)]
    delta = np.zeros(len(state.beside) + 1, np.int64)
    np.add.at(delta, np.array(state.born, np.int64), size)
    np.subtract.at(delta[1:], np.array(state.last, np.int64), size)
    alive = np.cumsum(delta[:-1]) + np.array(state.beside, np.int64)
    return Run(
        alive,
        int(alive.max(initial=0)),
        state.extra_seconds,
        state.event,
        state.again,
        state.born,
        state.last,
        state.value,
        state.gap,
    )
