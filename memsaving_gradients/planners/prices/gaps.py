"""The gaps of a retention problem that prices decide on, and when the values in them are needed.

For fixed prices, keeping a value over a gap costs its bytes; recomputing it costs time and needs
its inputs. A minimum cut makes this choice (:mod:`~memsaving_gradients.planners.prices.closure`).
It must know when each value is recomputed: for the end of its gap, or earlier, for another value
that is computed from it. `Gaps.times` reads these times from the run of the last decisions.

Prices decide on two kinds of gaps. An *inner* gap ends with an event that reads the value. A *tail*
is the last gap of a value that recomputation may still read: no event reads this value any more,
but another value may be recomputed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memsaving_gradients.planners.retention.problem import KEPT, Problem
from memsaving_gradients.planners.retention.simulate import Run
from memsaving_gradients.schedules.arrays import BoolArray, FloatArray, IntArray

__all__ = ["Gaps", "Times", "spans"]


@dataclass(frozen=True, eq=False)
class Times:
    """The times at which values are recomputed, by gap.

    Attributes
    ----------
    made
        The event before which the value of a gap is recomputed, or would be if it were dropped.
    until
        For a tail, the last event at which recomputation reads the value, or may read it; else -1.
    again
        Whether the run recomputes the value.
    """

    made: IntArray
    until: IntArray
    again: BoolArray


class Gaps:
    """The gaps of a problem, as arrays by gap, and the inputs that recomputation needs in them.

    Attributes
    ----------
    value, begin, end, size, seconds
        The value of each gap, the events before and after it, the bytes of the value, and the time
        of its recipe (0: it has none).
    tail
        Whether a gap is the last one of its value.
    open
        Whether a gap may be decided on: it reaches the border, an event is inside of it or it is
        the last one, and its value takes bytes and can be recomputed.
    inner, tails
        The decided gaps, by kind.
    inputs
        For each decided gap, the open gaps of its value's inputs at the event for which the value
        is recomputed (for a tail, the first such event).
    users
        For each gap, the decided gaps whose values are computed from its value.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.events = len(problem.reads)
        gaps = np.array(problem.gaps, np.int64).reshape(-1, 3)
        self.value, self.begin, self.end = gaps.T.copy()
        recipe = np.array(problem.recipe, np.int64)
        seconds = np.append(np.array(problem.seconds, np.float64), 0.0)
        self.size = problem.sizes[self.value]
        self.seconds = seconds[recipe][self.value]
        self.tail = self.end == self.events
        self.open: BoolArray = (
            (recipe[self.value] >= 0)
            & (self.size > 0)
            & (self.end >= problem.border)
            & (self.tail | (self.end - self.begin > 1))
        )
        self.inner = np.flatnonzero(self.open & ~self.tail)
        self._is_open, self._is_tail = self.open.tolist(), self.tail.tolist()
        self.inputs: dict[int, tuple[int, ...]] = {
            gap: self.inputs_at(gap, event)
            for gap, event in zip(self.inner.tolist(), self.end[self.inner].tolist(), strict=True)
        }
        self._first, self._last = self._needed()
        self.tails = np.flatnonzero(self._last >= 0)
        for gap, event in zip(self.tails.tolist(), self._first[self.tails].tolist(), strict=True):
            self.inputs[gap] = self.inputs_at(gap, event)
        self.users: dict[int, list[int]] = {}
        for gap, found in self.inputs.items():
            for other in found:
                self.users.setdefault(other, []).append(gap)
        pairs = [(gap, other) for gap, found in self.inputs.items() for other in found]
        self._user, self._input = np.array(pairs, np.int64).reshape(-1, 2).T.copy()

    def inputs_at(self, gap: int, event: int) -> tuple[int, ...]:
        """Return the open gaps, at ``event``, of the inputs of a gap's value."""
        problem = self.problem
        read = problem.inputs[problem.recipe[problem.owner[gap]]]
        found = (problem.gap_at(value, event) for value in read)
        return tuple(other for other in found if self._is_open[other])

    def _needed(self) -> tuple[IntArray, IntArray]:
        """Return, for each tail, the first and last event at which recomputation may need its
        value, directly or for another tail; the number of events and -1: it never does."""
        tail = self._is_tail
        first = np.full(len(self.value), self.events)
        last = np.full(len(self.value), -1)
        todo = [
            (other, int(self.end[gap]))
            for gap, found in self.inputs.items()
            for other in found
            if tail[other]
        ]
        seen = set()
        while todo:
            gap, event = todo.pop()
            if (gap, event) in seen:
                continue
            seen.add((gap, event))
            first[gap], last[gap] = min(first[gap], event), max(last[gap], event)
            todo += [(other, event) for other in self.inputs_at(gap, event) if tail[other]]
        return first, last

    def times(self, run: Run, decisions: Sequence[int]) -> Times:
        """Return when ``run`` recomputes values, or would if one decision alone were different."""
        event = np.array(run.event, np.int64)
        gap, value = np.array(run.gap, np.int64), np.array(run.value, np.int64)
        born, last = event[np.array(run.born, np.int64)], event[np.array(run.last, np.int64)]
        kept = np.array(decisions, np.int64) == KEPT
        made = np.where(self.tail, self._first, self.end)
        first = np.full(len(self.value), self.events + 1)
        here = ~kept[gap] & (born > self.begin[gap]) & (born >= self.problem.border)
        np.minimum.at(first, gap[here], born[here])
        again = (first <= self.events) & self.open
        made = np.where(again, np.minimum(first, self.events - 1), made)
        # A kept value, if dropped, would be recomputed for the first value computed from it.
        user, other = self._user, self._input
        would = again[user] & ~again[other] & (self.begin[other] < made[user])
        np.minimum.at(made, other[would], made[user][would])
        used = np.full(len(self.problem.size), -1)
        np.maximum.at(used, value, last)
        until = np.full(len(self.value), -1)
        tails = self.tails
        read = used[self.value[tails]]
        known = (again | kept)[tails] & (read > self.begin[tails])
        until[tails] = np.maximum(np.where(known, read, self._last[tails]), made[tails])
        return Times(made, until, again)

    def readers(self, times: Times) -> IntArray:
        """Return, for each gap, at how many events inside it other values are made of its value."""
        user, other = self._user, self._input
        event = times.made[user]
        here = times.again[user] & (self.begin[other] < event) & (event < self.end[other])
        pairs = np.unique(np.stack([other[here], event[here]]), axis=1)
        return np.bincount(pairs[0], minlength=len(self.value))


def spans(price: FloatArray, begin: IntArray, end: IntArray) -> FloatArray:
    """Return the sums of prices over the events between ``begin`` and ``end``, both excluded;
    ``price`` holds the sums of prices before each event."""
    most = len(price) - 1
    between = price[np.minimum(end, most)] - price[np.minimum(begin + 1, most)]
    return np.maximum(between, 0.0)
