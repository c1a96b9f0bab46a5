"""Backward ops that a run of clones need not wait for, so that another thread finishes them
meanwhile.

Clones wait for the backward ops before them, so that the inputs of these are free by then. But a
run of clones is a line, one op after the other. If it waits for a filter gradient that could run at
the same time, a processor is idle. A straggler is an op whose result no other op of the step reads.
It may run until the next gate opens, if its inputs and outputs fit below the peak all the while.
That saves time in networks of many small ops, whose kernels do not keep all processors busy. It
saves nothing in plans that are near the peak all the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.schedules.schedule import Schedule
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Stragglers"]


class Stragglers:
    """The state of one pass over the gates of a schedule.

    ``updates``: by the position of a gradient's op, the use of the gradient.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        schedule: Schedule,
        simulation: Simulation,
        updates: Mapping[int, Update],
    ) -> None:
        self.graph, self.updates = graph, updates
        self._read = {v for values in graph.reads for v in values}
        self._room = _room(schedule, simulation)
        self._left: list[int] = []

    def waited_for(self, ops: Sequence[int], clone: Key) -> list[int]:
        """Return the ops that a gate waits for: ``ops``, the last ones before it, except for
        stragglers; and the stragglers of the gate before.

        ``clone``: the op and the copy's number of the clone that begins the run behind the gate.
        """
        room = self._room.get(clone, 0)
        late: dict[int, None] = {}
        # Later ops are less likely to have run. The clones wait for at least one.
        for op in reversed(ops[1:]):
            taken = self._bytes(op)
            if self._is_leaf(op) and taken <= room:
                room -= taken
                late[op] = None
        now = [*self._left, *(op for op in ops if op not in late)]
        self._left = list(late)
        return now

    def _is_leaf(self, op: int) -> bool:
        late = op >= self.graph.first_backward
        return late and self._read.isdisjoint(self.graph.writes[op])

    def _bytes(self, op: int) -> int:
        graph = self.graph
        touched = {int(graph.storage[v]) for v in (*graph.reads[op], *graph.writes[op])}
        update = self.updates.get(op)
        return max(sum(int(graph.size[v]) for v in touched), update.takes if update else 0)


def _room(schedule: Schedule, simulation: Simulation) -> dict[Key, int]:
    """Return, for the first clone of each run, the bytes that are free below the peak from then
    until the next run begins."""
    steps = schedule.steps
    begins = [k for k in range(1, len(steps)) if steps[k].copy and not steps[k - 1].copy]
    alive = simulation.bytes_alive
    return {
        steps[begin][:2]: simulation.peak - int(alive[begin:end].max())
        for begin, end in pairwise([*begins, len(steps)])
    }
