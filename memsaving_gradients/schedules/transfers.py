"""The times of transfers to the host and back, and the waits of computations for them.

Computations, transfers out and transfers back run at the same time, each kind one after the other.
A transfer out begins when its value is made. A transfer back begins at the load in the schedule,
its trigger, and readers of the value wait until it has arrived. The forward pass must not run ahead
of its transfers, or all values in flight would be alive together. It may write at most a share of
all of its bytes (`Schedule.lag`) before an earlier value is stored (`waits`). A rewrite builds
these waits into the graph.

The time by which a transfer outlasts the computations meanwhile is a *stall*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memsaving_gradients.schedules.training_graph import TrainingGraph

if TYPE_CHECKING:
    from memsaving_gradients.schedules.schedule import Schedule, Step

__all__ = ["Transfers", "ahead", "transfers", "waits"]


@dataclass(frozen=True)
class Transfers:
    """The timeline of a schedule with transfers.

    Attributes
    ----------
    seconds
        Time from the first step to the last one.
    stalled
        Time for which computations wait for transfers.
    out_until
        For each op whose value is moved, the step that runs when the transfer out ends.
    """

    seconds: float
    stalled: float
    out_until: Mapping[int, int]


def waits(graph: TrainingGraph, schedule: Schedule) -> dict[int, list[int]]:
    """Return, for forward ops that wait until values are stored, the ops that made these values."""
    stored = schedule.stored
    if not stored:
        return {}
    written = graph.written[: graph.first_backward]
    slack = sum(written) * schedule.lag if schedule.lag else -1.0
    total = 0
    waiting: list[tuple[int, int]] = []
    found: dict[int, list[int]] = {}
    for op, made in enumerate(written):
        due = [maker for since, maker in waiting if total - since > slack]
        if due and graph.expensive[op]:
            found[op] = due
            waiting = [(since, maker) for since, maker in waiting if maker not in due]
        total += made
        if op in stored:
            waiting.append((total, op))
    return found


def ahead(graph: TrainingGraph, schedule: Schedule, early: float = 1.0) -> Schedule:
    """Return ``schedule`` with its transfers back begun as late as possible, but so early that they
    end when they are needed.

    ``early``: the assumed duration of a transfer, as a multiple of the estimate.

    Transfers run one after the other. If two would overlap, the earlier one begins sooner, but not
    before the backward pass. Loads of encoded values stay in their place.

    Examples
    --------
    >>> from memsaving_gradients.schedules.schedule import Schedule, Step
    >>> from memsaving_gradients.schedules.storage import Stored
    >>> graph = TrainingGraph.of([(), (0,), (1,), (2,), (3, 0)], 2, size=8, clonable=False)
    >>> steps = (Step(0), Step(1), Step(2), Step(3), Step(0, 1), Step(4, 0, (0, 1)))
    >>> late = Schedule(steps, stored={0: Stored(0, "offload", 0, 0.0, 0.0, 1.5)})
    >>> transfers(graph, late).stalled, transfers(graph, ahead(graph, late)).stalled
    (1.5, 0.0)
    """
    times, stored = graph.seconds.tolist(), schedule.stored
    border = graph.first_backward
    steps: list[Step] = []
    begins: list[float] = []
    moved: list[tuple[Step, float]] = []
    now = 0.0
    for step in schedule.steps[border:]:
        how = stored.get(step.op) if step.copy else None
        if how is not None and how.moving_seconds:
            moved.append((step, now))
            continue
        steps.append(step)
        begins.append(now)
        now += times[step.op] if how is None else how.load_seconds
    before: dict[int, list[Step]] = {}
    begun = now
    for step, needed in reversed(moved):
        begun = min(begun, needed) - early * stored[step.op].moving_seconds
        place = max(0, bisect_right(begins, begun) - 1)
        # Not between clones: the runtime merges some of them as it merges their originals.
        while place and steps[place].copy:
            place -= 1
        before.setdefault(place, []).append(step)
    found = list(schedule.steps[:border])
    for place, step in enumerate(steps):
        found += reversed(before.get(place, ()))
        found.append(step)
    return replace(schedule, steps=tuple(found))


def transfers(graph: TrainingGraph, schedule: Schedule) -> Transfers:
    """Simulate a schedule, with transfers in addition to computations."""
    stored, times = schedule.stored, graph.seconds.tolist()
    holds = waits(graph, schedule)
    producer = graph.producer.tolist()
    now = out_free = back_free = stalled = 0.0
    out_at: dict[int, float] = {}
    back_at: dict[tuple[int, int], float] = {}
    ends: list[float] = []
    for op, copy, copies in schedule.steps:
        if copy and op in stored:
            how = stored[op]
            back_free = max(now, back_free) + how.moving_seconds
            back_at[op, copy] = back_free
            now += how.load_seconds
            ends.append(now)
            continue
        ready = now
        for maker in holds.get(op, ()) if not copy else ():
            ready = max(ready, out_at.get(maker, 0.0))
        for value, which in zip(graph.reads[op], copies, strict=False):
            if which:
                ready = max(ready, back_at.get((producer[value], which), 0.0))
        stalled += ready - now
        now = ready + times[op]
        if op in stored:
            how = stored[op]
            now += how.store_seconds
            out_free = max(now, out_free) + how.moving_seconds
            out_at[op] = out_free
        ends.append(now)
    # The last transfers out may end after the forward pass; steps are in order of time.
    until: dict[int, int] = {}
    at = 0
    for op, when in sorted(out_at.items(), key=lambda item: item[1]):
        if not stored[op].moving_seconds:
            continue
        while at < len(ends) - 1 and ends[at] < when:
            at += 1
        until[op] = at
    return Transfers(now, stalled, until)
