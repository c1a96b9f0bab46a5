"""Simulation and lazy recomputation in the simplest form, op by op, to test the array code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from graph_tools.memory.liveness import timeline
from memsaving_gradients.schedules.dependency_order import after_needs
from memsaving_gradients.schedules.liveness import SUMMED_AT_ONCE, summed_first
from memsaving_gradients.schedules.order import deferrable_before, requested
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.training_graph import TrainingGraph
from memsaving_gradients.schedules.transfers import transfers

__all__ = ["recompute_op_by_op", "simulate_step_by_step"]


def recompute_op_by_op(
    graph: TrainingGraph, kept: set[int], chained: Iterable[int] = ()
) -> Schedule:
    """Return the result of `memsaving_gradients.schedules.schedule.recompute_lazily`."""
    border = graph.first_backward
    reads, before = graph.losable_reads, deferrable_before(graph)
    producer = graph.producer.tolist()
    lost = (graph.losable & ~np.isin(graph.storage, list(kept))).tolist()

    # Numbers of forward ops mean their clones here.
    def needs(op: int) -> list[int]:
        return [*(producer[v] for v in reads[op] if lost[v]), *before.get(op, ())]

    steps = [Step(op) for op in range(border)]
    for op in after_needs(requested(graph), needs):
        again = op < border
        copies = again or any(lost[v] for v in reads[op])
        steps.append(
            Step(op, int(again), tuple(int(lost[v]) for v in graph.reads[op]) if copies else ())
        )
    return Schedule(tuple(steps), frozenset(chained))


def simulate_step_by_step(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Return the result of `memsaving_gradients.schedules.simulate.simulate`, one execution after
    the other."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    forwards, seconds = graph.forwards.tolist(), graph.seconds.tolist()
    many = len(storage)
    # The buffer of each copy of each value: value + copy * many. A view has the buffer of its
    # input.
    buffer: dict[int, int] = {}
    born: list[int] = []
    dies: list[int] = []
    sizes: list[int] = []
    owner: list[int] = []
    passed_on: list[tuple[int, int]] = []
    added_at: dict[int, int] = {}
    totals: list[tuple[int, list[int]]] = []
    extra = 0.0
    last_load: dict[int, int] = {}
    for now, (op, copy, copies) in enumerate(schedule.steps):
        if copy and op in schedule.stored:
            stored = schedule.stored[op]
            extra += stored.load_seconds
            last_load[op] = now
            buffer[stored.value + copy * many] = len(born)
            born.append(now)
            dies.append(now)
            sizes.append(size[stored.value])
            owner.append(stored.value)
            continue
        if op in schedule.chained:
            # Backward ops, which run once, compute the addends.
            (total,) = graph.writes[op]
            addends = [buffer[value] for value in graph.sums[op] if value in buffer]
            for addend, when in zip(addends, _added_at(addends, born), strict=True):
                dies[addend] = max(dies[addend], when)
                added_at[addend] = when
            totals.append((len(born), addends[:2]))
            buffer[total] = len(born)
            born.append(max((born[at] for at in addends[:2]), default=now))
            dies.append(now)
            sizes.append(size[total])
            owner.append(total)
            continue
        reads = graph.reads[op]
        read = []
        for k, value in enumerate(reads):
            at = buffer.get(value + copies[k] * many if copies else value)
            if at is not None:
                dies[at] = now
                read.append(at)
        if copy:
            extra += seconds[op]
        for value in graph.writes[op]:
            if size[value]:
                if forwards[op]:
                    passed_on.extend((at, now) for at in read if sizes[at] == size[value])
                buffer[value + copy * many] = len(born)
                born.append(now)
                dies.append(now)
                sizes.append(size[value])
                owner.append(value)
            elif (root := storage[value]) != value:
                for k, seen in enumerate(reads):
                    if storage[seen] == root:
                        at = buffer.get(seen + copies[k] * many if copies else seen)
                        if at is not None:
                            buffer[value + copy * many] = at
                        break
    if schedule.moves:
        stream = transfers(graph, schedule)
        extra += stream.stalled
        for op, until in stream.out_until.items():
            at = buffer[schedule.stored[op].value]
            dies[at] = max(dies[at], until)
    for op, now in last_load.items():
        stored = schedule.stored[op]
        extra += stored.store_seconds
        if stored.bytes:
            # Forward ops run first, in their order, so an op is its own step.
            born.append(op)
            dies.append(now)
            sizes.append(stored.bytes)
            owner.append(stored.value)
    for value in graph.targets:
        at = buffer.get(value)
        if at is not None:
            dies[at] = len(schedule.steps) - 1
    for total, first_two in totals:
        for at in first_two:
            # The first addition overwrites the buffer of an addend that no other op needs then.
            if dies[at] == born[total] and born[at] < born[total] and sizes[at] == sizes[total]:
                dies[at] = born[total] - 1
                break
    taken = -1
    for at, now in passed_on:
        # The output takes over the buffer of one input that dies here.
        if dies[at] == now and taken != now and born[at] < now and added_at.get(at, -1) < now:
            dies[at] = now - 1
            taken = now
    if graph.workspace is not None:
        scratch = graph.workspace[[step.op for step in schedule.steps]]
        if last_load:
            loads = [bool(step.copy) and step.op in last_load for step in schedule.steps]
            scratch[loads] = 0
        during = np.flatnonzero(scratch).tolist()
        born += during
        dies += during
        sizes += scratch[during].tolist()
    lives = (np.array(born, np.int64), np.array(dies, np.int64), np.array(sizes, np.int64))
    alive = timeline(*lives, len(schedule.steps))
    return Simulation(alive, int(alive.max(initial=0)), lives, owner, extra_seconds=extra)


def _added_at(addends: Sequence[int], born: Sequence[int]) -> list[int]:
    """Return the last step that needs each addend (a buffer) for the sum, which adds it as soon as
    the addends before it exist.

    ``born``: the first step of each buffer.
    """
    reached = list(accumulate((born[at] for at in addends), max))
    head = summed_first(len(addends))
    # The first addend waits for the second.
    reached[:1] = reached[1:2] or reached[:1]
    for k in range(head, len(addends), SUMMED_AT_ONCE):
        # The first addend of each further group becomes the sum of that group.
        reached[k] = reached[min(k + SUMMED_AT_ONCE, len(addends)) - 1]
    return reached
