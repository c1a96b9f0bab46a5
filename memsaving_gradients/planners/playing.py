"""Playing decisions of :mod:`~memsaving_gradients.planners.retention` through, from any event to any other.

Plain Python on lists: steps depend on each other, and lists are faster than arrays for that. It takes a third of a microsecond for each
event, and about one for each recipe that is run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaving_gradients.planners.retention import Problem

__all__ = [
    "DROPPED",
    "EARLY",
    "KEPT",
    "LATE",
    "STRICT",
    "Appointments",
    "Execution",
    "State",
    "is_gone",
    "play",
]

#: Decisions on a gap; ``EARLY + 2 * event`` and ``LATE + 2 * event`` stand for one that names an event.
KEPT, DROPPED, STRICT, EARLY, LATE = 0, 1, 2, 3, 4

#: A recipe that is run again, behind the event before which it is.
Execution = tuple[int, int]


@dataclass(eq=False, slots=True)
class State:
    """Where a run stands, in front of an event.

    Attributes
    ----------
    now
        The event.
    there
        For each value, whether it is there.
    at
        For each value, which of the times that it was made was the last one.
    gap_of
        For each value, the gap that it is in.
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
        """In front of the first event: nothing is there."""
        many = len(problem.size)
        gap_of = problem.first_gap[:-1].copy()
        return cls(0, bytearray(many), [0] * many, gap_of, [], [], [], [], [], [], [])

    def copy(self) -> State:
        """One that may be played further."""
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


def is_gone(what: int, event: int) -> bool:
    """Whether a value that can be made again is dropped before an event of a gap, by the decision on it."""
    return what != KEPT and (what < LATE or what % 2 == 1 or (what - LATE) // 2 < event)


class Appointments:
    """The gaps in which a value is made again before each event, and those in which it is dropped behind each event."""

    def __init__(self, decisions: Sequence[int], gaps: Iterable[int]) -> None:
        self.gaps = [gap for gap in gaps if decisions[gap] >= EARLY]
        self.returns: dict[int, list[int]] = {}
        self.leaves: dict[int, list[int]] = {}
        for gap in self.gaps:
            what = decisions[gap]
            which = self.returns if what % 2 else self.leaves
            which.setdefault((what - EARLY) // 2, []).append(gap)


def play(
    problem: Problem,
    decisions: Sequence[int],
    appointments: Appointments,
    state: State,
    until: int,
) -> None:
    """Play from where ``state`` stands, which is changed, to an event (excluded)."""
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
                # What is there already is made once more in passing.
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
            # A call would take as long as all the rest.
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
