"""Backward ops that a run of clones need not wait for, so that another thread finishes them
meanwhile.

Clones wait for the backward ops before them: what these read is free by then. But a run of clones
is a line, one op after the other, and where a filter gradient could run beside it, waiting for that
leaves a processor idle. An op whose result no other op of the step reads, a straggler, may run
until the next gate opens, if what it reads and makes has room below the peak all the while. That
gains time in networks of many small ops, whose kernels do not keep all processors busy, and nothing
in plans that are near the peak all the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.schedules.schedule import Schedule
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Stragglers"]


class Stragglers:
    """The state of one pass over the gates of a schedule.

    ``updates``: by the position of a gradient's op, what is done with the gradient.
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

    def waited_for(self, ops: Sequence[int], clone: tuple[int, int]) -> list[int]:
        """What a gate waits for: of ``ops``, the last ones before it, all but stragglers; and the
        stragglers of the gate before.

        ``clone``: the op and the number of the copy that the run behind the gate begins with.
        """
        room = self._room.get(clone, 0)
        late: dict[int, None] = {}
        # Later ones are less likely to be done. The clones wait for one at least.
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


def _room(schedule: Schedule, simulation: Simulation) -> dict[tuple[int, int], int]:
    """For the first clone of each run, the bytes below the peak from then until the next run
    begins."""
    steps = schedule.steps
    begins = [k for k in range(1, len(steps)) if steps[k].copy and not steps[k - 1].copy]
    alive = simulation.bytes_alive
    return {
        steps[begin][:2]: simulation.peak - int(alive[begin:end].max())
        for begin, end in pairwise([*begins, len(steps)])
    }
