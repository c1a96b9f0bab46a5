"""Retention: for every value and every gap between two of its uses, whether it stays or is dropped and made again.

This is the form in which plans are searched for. The originals run in a fixed order, as *events*. A value has uses: the event
that makes it and those that read it; between two of them lies a *gap*, and behind the last one a gap without end. In a gap a value is

- kept: it is there for the next use, and for whatever is made again in between;
- dropped: it is freed after its last reader; whoever needs it makes it again, from what is there, recursively, and from
  then on it is there until the next use;
- dropped strictly: likewise, but what was made again for somebody else is freed again at once;
- dropped, and made again early, at an event in the gap, when what it is made of is still there;
- dropped late: kept until an event in the gap, at which something is made of it, and dropped from then on.

All schedules of Chen et al. 2016 and every other plan that recomputes a value at most once a gap are such decisions, and the retention
intervals of Moccasin (Bartan et al. 2023, arXiv 2304.14463) are. An event stands for one op, or for a stretch of ops of which only the
bytes matter (:mod:`memsaving_gradients.planners.coarse` makes them); values that nobody decides on are counted in those.

`run` plays a set of decisions through, in time linear in the steps and their inputs: about a microsecond for each. It is plain
Python on lists: steps depend on each other, and lists are faster than arrays for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = [
    "DROPPED",
    "EARLY",
    "KEPT",
    "LATE",
    "STRICT",
    "Execution",
    "Problem",
    "Run",
    "decide",
    "run",
]

#: Decisions on a gap; ``EARLY + 2 * event`` and ``LATE + 2 * event`` stand for one that names an event.
KEPT, DROPPED, STRICT, EARLY, LATE = 0, 1, 2, 3, 4

IntArray = npt.NDArray[np.int64]
#: A recipe that is run again, behind the event before which it is.
Execution = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Problem:
    """What runs, in which order, and what it costs to make a value again.

    Attributes
    ----------
    reads, writes
        For each event, the values that it reads and makes.
    size
        For each value, its bytes.
    recipe
        For each value, the number of the recipe that makes it again; -1: it cannot be made again.
    inputs, outputs, seconds, scratch
        For each recipe: the values that it reads, those that it makes, its time, and the bytes that it takes beside both.
    during
        For each event, the most bytes of anything else while it runs.
    between
        For each event, the bytes of anything else just before it, while values are made again for it.
    border
        The first event for which values may be made again: forward ops run first, all of them. Decisions respect it, `run` does not ask.
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
        """For each value, the events that use it: the one that makes it first."""
        uses: list[list[int]] = [[] for _ in self.size]
        for event, (read, made) in enumerate(zip(self.reads, self.writes, strict=True)):
            for value in (*read, *made):
                if not uses[value] or uses[value][-1] != event:
                    uses[value].append(event)
        return uses

    @cached_property
    def first_gap(self) -> list[int]:
        """For each value, the number of its first gap; one more at the end."""
        return [0, *np.cumsum([len(uses) for uses in self.uses]).tolist()]

    @cached_property
    def gaps(self) -> list[tuple[int, int, int]]:
        """For each gap: its value, the event before it, the event behind it (the number of events, if there is none)."""
        return [
            (value, begin, end)
            for value, uses in enumerate(self.uses)
            for begin, end in zip(uses, (*uses[1:], len(self.reads)), strict=True)
        ]

    @cached_property
    def owner(self) -> list[int]:
        """For each gap, its value."""
        return [value for value, _, _ in self.gaps]

    def plain(self) -> list[int]:
        """The decisions of plain training: everything is kept until its last use."""
        last = {self.first_gap[v + 1] - 1 for v in range(len(self.size))}
        return [DROPPED if gap in last else KEPT for gap in range(self.first_gap[-1])]


@dataclass(frozen=True, eq=False)
class Run:
    """What comes of a set of decisions.

    Attributes
    ----------
    bytes_alive
        For each step (recipes run again, and events), the bytes alive.
    peak
        The most of them.
    extra_seconds
        Time of the recipes that were run again.
    event
        For each step, the event that it belongs to: the one that it makes something for, or itself.
    again
        The recipes that were run again, in order, each behind the event before which it was.
    born, last, value, gap
        For each time that a value was made: the step, the last step that reads it, the value, and the gap in which it was made.
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
        """Bytes above ``budget``, as a share of it, to a power, summed up over the steps."""
        over = np.maximum(self.bytes_alive - budget, 0) / max(budget, 1)
        return float((over**power).sum())

    def worth(self, budget: int) -> tuple[float, float]:
        """Less is better: first what is above ``budget``, then the extra time."""
        return self.excess(budget), self.extra_seconds


def _leaves_at_once(what: int) -> bool:
    """Whether a value that is dropped in a gap is so from its beginning, and not late."""
    return what < LATE or what % 2 == 1


def _appointments(
    problem: Problem, decisions: Sequence[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The gaps in which a value is made again before each event, and those in which it is dropped behind each event."""
    returns: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}
    for gap, what in enumerate(decisions):
        if what >= EARLY:
            (returns if what % 2 else leaves).setdefault((what - EARLY) // 2, []).append(gap)
    return returns, leaves


def run(problem: Problem, decisions: Sequence[int]) -> Run:
    """Play ``decisions`` (one for each gap) through.

    Examples
    --------
    A chain of four values of a byte each, of which the backward pass reads the second and the first. Dropping the first one between
    its uses costs a second run of its recipe, and saves a byte:

    >>> chain = Problem(
    ...     reads=[(), (0,), (1,), (2,), (3, 1), (4, 0)], writes=[(0,), (1,), (2,), (3,), (4,), (5,)], size=[1] * 6,
    ...     recipe=[0, 1, 2, -1, -1, -1], inputs=[(), (0,), (1,)], outputs=[(0,), (1,), (2,)], seconds=[1.0, 1.0, 1.0],
    ...     scratch=[0, 0, 0], during=[0] * 6, between=[0] * 6)
    >>> plain = chain.plain()
    >>> run(chain, plain).peak, run(chain, plain).extra_seconds
    (4, 0.0)
    >>> plain[chain.first_gap[0] + 1] = DROPPED
    >>> run(chain, plain).peak, run(chain, plain).extra_seconds
    (3, 1.0)
    """
    recipe, inputs, outputs = problem.recipe, problem.inputs, problem.outputs
    seconds, scratch = problem.seconds, problem.scratch
    during, between, size_of = problem.during, problem.between, problem.size
    gap_of = problem.first_gap[:-1].copy()
    there = bytearray(len(problem.size))
    at = [0] * len(problem.size)
    born: list[int] = []
    last: list[int] = []
    value_of: list[int] = []
    made_in: list[int] = []
    beside: list[int] = []
    event_of: list[int] = []
    recipes: list[tuple[int, int]] = []
    returns, leaves = _appointments(problem, decisions)
    extra = 0.0
    step = 0
    for event, (read, made) in enumerate(zip(problem.reads, problem.writes, strict=True)):
        again: list[int] = []
        early = [problem.owner[gap] for gap in returns.get(event, ())]
        for wanted in (*early, *read) if early else read:
            if there[wanted]:
                continue
            stack = [wanted]
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
            gap_of[v] += 1
        for v in made:
            at[v] = len(born)
            born.append(step)
            last.append(step)
            value_of.append(v)
            made_in.append(gap_of[v])
            there[v] = 1
        for v in again:
            if decisions[gap_of[v]] == STRICT:
                there[v] = 0
        for v in (*read, *made):
            what = decisions[gap_of[v]]
            if what and recipe[v] >= 0 and _leaves_at_once(what):
                there[v] = 0
        for gap in leaves.get(event, ()):
            there[problem.owner[gap]] = 0
        beside.append(during[event])
        event_of.append(event)
        step += 1
    size = np.array([size_of[v] for v in value_of], np.int64)
    delta = np.zeros(step + 1, np.int64)
    np.add.at(delta, born, size)
    np.add.at(delta, np.array(last, np.int64) + 1, -size)
    alive = np.cumsum(delta[:step]) + np.array(beside, np.int64)
    peak = int(alive.max(initial=0))
    return Run(alive, peak, extra, event_of, recipes, born, last, value_of, made_in)


def decide(problem: Problem, executions: Iterable[Execution]) -> list[int]:
    """Decisions of which these executions come, or nearly: a gap in which a value is dropped twice has no word for that.

    What would be run again before the border is not.

    Examples
    --------
    >>> chain = Problem(
    ...     reads=[(), (0,), (1,), (2,), (3, 1), (4, 0)], writes=[(0,), (1,), (2,), (3,), (4,), (5,)], size=[1] * 6,
    ...     recipe=[0, 1, 2, -1, -1, -1], inputs=[(), (0,), (1,)], outputs=[(0,), (1,), (2,)], seconds=[1.0, 1.0, 1.0],
    ...     scratch=[0, 0, 0], during=[0] * 6, between=[0] * 6)
    >>> run(chain, decide(chain, [(5, 0)])).again
    [(5, 0)]
    """
    again: dict[int, list[int]] = {}
    for event, number in executions:
        if event >= problem.border:
            again.setdefault(event, []).append(number)
    decisions = problem.plain()
    gap_of = problem.first_gap[:-1].copy()
    # For each value, in the gap that it is in: the last use of what was there at its beginning; when it was made again, and the first use of that.
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
