"""A recorder of schedules in which values are dropped and recomputed, any number of times.

A recorder runs the originals in order. Values can be dropped at any time. Just before an op reads
missing values, the recorder recomputes them from the available ones, with all that this needs in
turn. A recomputed value stays available until it is dropped, too. A drop frees nothing, because a
buffer is freed after its last reader in any case. It only forbids later ops to read the copy. Every
planner that recomputes a value more than once writes its schedule with this.

Linear in the steps recorded and their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Recorder", "without_idle"]


class Recorder:
    """A schedule under construction.

    Parameters
    ----------
    graph
        The training graph.
    stored
        For each op whose value is stored, the way: its clones load the value, and need nothing.

    Attributes
    ----------
    steps
        The executions so far.
    copy
        For each value, its available copy: 0 for the original, k for the k-th clone's, -1 for none.
        Values not made yet count as available, because originals come in a valid order.

    Examples
    --------
    A chain of three ops and one backward op, which reads the results of the second and the third.
    The result of the first is kept.

    >>> from memsaving_gradients.schedules.training_graph import TrainingGraph
    >>> graph = TrainingGraph.of(
    ...     [(), (0,), (1,), (1, 2)], 3, clonable=[True, True, True, False])
    >>> recorder = Recorder(graph)
    >>> for op in range(3):
    ...     recorder.run(op)
    >>> recorder.drop(1)
    >>> recorder.run(3)
    >>> recorder.steps[3:]
    [Step(op=1, copy=1, reads=(0,)), Step(op=3, copy=0, reads=(1, 0))]
    """

    def __init__(self, graph: TrainingGraph, stored: Mapping[int, Stored] | None = None) -> None:
        self.graph, self.stored = graph, stored or {}
        self.steps: list[Step] = []
        self.copy = [0] * len(graph.producer)
        self._clones = [0] * graph.length
        self._lost = False
        self._producer: list[int] = graph.producer.tolist()
        self._reads, losable = graph.losable_reads, graph.losable.tolist()
        if self.stored:
            losable = graph.losable_with(self.stored)
            self._reads = graph.reads_among(losable)
        self._views: dict[int, list[int]] = {}
        for value, root in enumerate(graph.storage.tolist()):
            if losable[value]:
                self._views.setdefault(root, []).append(value)

    def run(self, op: int) -> None:
        """Run an original, after recomputing the missing values that it reads."""
        if self._lost:
            self.need(op)
            self._add(op, 0)
        else:
            self.steps.append(Step(op))

    def need(self, op: int) -> None:
        """Recompute the missing values that ``op`` reads."""
        reads, copy, producer = self._reads, self.copy, self._producer
        stack = [op]
        while stack:
            at = stack[-1]
            loads = at != op and at in self.stored
            missing = [] if loads else [producer[v] for v in reads[at] if copy[v] < 0]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if at != op and any(copy[v] < 0 for v in self.graph.writes[at]):
                self._clone_missing(at)

    def make(self, values: Iterable[int]) -> None:
        """Recompute the missing ones of ``values``, and the missing values that they need, in the
        order of the originals."""
        reads, copy, producer = self._reads, self.copy, self._producer
        ops: set[int] = set()
        stack = [producer[v] for v in values if copy[v] < 0]
        while stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            if op not in self.stored:
                stack.extend(producer[v] for v in reads[op] if copy[v] < 0)
        for op in sorted(ops):
            self._clone_missing(op)

    def rerun(self, op: int) -> None:
        """Run a clone, after recomputing the missing values that it reads; ops read its results
        from now on."""
        self.need(op)
        for value in self.graph.writes[op]:
            self.copy[value] = -1
        self._clone_missing(op)

    def drop(self, storage: int) -> None:
        """Let no later op read values in this buffer, except values that cannot be recomputed."""
        for value in self._views.get(storage, ()):
            self.copy[value] = -1
            self._lost = True

    def schedule(self, chained: Iterable[int] = ()) -> Schedule:
        """Return the recorded schedule, without clones that no op reads."""
        schedule = Schedule(tuple(self.steps), frozenset(chained), self.stored)
        return without_idle(self.graph, schedule)

    def _clone_missing(self, op: int) -> None:
        self._clones[op] += 1
        for value in self.graph.writes[op]:
            if self.copy[value] < 0:
                self.copy[value] = self._clones[op]
        self._add(op, self._clones[op])

    def _add(self, op: int, copy: int) -> None:
        if copy and op in self.stored:
            self.steps.append(Step(op, copy))
            return
        there = self.copy
        reads = [there[v] for v in self.graph.reads[op]]
        self.steps.append(Step(op, copy, tuple(reads) if copy or any(reads) else ()))


def without_idle(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """Return ``schedule`` without clones that no op reads, and without values stored for them; the
    remaining copies are renumbered from 1."""
    needed: set[tuple[int, int]] = set()
    producer = graph.producer.tolist()
    left: list[Step] = []
    for step in reversed(schedule.steps):
        op, clone, reads = step
        if clone and (op, clone) not in needed:
            continue
        left.append(step)
        if reads:
            needed.update(
                [(producer[v], k) for v, k in zip(graph.reads[op], reads, strict=True) if k]
            )
    number: dict[tuple[int, int], int] = {}
    made: dict[int, int] = {}
    steps = []
    for step in reversed(left):
        op, clone, reads = step
        if clone or reads:
            again = tuple(
                number[producer[v], k] if k else 0
                for v, k in zip(graph.reads[op], reads, strict=bool(reads))
            )
            if clone:
                made[op] = number[op, clone] = made.get(op, 0) + 1
            step = Step(op, clone and made[op], again)
        steps.append(step)
    stored = {op: how for op, how in schedule.stored.items() if op in made}
    return replace(schedule, steps=tuple(steps), stored=stored)
