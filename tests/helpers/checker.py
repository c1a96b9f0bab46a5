"""An independent interpreter of schedules: validity, bytes alive, and extra time.

It works in the most obvious way, one execution after the other, and shares no code with the
library. Each execution makes a buffer for each value that is no view. A view points at the buffer
of its input. A buffer is alive from the execution that makes it to the last one that reads it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

__all__ = ["Checked", "check_proposal", "check_schedule", "naive_peak"]


@dataclass(frozen=True)
class Checked:
    """The results of an interpretation.

    ``peak``: bytes, with nothing written in place and no sum chained, so at least the peak that the
    library simulates. ``extra_seconds``: time of the clones, loads and stores.
    """

    peak: int
    extra_seconds: float


def check_schedule(graph, schedule, *, forward_first: bool = True) -> Checked:
    """Assert that ``schedule`` is valid for ``graph``.

    Every original runs once, after the ops that it reads and waits for. With ``forward_first`` the
    forward ops run first, in the order of the graph. Only clonable forward ops have copies, which
    are numbered 1, 2, … in the order of their executions. Every copy that an execution reads was
    made by an earlier execution.
    """
    made: set[tuple[int, int]] = set()
    ran: set[int] = set()
    copies_of: Counter[int] = Counter()
    for now, step in enumerate(schedule.steps):
        if step.copy and step.op in schedule.stored:
            value = schedule.stored[step.op].value
            assert (value, 0) in made, f"step {now}, {step}: loads {value}, which is not made"
            copies_of[step.op] += 1
            assert step.copy == copies_of[step.op], f"step {now}, {step}: numbered out of order"
            made.add((value, step.copy))
            continue
        values = graph.reads[step.op]
        copies = step.reads or (0,) * len(values)
        assert len(copies) == len(values), f"step {now}, {step}: reads {len(values)} values"
        for value, copy in zip(values, copies, strict=True):
            assert (value, copy) in made, f"step {now}, {step}: copy {copy} of {value} is not made"
        if step.copy:
            assert step.op < graph.first_backward, f"step {now}, {step}: copies a backward op"
            assert graph.clonable[step.op], f"step {now}, {step}: must not be copied"
            copies_of[step.op] += 1
            assert step.copy == copies_of[step.op], f"step {now}, {step}: numbered out of order"
            assert step.op in ran, f"step {now}, {step}: copied before the original ran"
        else:
            assert step.op not in ran, f"step {now}, {step}: an original runs twice"
            late = [op for op in graph.waits.get(step.op, ()) if op not in ran]
            assert not late, f"step {now}, {step}: does not wait for {late}"
            if forward_first and step.op < graph.first_backward:
                assert now == step.op, f"step {now}, {step}: a forward op is not in its place"
            ran.add(step.op)
        made.update((value, step.copy) for value in graph.writes[step.op])
    assert ran == set(range(graph.length)), "not every original runs"
    assert set(schedule.chained) <= set(graph.sums)
    stored = schedule.stored
    extra = sum(how.store_seconds for how in stored.values())
    for step in schedule.steps:
        if step.copy:
            load = stored.get(step.op)
            extra += float(graph.seconds[step.op]) if load is None else load.load_seconds
    return Checked(naive_peak(graph, schedule), extra)


def check_proposal(graph, proposal, budget: int, near: float) -> None:
    """Assert the invariants of every planner's proposal within ``budget``; sums of times may be off
    by ``near``."""
    checked = check_schedule(graph, proposal.schedule)
    assert proposal.peak <= checked.peak or proposal.schedule.chained
    assert proposal.extra_seconds == pytest.approx(checked.extra_seconds)
    if proposal.peak <= budget:
        assert proposal.lower_bound <= proposal.extra_seconds + near
    if proposal.optimal:
        assert proposal.peak <= budget
        assert proposal.extra_seconds <= proposal.lower_bound * (1 + near)


def naive_peak(graph, schedule) -> int:
    """Return the peak of ``schedule`` in bytes by following each buffer; nothing is written in
    place, no sum is chained."""
    buffer_of: dict[tuple[int, int], int] = {}
    size: list[int] = []
    born: list[int] = []
    last: list[int] = []

    def make(bytes_: int, now: int) -> int:
        size.append(bytes_)
        born.append(now)
        last.append(now)
        return len(size) - 1

    kept = {step.op: -1 for step in schedule.steps if step.copy and step.op in schedule.stored}
    for now, step in enumerate(schedule.steps):
        if step.op in kept:
            how = schedule.stored[step.op]
            if step.copy:
                buffer_of[how.value, step.copy] = make(int(graph.size[how.value]), now)
                last[kept[step.op]] = now
                continue
            kept[step.op] = make(how.bytes, now)
        values = graph.reads[step.op]
        copies = step.reads or (0,) * len(values)
        read = [buffer_of[value, copy] for value, copy in zip(values, copies, strict=True)]
        for buffer in read:
            last[buffer] = now
        if graph.workspace is not None:
            make(int(graph.workspace[step.op]), now)
        for value in graph.writes[step.op]:
            root = graph.storage[value]
            if root == value:
                buffer_of[value, step.copy] = make(int(graph.size[value]), now)
                continue
            # A view has the buffer of the first input with the same storage.
            looks_at = [b for b, v in zip(read, values, strict=True) if graph.storage[v] == root]
            buffer_of[value, step.copy] = looks_at[0]
    for value in graph.targets:
        last[buffer_of[value, 0]] = len(schedule.steps) - 1
    change = [0] * (len(schedule.steps) + 1)
    for bytes_, first, end in zip(size, born, last, strict=True):
        change[first] += bytes_
        change[end + 1] -= bytes_
    peak = alive = 0
    for bytes_ in change:
        alive += bytes_
        peak = max(peak, alive)
    return peak
