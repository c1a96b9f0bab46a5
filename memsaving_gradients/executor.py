"""The order in which TensorFlow's executor runs the forward ops, which nobody holds back.

Planners think in the order of creation. The executor runs what is ready: when an op is done, the cheap ones of those
that it made ready run next, in the same thread; of the dear ones the last does, unless there were cheap ones, and the others are
queued, for any thread. An unrolled recurrence therefore multiplies all its inputs by their weights before its second step, and
holds the products. Backward ops are held where it matters, so that their order is the schedule's. Constants, variables and fed
inputs are there from the start.

A model of one thread (``executor.cc`` and ``propagator_state.h`` of TensorFlow 2.16 to 2.21), linear in ops and edges.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from memsaving_gradients.schedule import Schedule
from memsaving_gradients.training_graph import TrainingGraph

__all__ = ["as_executed", "forward_order"]

#: An op that takes longer than this (8,000 cycles, says TensorFlow) is dear.
DEAR_SECONDS = 3e-6


def as_executed(schedule: Schedule, order: list[int]) -> Schedule:
    """``schedule``, which runs the forward ops first, with these in the given order."""
    forward = tuple(schedule.steps[op] for op in order)
    return replace(schedule, steps=(*forward, *schedule.steps[len(order) :]))


def forward_order(graph: TrainingGraph) -> list[int]:
    """The forward ops in the order in which the executor runs them."""
    border, producer = graph.first_backward, graph.producer.tolist()
    dear = (graph.seconds > DEAR_SECONDS).tolist()
    source = graph.source[graph.storage].tolist()
    missing: list[int] = []
    after: list[list[int]] = [[] for _ in range(border)]
    there: dict[int, None] = {}
    for op in range(border):
        before = {*(producer[v] for v in graph.reads[op]), *graph.waits.get(op, ())}
        before -= there.keys()
        if not before and all(source[v] for v in graph.writes[op]):
            there[op] = None
        missing.append(len(before))
        for other in before:
            after[other].append(op)
    order = list(there)
    queued = deque(op for op in range(border) if not missing[op] and op not in there)
    following: deque[int] = deque()

    def dispatch(op: int) -> None:
        (queued.appendleft if following else following.append)(op)

    while following or queued:
        op = (following or queued).popleft()
        order.append(op)
        last = None
        for reader in after[op]:
            missing[reader] -= 1
            if missing[reader]:
                continue
            if not dear[reader]:
                following.append(reader)
                continue
            if last is not None:
                dispatch(last)
            last = reader
        if last is not None:
            dispatch(last)
    return order
