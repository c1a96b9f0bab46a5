"""When transfers to the host and back take place, and what computing waits for.

Computations run one after the other; transfers out are a second line, transfers back a third one. A
transfer out begins when its value is made. A transfer back begins where the schedule has the load,
which is its trigger, and whoever reads the value waits until it is there. The forward pass must not
run ahead of its transfers, or all values in flight would be alive together: at most a share of all
that it writes (`Schedule.lag`) may be written before what was made earlier is stored (`waits`).
These are the waits that a rewrite builds into the graph.

What a transfer takes beyond the computations that go on meanwhile is a *stall*; the rest is
*hidden*.
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
        From the first step to the last one.
    moving
        The sum of all transfers.
    stalled
        For how long computing waits for transfers.
    out_until
        For each op whose value is moved, the step that runs when it has arrived elsewhere.
    """

    seconds: float
    moving: float
    stalled: float
    out_until: Mapping[int, int]

    @property
    def hidden(self) -> float:
        """The share of the transfers during which something is computed.

        Examples
        --------
        >>> Transfers(10.0, 4.0, 1.0, {}).hidden
        0.75
        """
        return 1.0 - min(1.0, self.stalled / self.moving) if self.moving else 1.0


def waits(graph: TrainingGraph, schedule: Schedule) -> dict[int, list[int]]:
    """For forward ops that wait until something is stored, the ops that made it."""
    stored = schedule.stored
    if not stored:
        return {}
    sizes = graph.size.tolist()
    written = [sum(sizes[v] for v in graph.writes[op]) for op in range(graph.first_backward)]
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
    """``schedule`` with its transfers back begun as late as possible, but so early that they end
    when they are needed.

    ``early``: how many times as long as estimated they are taken to last.

    They come one after the other: one that has no time of its own pushes those before it forward,
    at most to the beginning of the backward pass. What is encoded stays where it is.

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
        # Not amidst of clones: some of them are merged by the runtime as their originals are.
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
    now = out_free = back_free = moving = stalled = 0.0
    out_at: dict[int, float] = {}
    back_at: dict[tuple[int, int], float] = {}
    ends: list[float] = []
    for op, copy, copies in schedule.steps:
        if copy and op in stored:
            how = stored[op]
            back_free = max(now, back_free) + how.moving_seconds
            moving += how.moving_seconds
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
            moving += how.moving_seconds
            out_at[op] = out_free
        ends.append(now)
    # The last transfers out may end behind the forward pass; steps are in order of time.
    until: dict[int, int] = {}
    at = 0
    for op, when in sorted(out_at.items(), key=lambda item: item[1]):
        if not stored[op].moving_seconds:
            continue
        while at < len(ends) - 1 and ends[at] < when:
            at += 1
        until[op] = at
    return Transfers(now, moving, stalled, until)
