"""Turn a training graph into a retention problem, and its decisions into a schedule.

A captured step has thousands of ops, and a plan decides on a few hundred buffers. *Decided* are
forward storages that take memory and that cannot be recomputed, or that backward ops or several
forward ops read. All others are temporaries with one reader, such as the inside of a normalization
or the sum under an activation. A temporary belongs to the recipe of the decided storage that it
leads to; keeping it instead would also split kernels that the runtime fuses. Small graphs decide on
unfused temporaries, too. Tiny storages are always kept.

A forward event ends with an op that makes a decided storage. A backward event ends before the next
op that reads another decided storage; in graphs of few ops every backward op is an event. An event
records the most bytes of everything else alive while it runs. So simulating a decision takes a few
hundred steps. Bytes are too low at most by the difference of in-place writes, and the caller
simulates the schedule on the whole graph in any case. Linear in ops and edges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graph_tools.memory.liveness import timeline
from graph_tools.ops.in_place import taken_over
from memsaving_gradients.planners.chains.frontiers import small_storages
from memsaving_gradients.planners.retention.problem import DROPPED, KEPT, Problem, decide
from memsaving_gradients.planners.retention.simulate import run
from memsaving_gradients.schedules.arrays import IntArray
from memsaving_gradients.schedules.builder import Recorder
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.schedule import Schedule, ordered
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["CORRECTIONS", "Coarse", "coarsen"]

#: The most plans of the coarse graph that are made, each with the budget corrected by the bytes
#: that the last plan was off on the graph itself. Chosen by judgement.
CORRECTIONS = 3

#: In graphs of at most this many ops, backward ops are not joined, since a value dropped within an
#: event is freed only at its end. Graphs of at most this many storages decide on all storages that
#: are not inside of a fused kernel. Chosen by judgement.
FEW = 200


@dataclass(frozen=True, eq=False)
class Coarse:
    """A retention problem and the training graph behind it.

    Attributes
    ----------
    problem
        The problem; value k of it is ``storages[k]``.
    storages
        The decided storages.
    stretches
        For each event, its ops, in order; all together they are ``run_order(graph)``.
    passing
        For each event, the undecided storages that no op of a later event reads.
    """

    graph: TrainingGraph
    problem: Problem
    storages: tuple[int, ...]
    stretches: tuple[tuple[int, ...], ...]
    passing: tuple[tuple[int, ...], ...]
    undecided: frozenset[int]
    chained: frozenset[int]

    def decisions(self, kept: Collection[int]) -> list[int]:
        """Return decisions that keep the storages in ``kept``, and drop all others between their
        last forward and their first backward use."""
        problem, border = self.problem, self.problem.border
        what = problem.plain()
        for value, storage in enumerate(self.storages):
            if problem.recipe[value] < 0:
                continue
            first = problem.first_gap[value]
            uses = problem.uses[value]
            for k, begin in enumerate(uses):
                end = uses[k + 1] if k + 1 < len(uses) else len(problem.reads)
                if begin < border <= end:
                    what[first + k] = KEPT if storage in kept else DROPPED
        return what

    def like(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Return decisions that lead to ``runs``: pairs of a place in ``run_order(graph)`` and an
        op that is run again before it."""
        ends = np.cumsum([len(ops) for ops in self.stretches])
        recipe_of = self._recipe_of
        executions = [
            (int(np.searchsorted(ends, place, side="right")), recipe_of[op])
            for place, op in runs
            if op in recipe_of
        ]
        return decide(self.problem, executions)

    def schedule(self, decisions: Sequence[int]) -> Schedule:
        """Return the schedule of the whole graph that follows ``decisions``."""
        return self.follow(run(self.problem, decisions).again)

    def follow(self, executions: Iterable[tuple[int, int]]) -> Schedule:
        """Return the schedule of the whole graph with ``executions``: pairs of an event and a
        recipe that is run again before it, in order."""
        graph, problem = self.graph, self.problem
        recorder = Recorder(graph)
        storage = graph.storage.tolist()
        again: dict[int, list[int]] = {}
        for event, recipe in executions:
            again.setdefault(event, []).append(recipe)

        def forget(begin: int) -> None:
            # A recomputed temporary is only for the recipe or the event that recomputed it.
            for op, copy, _ in recorder.steps[begin:]:
                if copy:
                    for root in {storage[v] for v in graph.writes[op]} & self.undecided:
                        recorder.drop(root)

        for event, ops in enumerate(self.stretches):
            for recipe in again.get(event, ()):
                done = len(recorder.steps)
                made = [
                    self.storages[value]
                    for value in problem.outputs[recipe]
                    if problem.recipe[value] == recipe
                ]
                for root in made:
                    recorder.drop(root)
                recorder.make(made)
                forget(done)
            done = len(recorder.steps)
            for op in ops:
                recorder.run(op)
            forget(done)
            for root in self.passing[event]:
                recorder.drop(root)
        return recorder.schedule(self.chained)

    def executions(self, schedule: Schedule) -> list[tuple[int, int]]:
        """Return executions for which `follow` makes ``schedule``, or one like it."""
        recipe_of = self._recipe_of
        event_of = {op: event for event, ops in enumerate(self.stretches) for op in ops}
        found: list[tuple[int, int]] = []
        event = len(self.stretches)
        for step in reversed(schedule.steps):
            if not step.copy:
                event = event_of[step.op]
            elif step.op in recipe_of:
                found.append((event, recipe_of[step.op]))
        return found[::-1]

    @cached_property
    def _recipe_of(self) -> dict[int, int]:
        """For each op that makes a decided storage, the number of the recipe."""
        return {
            int(self.graph.producer[self.storages[outputs[0]]]): recipe
            for recipe, outputs in enumerate(self.problem.outputs)
        }

    @property
    def is_exact(self) -> bool:
        """Whether each plan of the graph is a plan of the problem, with the same bytes and time."""
        graph = self.graph
        own = graph.storage == np.arange(len(graph.storage))
        decisive = np.flatnonzero(graph.losable & (graph.size > 0)).tolist()

        def works(op: int) -> bool:
            return bool(graph.reads[op]) or any(graph.size[v] for v in graph.writes[op])

        return (
            bool(own.all())
            and all(sum(map(works, ops)) <= 1 for ops in self.stretches)
            and set(decisive) <= set(self.storages)
            and not (self.undecided or self.chained or graph.forwards.any())
        )


def coarsen(graph: TrainingGraph, keep: Collection[int] = (), accumulate: bool = True) -> Coarse:
    """Return the retention problem of ``graph``, with the storages in ``keep`` kept."""
    chained = frozenset(graph.sums if accumulate else ())
    small = small_storages(graph, keep)
    decided = _decided(graph, small, keep)
    number = {s: k for k, s in enumerate(decided)}
    beside, waiting = _beside(graph, chained, number)
    stretches = _stretches(graph, number, beside)
    reads, writes = [], []
    storage = graph.storage.tolist()
    for ops in stretches:
        made = dict.fromkeys(number[v] for op in ops for v in graph.writes[op] if v in number)
        read = dict.fromkeys(
            number[storage[v]] for op in ops for v in graph.reads[op] if storage[v] in number
        )
        reads.append(tuple(k for k in read if k not in made))
        writes.append(tuple(made))
    ends = np.cumsum([len(ops) for ops in stretches])
    begins = np.concatenate([[0], ends[:-1]])
    undecided = {
        s for s in set(graph.storage[graph.losable].tolist()) if s not in number and s not in small
    }
    recipes = _Recipes(graph, number, undecided, keep)
    problem = Problem(
        reads=reads,
        writes=writes,
        size=graph.size[list(decided)].tolist(),
        recipe=recipes.of,
        inputs=recipes.inputs,
        outputs=recipes.outputs,
        seconds=recipes.seconds,
        scratch=recipes.scratch,
        during=np.maximum.reduceat(beside, begins).tolist(),
        between=waiting[begins].tolist(),
        border=_border(graph, stretches),
    )
    return Coarse(
        graph=graph,
        problem=problem,
        storages=tuple(decided),
        stretches=tuple(map(tuple, stretches)),
        passing=tuple(map(tuple, _passing(graph, stretches, undecided))),
        undecided=frozenset(undecided),
        chained=chained,
    )


def _decided(graph: TrainingGraph, small: Collection[int], keep: Collection[int]) -> list[int]:
    """Return the storages to decide on, in order of creation."""
    storage, source, size = graph.storage.tolist(), graph.source.tolist(), graph.size.tolist()
    losable = graph.losable.tolist()
    readers = [0] * len(storage)
    for op in range(graph.first_backward):
        for root in {storage[v] for v in graph.reads[op]}:
            # A part of a concatenation counts as if it had two readers: keeping the parts keeps
            # every concatenation of them.
            readers[root] += 2 if graph.joins[op] else 1
    residual = graph.residuals
    found, others = [], []
    for op in range(graph.first_backward):
        for value in graph.writes[op]:
            if storage[value] != value or source[value] or not size[value] or value in small:
                continue
            if value in residual or readers[value] > 1 or not losable[value] or value in keep:
                found.append(value)
            elif not graph.fuses[op]:
                others.append(value)
    return sorted([*found, *others]) if len(found) + len(others) <= FEW else found


def _stretches(graph: TrainingGraph, number: dict[int, int], beside: IntArray) -> list[list[int]]:
    """Return the ops of each event.

    A forward event ends with an op that makes a decided storage. A backward event begins with an op
    that reads other decided storages than the last op that read any. It also begins where more is
    alive ``beside`` than in the event so far, so that the storages read before are freed first.
    """
    storage = graph.storage.tolist()
    stretches: list[list[int]] = [[]]
    read: set[int] = set()
    most = 0
    for place, op in enumerate(run_order(graph)):
        if op < graph.first_backward:
            stretches[-1].append(op)
            if any(v in number for v in graph.writes[op]):
                stretches.append([])
            continue
        roots = {storage[v] for v in graph.reads[op] if storage[v] in number}
        first = not stretches[-1] or stretches[-1][0] < graph.first_backward
        alone = graph.length <= FEW
        if first or alone or (roots != read if roots else read and beside[place] > most):
            stretches.append([])
            read, most = roots, 0
        most = max(most, int(beside[place]))
        stretches[-1].append(op)
    return [ops for ops in stretches if ops]


def _border(graph: TrainingGraph, stretches: list[list[int]]) -> int:
    """Return the first event of the backward pass; 0 if the graph has none."""
    if graph.first_backward == graph.length:
        return 0
    backward = (k for k, ops in enumerate(stretches) if ops[0] >= graph.first_backward)
    return next(backward, len(stretches))


def _passing(
    graph: TrainingGraph, stretches: list[list[int]], undecided: Collection[int]
) -> list[list[int]]:
    storage = graph.storage.tolist()
    last: dict[int, int] = {}
    for event, ops in enumerate(stretches):
        for op in ops:
            for value in (*graph.reads[op], *graph.writes[op]):
                if storage[value] in undecided:
                    last[storage[value]] = event
    passing: list[list[int]] = [[] for _ in stretches]
    for root, event in last.items():
        passing[event].append(root)
    return passing


class _Recipes:
    """The recipes that recompute decided storages from other decided storages."""

    def __init__(
        self,
        graph: TrainingGraph,
        number: dict[int, int],
        undecided: Collection[int],
        keep: Collection[int],
    ) -> None:
        self.graph, self.number, self.undecided = graph, number, undecided
        self.of = [-1] * len(number)
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.seconds: list[float] = []
        self.scratch: list[int] = []
        self._storage, self._size = graph.storage.tolist(), graph.size.tolist()
        losable, producer = graph.losable.tolist(), graph.producer.tolist()
        recipe_of: dict[int, int] = {}
        for root, value in number.items():
            op = producer[root]
            if not losable[root] or root in keep:
                continue
            if op not in recipe_of:
                recipe_of[op] = self._add(op, producer)
            self.of[value] = recipe_of[op]

    def _add(self, wanted: int, producer: list[int]) -> int:
        graph, number, storage = self.graph, self.number, self._storage
        found, stack = {wanted}, [wanted]
        inputs: set[int] = set()
        while stack:
            for value in graph.reads[stack.pop()]:
                root, maker = storage[value], producer[value]
                if root in number:
                    inputs.add(number[root])
                elif root in self.undecided and maker not in found:
                    found.add(maker)
                    stack.append(maker)
        ops = sorted(found)
        outputs = tuple(number[v] for v in graph.writes[wanted] if v in number)
        self.inputs.append(tuple(sorted(inputs.difference(outputs))))
        self.outputs.append(outputs)
        self.seconds.append(float(graph.seconds[ops].sum()))
        made = sum(self._size[v] for v in graph.writes[wanted] if v in number)
        self.scratch.append(self._scratch(ops, made))
        return len(self.inputs) - 1

    def _scratch(self, ops: list[int], wanted: int) -> int:
        """Return the most bytes that ``ops`` take in addition to ``wanted`` bytes of results."""
        graph, storage, size = self.graph, self._storage, self._size
        last = {storage[v]: op for op in ops for v in graph.reads[op]}
        alive, most = 0, 0
        mine: set[int] = set()
        for op in ops:
            made = [size[v] for v in graph.writes[op]]
            dying = {
                r for r in (storage[v] for v in graph.reads[op]) if r in mine and last[r] == op
            }
            free = [size[r] for r in dying]
            work = int(graph.workspace[op]) if graph.workspace is not None else 0
            taken = taken_over(made, free) if graph.forwards[op] else 0
            most = max(most, alive + work + sum(made) - taken)
            alive += sum(made) - sum(free)
            mine.update(graph.writes[op])
        return max(0, most - wanted)


def _beside(
    graph: TrainingGraph, chained: frozenset[int], number: dict[int, int]
) -> tuple[IntArray, IntArray]:
    """Return the bytes of undecided buffers in plain training, during each op of the order and just
    before it."""
    simulation = simulate(graph, ordered(graph, chained))
    born, dies, size = simulation.buffers
    decided = np.zeros(len(born), np.bool_)
    decided[: len(simulation.owner)] = np.isin(simulation.owner, list(number))
    until = dies.copy()
    at = {value: k for k, value in enumerate(simulation.owner)}
    for place, op in enumerate(run_order(graph)):
        # An op that writes into a buffer in place also reads it: the buffer is alive until this op,
        # and does not end before it.
        now = int(born[at[graph.writes[op][0]]]) if op in chained else place
        for root in {int(graph.storage[v]) for v in graph.reads[op]} & at.keys():
            if until[at[root]] == now - 1:
                until[at[root]] = now
    lives = timeline(born[decided], until[decided], size[decided], graph.length)
    # A buffer that was born before a step and is alive in it was alive just before it, too.
    waiting = ~decided & (until > born)
    before = timeline(born[waiting] + 1, until[waiting], size[waiting], graph.length)
    return simulation.bytes_alive - lives, before
