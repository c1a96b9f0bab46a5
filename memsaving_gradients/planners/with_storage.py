"""Four fates: a plan may encode or offload values, in addition to keeping or recomputing them.

Other planners decide which residuals to keep and which to recompute. `store` takes their schedule
and a set of values to store instead. A value is stored when it is made, and loaded before a
backward op or a clone reads it. Clones that only served stored values disappear. Storing therefore
saves memory where the schedule kept a value, and time where it recomputed one.

`planner_that_stores` combines both. It takes schedules of another planner, for the budget and for
several larger ones, and stores more and more values until each fits. The order is by saved bytes
times the steps between uses. It then improves the schedules that fit: it stops storing where that
is needless, and stores values that are expensive to recompute. The fastest schedule is the plan, so
it is never slower than recomputing alone, or storing alone in this order. Not optimal: fates of
values depend on each other, and only one is tried at a time.

Clones compute nothing from values that lost digits: results would differ by more than these. Where
a number next to zero changes its sign, a rectifier passes or stops the whole gradient.

Cost: some plans of the other planner, made once for a graph, and a few hundred simulations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from memsaving_gradients.planners import Planner
from memsaving_gradients.planners.proposal import (
    MOST_STEPS,
    QUARTERS,
    SMALLER,
    Limits,
    Proposal,
    checked,
    proposed,
    untouched,
)
from memsaving_gradients.schedules.builder import Recorder
from memsaving_gradients.schedules.schedule import LAG, Schedule
from memsaving_gradients.schedules.simulate import TIE
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph
from memsaving_gradients.schedules.transfers import ahead

__all__ = ["planner_that_stores", "store"]

#: A loaded value stays until its next reader if the ops until then write at most this many times
#: its bytes.
PATIENCE = 4


def store(graph: TrainingGraph, schedule: Schedule, chosen: Iterable[Stored]) -> Schedule:
    """Return ``schedule`` with the chosen values stored, and loaded for the backward ops and clones
    that read them.

    Examples
    --------
    A chain of three ops; the backward op reads the first value, which is stored in half its bytes.

    >>> from memsaving_gradients.schedules.schedule import Step
    >>> from memsaving_gradients.schedules.simulate import simulate
    >>> graph = TrainingGraph.of([(), (0,), (1,), (2, 0)], 3, size=8, clonable=False)
    >>> plain = Schedule(tuple(map(Step, range(4))))
    >>> halved = store(graph, plain, [Stored(0, "bfloat16", 4, 0.1, 0.1)])
    >>> halved.steps[3:]
    (Step(op=0, copy=1, reads=()), Step(op=3, copy=0, reads=(0, 1)))
    >>> simulate(graph, halved).bytes_alive.tolist()
    [12, 20, 20, 20, 24]
    """
    stored = {int(graph.producer[how.value]): how for how in chosen}
    storage, border = graph.storage.tolist(), graph.first_backward
    roots = {how.value for how in stored.values()}
    until = _patience(graph, schedule, roots)
    recorder = Recorder(graph, stored)
    for place, (op, copy, _) in enumerate(schedule.steps):
        if place == border:
            for root in roots:
                recorder.drop(root)
        if copy and op in stored:
            continue
        if copy:
            recorder.rerun(op)
        else:
            recorder.run(op)
        if place >= border:
            for root in {storage[v] for v in graph.reads[op]} & roots:
                if not until(root, place):
                    recorder.drop(root)
    return recorder.schedule(schedule.chained)


def _patience(
    graph: TrainingGraph, schedule: Schedule, roots: set[int]
) -> Callable[[int, int], bool]:
    """Return a test of whether a value is read again soon after a step of ``schedule``."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    written, total = [], 0
    readers: dict[int, list[int]] = {}
    for place, step in enumerate(schedule.steps):
        total += graph.written[step.op]
        written.append(total)
        for root in {storage[v] for v in graph.reads[step.op]} & roots:
            readers.setdefault(root, []).append(place)
    after = {
        (root, place): later
        for root, places in readers.items()
        for place, later in pairwise(places)
    }

    def soon(root: int, place: int) -> bool:
        later = after.get((root, place))
        return later is not None and written[later] - written[place] <= PATIENCE * size[root]

    return soon


def planner_that_stores(planner: Planner) -> Planner:
    """Return a planner that chooses from all four fates where values may be stored, and acts as
    ``planner`` otherwise."""

    @functools.wraps(planner)
    def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
        if not graph.storable:
            return planner(graph, limits)
        if limits.budget is None:
            return _Storing(graph, limits, checked(planner, planner(graph, limits))).below(0)
        return _within(graph, limits, planner)

    return plan


def _within(graph: TrainingGraph, limits: Limits, planner: Planner) -> Proposal:
    budget = limits.budget
    assert budget is not None
    plain = untouched(graph, limits)
    if plain.optimal:
        return plain
    found: list[Proposal] = []
    shares = QUARTERS if any(len(ways) > 1 for ways in graph.storable.values()) else QUARTERS[:1]
    for base in _bases(graph, limits, planner, plain):
        storing = _Storing(graph, limits, base)
        for share in shares:
            trial = storing.below(budget, share)
            found.append(storing.improved(trial, budget) if trial.peak <= budget else trial)
    fits = [trial for trial in found if trial.peak <= budget]
    if not fits:
        return min(found, key=lambda trial: trial.peak)
    return min(fits, key=lambda trial: (trial.extra_seconds, trial.peak))


def _relaxed(graph: TrainingGraph, limits: Limits, found: Proposal, budget: int) -> Proposal:
    """Return ``found`` with a forward pass that may run further ahead of its transfers, if memory
    allows and it saves time."""
    if not found.schedule.moves or not limits.early:
        return found
    lag = LAG
    while lag < 1:
        lag *= 2
        trial = proposed(graph, limits, replace(found.schedule, lag=lag))
        if trial.peak <= budget and trial.extra_seconds < found.extra_seconds:
            found = replace(
                trial, reasons=found.reasons, complete=found.complete, quick=found.quick
            )
    return found


def _bases(
    graph: TrainingGraph, limits: Limits, planner: Planner, plain: Proposal
) -> list[Proposal]:
    """Return plain training and plans of the other planner, made once for a graph: for the budget,
    and for quarters of the plain peak above it."""
    assert limits.budget is not None
    asked = [int(plain.peak * share) for share in QUARTERS[1:-1]]
    budgets = [*(most for most in asked if most * SMALLER > limits.budget), limits.budget]
    found = [plain]
    for budget in budgets:
        base = graph.derived(_planned, planner, budget, _Key(limits))
        if all(base.schedule != other.schedule for other in found):
            found.append(base)
    return found


class _Storing:
    """The variants of a proposal of another planner, ``base``, that store values."""

    def __init__(self, graph: TrainingGraph, limits: Limits, base: Proposal) -> None:
        self.graph, self.limits, self.base = graph, limits, base
        self.trials = max(40, MOST_STEPS // max(len(base.schedule.steps), 1))

    def below(self, budget: int, share: float = 1.0) -> Proposal:
        """Return the proposal that stores just enough for a peak within ``budget``; if none fits,
        the lowest.

        ``share``: the share of the values, in the order of `_order`, to store in the way that
        leaves the fewest bytes. The others get the next best way, if there is one.
        """
        if self.base.peak <= budget:
            return self.base
        order = _order(self.graph, self.base.schedule)
        others = order[int(len(order) * share) :]
        order[len(order) - len(others) :] = [_next(self.graph, how) for how in others]
        best = min((self._with(order), self.base), key=lambda trial: trial.peak)
        if best.peak > budget:
            # Storing everything may cost more bytes at the peak than it saves.
            parts = {int(len(order) * share) for share in QUARTERS} - {0, len(order)}
            trials = (self._with(order[:many]) for many in sorted(parts))
            return min((best, *trials), key=lambda trial: trial.peak)
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            trial = self._with(order[:middle])
            if trial.peak <= budget:
                high, best = middle, trial
            else:
                low = middle
        return best

    def improved(self, found: Proposal, budget: int) -> Proposal:
        """Stop storing values that need not be stored, the most expensive first, or store them in
        another way; then store values that are expensive to recompute.

        A change stays only if it makes the step faster.
        """
        graph = self.graph
        stored = list(found.schedule.stored.values())
        for how in sorted(stored, key=_all_seconds, reverse=True)[: self.trials // 2]:
            left = [other for other in stored if other != how]
            ways = graph.storable[int(graph.producer[how.value])]
            for instead in ([], *([way] for way in ways if way != how)):
                trial = self._with([*left, *instead])
                if trial.peak <= budget and trial.extra_seconds < found.extra_seconds:
                    found, stored = trial, [*left, *instead]
                    break
        again = {step.op for step in found.schedule.steps if step.copy}
        again = (again - found.schedule.stored.keys()) & graph.storable.keys()
        for op in sorted(again, key=lambda op: -graph.seconds[op])[: self.trials // 2]:
            more = [*stored, _cheapest(graph.storable[op])]
            trial = self._with(more)
            if trial.peak <= budget and trial.extra_seconds < found.extra_seconds:
                found, stored = trial, more
        return _relaxed(self.graph, self.limits, found, budget)

    def _with(self, chosen: Iterable[Stored]) -> Proposal:
        """Return the proposal in which the ``chosen`` values are stored."""
        chosen = self._with_room(chosen)
        schedule = store(self.graph, self.base.schedule, chosen)
        while wrong := _recomputed_from(self.graph, schedule):
            chosen = [how for how in chosen if how.value not in wrong]
            schedule = store(self.graph, self.base.schedule, chosen)
        if not self.limits.early:
            schedule = replace(schedule, lag=0.0)
        found = proposed(self.graph, self.limits, schedule)
        if schedule.moves and self.limits.early:
            sooner = ahead(self.graph, schedule, self.limits.early)
            early = proposed(self.graph, self.limits, sooner)
            # A value that comes back early takes memory early.
            if early.peak <= max(found.peak * (1 + TIE), self.limits.budget or 0):
                found = early
        gone = {how.value for how in found.schedule.stored.values()}
        reasons = {**found.reasons, **self.base.reasons}
        reasons = {storage: why for storage, why in reasons.items() if storage not in gone}
        return replace(found, reasons=reasons, complete=self.base.complete, quick=self.base.quick)

    def _with_room(self, chosen: Iterable[Stored]) -> list[Stored]:
        """Return the values of ``chosen`` that the host has room for, in their order."""
        left = self.limits.host
        if left is None:
            return list(chosen)
        found = []
        for how in chosen:
            size = int(self.graph.size[how.value]) if how.moving_seconds else 0
            if size <= left:
                left -= size
                found.append(how)
        return found


def _recomputed_from(graph: TrainingGraph, schedule: Schedule) -> set[int]:
    """Return the encoded values that clones read to recompute others."""
    encoded = {how.value for how in schedule.stored.values() if how.fate == "encode"}
    if not encoded or not schedule.clones:
        return set()
    storage = graph.storage.tolist()
    found: set[int] = set()
    for op, copy, _ in schedule.steps:
        # A view of a loaded value computes nothing.
        if copy and op not in schedule.stored and any(storage[v] == v for v in graph.writes[op]):
            found |= {storage[v] for v in graph.reads[op]} & encoded
    return found


def _order(graph: TrainingGraph, schedule: Schedule) -> list[Stored]:
    """Return the storable values that are kept and read by backward ops or clones. The value with
    the most saved bytes times steps between uses is first."""
    again = {step.op for step in schedule.steps if step.copy}
    storage, size = graph.storage.tolist(), graph.size.tolist()
    used: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    for place, step in enumerate(schedule.steps):
        for value in graph.reads[step.op]:
            root = storage[value]
            if place < graph.first_backward:
                last_forward[root] = place
            else:
                used.setdefault(root, place)
    found = []
    for op, ways in graph.storable.items():
        how = _cheapest(ways)
        if how.value in used and op not in again:
            idle = used[how.value] - last_forward.get(how.value, 0)
            found.append((idle * (size[how.value] - how.bytes), -how.value, how))
    return [how for *_, how in sorted(found, reverse=True)]


def _next(graph: TrainingGraph, how: Stored) -> Stored:
    """Return the way to store the same value that leaves the fewest bytes except for ``how``; or
    ``how``, if there is no other."""
    ways = graph.storable[int(graph.producer[how.value])]
    others = [way for way in ways if way != how]
    return _cheapest(others) if others else how


def _cheapest(ways: Iterable[Stored]) -> Stored:
    return min(ways, key=lambda how: (how.bytes, _seconds(how)))


def _all_seconds(how: Stored) -> float:
    return _seconds(how) + 2 * how.moving_seconds


def _seconds(how: Stored) -> float:
    return how.store_seconds + how.load_seconds


class _Key:
    """Limits as part of a cache key, compared by the fields that affect the cached plans."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._key = (frozenset(limits.keep), limits.accumulate, limits.quick)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


def _planned(graph: TrainingGraph, planner: Planner, budget: int, key: _Key) -> Proposal:
    return checked(planner, planner(graph, replace(key.limits, budget=budget)))
