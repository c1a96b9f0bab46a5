"""A check that a schedule can run: values are made before they are read, every original runs once,
forward ops first, and only ops that may run again have clones.

For schedules from outside: a user's planner, or a file. Linear in executions and their inputs.
"""

from __future__ import annotations

from memsaving_gradients.schedules.schedule import Schedule
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["problem_of"]


def problem_of(graph: TrainingGraph, schedule: Schedule) -> str | None:
    """Return the reason why ``schedule`` cannot run, or ``None``.

    Examples
    --------
    >>> from memsaving_gradients.schedules.schedule import Step
    >>> graph = TrainingGraph.of([(), (0,)], 1, clonable=False)
    >>> problem_of(graph, Schedule((Step(0), Step(1))))
    >>> problem_of(graph, Schedule((Step(0), Step(0, 1), Step(1))))
    'op 0 must not run twice'
    """
    forward, length = graph.first_backward, graph.length
    clonable, producer = graph.clonable.tolist(), graph.producer.tolist()
    copies: dict[int, int] = {}
    for place, (op, copy, reads) in enumerate(schedule.steps):
        if not 0 <= op < length:
            return f"there is no op {op}"
        if place < forward and (op != place or copy):
            return "the forward ops do not come first, in their order"
        if copy:
            if op >= forward:
                return f"op {op} is a backward op and cannot run twice"
            if not clonable[op] and op not in schedule.stored:
                return f"op {op} must not run twice"
            if copy != copies.get(op, -1) + 1:
                return f"copy {copy} of op {op} is out of order"
        elif op in copies:
            return f"op {op} runs twice as the original"
        if copy and op in schedule.stored:
            copies[op] = copy
            continue
        if reads and len(reads) != len(graph.reads[op]):
            return f"op {op} reads {len(graph.reads[op])} values, not {len(reads)}"
        for value, which in zip(graph.reads[op], reads or (0,) * len(graph.reads[op]), strict=True):
            if not 0 <= which <= copies.get(producer[value], -1):
                return f"op {op} reads a value that op {producer[value]} has not made"
        copies[op] = copy
    if len(copies) < length:
        missing = next(op for op in range(length) if op not in copies)
        return f"op {missing} never runs"
    for op, how in schedule.stored.items():
        if how.value not in (graph.writes[op] if 0 <= op < forward else ()):
            return f"op {op} does not compute the stored value {how.value}"
    for op in schedule.chained:
        if op not in graph.sums:
            return (
                f"op {op} is not a sum whose addends may be added as soon as they exist"
                " (accumulate=False leaves all sums to AddN)"
            )
    return None
