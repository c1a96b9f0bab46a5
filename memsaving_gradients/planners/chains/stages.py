"""A training graph as a chain of stages for :mod:`~memsaving_gradients.planners.chains.rotor`.

The forward order is cut at its narrowest positions. The input of a stage is the frontier of the cut
before it: one tensor or several. A backward op belongs to the latest stage that has all that the op
reads, in its input or in itself; in order of execution, stages never rise. The values that a stage
makes and its backward ops read are the stage's *history*.

The costs of each stage are measured on the graph. They are the seconds of the ops that a
recomputation really runs for the next input or for the history, and the bytes while they run. The
bytes of backward, in addition to the history, come from a simulated step that keeps everything. A
stage offers several options: its whole history, and less and less of it. An option first drops the
values that take the least time per byte to recompute. Backward recomputes dropped values inside the
stage when it first reads them, from the stage's input and the values left.

Linear in ops and edges times the number of options, plus the tables of pairs of stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from graph_tools.memory.liveness import timeline
from graph_tools.ops.in_place import taken_over
from memsaving_gradients.planners.chains.frontiers import (
    Segments,
    expensive_storages,
    measure_segments,
)
from memsaving_gradients.planners.chains.rotor import Chain
from memsaving_gradients.planners.chains.stage_cuts import early, narrow, places
from memsaving_gradients.planners.proposal import QUARTERS
from memsaving_gradients.schedules.arrays import FloatArray, IntArray
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.schedule import ordered
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["MOST_STAGES", "Stages", "cut_stages"]


#: The most stages: the dynamic program's work grows with their third power.
MOST_STAGES = 160


@dataclass(frozen=True, eq=False)
class Stages:
    """A chain, and the storages and ops behind its numbers.

    Attributes
    ----------
    chain
        Bytes and seconds of the stages.
    inputs
        For each stage, the storages that a cut before it keeps; one more, empty, for the end.
    histories
        For each stage and option, the storages that it keeps in addition to input and output.
    backward
        For each stage, its backward ops, in order of execution.
    always
        Storages that every plan keeps.
    """

    chain: Chain
    inputs: tuple[tuple[int, ...], ...]
    histories: tuple[tuple[tuple[int, ...], ...], ...]
    backward: tuple[tuple[int, ...], ...]
    always: frozenset[int]


def cut_stages(graph: TrainingGraph, keep: Collection[int] = (), most: int = MOST_STAGES) -> Stages:
    """Cut ``graph`` into at most ``most`` stages, with the storages in ``keep`` kept."""
    segments = measure_segments(graph, keep)
    cuts = narrow(graph, segments, most)
    at = places(graph, segments)
    if more := early(graph, segments, cuts, at):
        segments = measure_segments(graph, {*keep, *more})
    return _Measure(graph, segments, cuts, at).stages()


class _Measure:
    """The measurement of the costs of stages."""

    def __init__(
        self, graph: TrainingGraph, segments: Segments, cuts: IntArray, places: list[int]
    ) -> None:
        self.graph, self.segments = graph, segments
        self.always = segments.small | segments.pinned
        self.size: list[int] = graph.size.tolist()
        self.storage: list[int] = graph.storage.tolist()
        self.producer: list[int] = graph.producer.tolist()
        self.losable: list[bool] = graph.losable.tolist()
        self.forwards: list[bool] = graph.forwards.tolist()
        self.seconds: list[float] = graph.seconds.tolist()
        none = np.zeros(graph.length, np.int64)
        self.workspace = (none if graph.workspace is None else graph.workspace).tolist()
        self.expensive = {
            r for r in expensive_storages(graph) if self.losable[r] and r not in self.always
        }
        self.begin = [-1, *cuts.tolist(), graph.first_backward - 1]
        self.length = len(self.begin) - 1
        self.inputs = [(), *(tuple(segments.frontier(c)) for c in cuts.tolist()), ()]
        self.order = run_order(graph)
        # Backward runs from the last stage to the first: stage k has the backward ops from
        # bounds[k + 1] to bounds[k].
        stage = np.searchsorted(cuts, places)
        self.bounds = (
            graph.first_backward + np.searchsorted(-stage, -np.arange(self.length), side="right")
        ).tolist()
        self.bounds.append(graph.first_backward)
        # Workspaces are added where they are needed.
        self.simulation = simulate(replace(graph, workspace=None), ordered(graph, graph.sums))
        self.beside: list[int] = self._beside().tolist()

    def stages(self) -> Stages:
        """Return the stages, with all costs measured."""
        options = [self._options(s) for s in range(self.length)]
        added, pinned = self._added()
        gradient = self._gradients()
        kept = pinned[None, :] - pinned[:, None]
        runs = [self._run(s) for s in range(self.length)]
        peaks = np.array([peak for _, peak in runs], np.float64)
        count = max(len(o) for o in options)
        table = np.full((6, self.length, count), np.inf)
        for s, row in enumerate(options):
            for o, option in enumerate(row):
                own = pinned[s + 1] - pinned[s]
                table[:, s, o] = (
                    option.saved + own,
                    option.forward_peak,
                    option.backward_peak + own,
                    option.run_history,
                    option.run_last,
                    option.inside,
                )
        chain = Chain(
            added=(added + kept)[:-1, :-1],
            resident=gradient[None, :] + kept[:-1, 1:],
            running=added[:-1, :-1] + peaks[None, :],
            saved=table[0],
            forward_peak=table[1],
            backward_peak=table[2],
            run=np.array([seconds for seconds, _ in runs]),
            run_history=table[3],
            run_last=table[4],
            inside=table[5],
        )
        backward = tuple(
            tuple(self.order[self.bounds[s + 1] : self.bounds[s]]) for s in range(self.length)
        )
        histories = tuple(tuple(o.kept for o in row) for row in options)
        return Stages(chain, tuple(self.inputs), histories, backward, frozenset(self.always))

    def _beside(self) -> IntArray:
        """Return the bytes at every step of a plain run, without the residuals."""
        graph, residual = self.graph, self.graph.residuals
        last = dict.fromkeys(residual, 0)
        for now, op in enumerate(self.order):
            for value in graph.reads[op]:
                if self.storage[value] in residual:
                    last[self.storage[value]] = now
        for value in graph.targets:
            if self.storage[value] in residual:
                last[self.storage[value]] = graph.length - 1
        made = np.array([self.producer[s] for s in residual], np.int64)
        sizes = np.array([self.size[s] for s in residual], np.int64)
        held = timeline(made, np.array(list(last.values()), np.int64), sizes, graph.length)
        return self.simulation.bytes_alive - held

    def _gradients(self) -> FloatArray:
        """Return, for each stage, the bytes that backward has made when it enters the stage."""
        border, length = self.graph.first_backward, self.graph.length
        born, dies, size = self.simulation.buffers
        late = born >= border
        delta = np.zeros(length + 2)
        np.add.at(delta, born[late] + 1, size[late])
        np.add.at(delta, dies[late] + 1, -size[late])
        # Bytes made before a step and needed in it or later.
        carried = np.cumsum(delta)
        return carried[self.bounds[1:]]

    def _added(self) -> tuple[FloatArray, FloatArray]:
        """Return the bytes that the input of stage j takes beyond the input of s, [s, j]; and the
        bytes always kept of the stages before each."""
        count, begin = self.length + 1, np.array(self.begin[:-1], np.int64)
        added = self.segments.added_bytes(begin)
        pinned = np.zeros(count + 1)
        always = np.array(sorted(self.always), np.int64)
        np.add.at(
            pinned, np.searchsorted(begin, self.graph.producer[always]), self.graph.size[always]
        )
        return added, np.cumsum(pinned)[:count]

    def _run(self, s: int) -> tuple[float, int]:
        """Return the seconds and bytes of running stage s once more for its output."""
        ops = self._needed(self.inputs[s + 1], set(self.inputs[s]))
        return self._time(ops), self._peak(ops, self.inputs[s + 1])

    def _needed(self, wanted: Iterable[int], there: Collection[int]) -> list[int]:
        """Return the ops that recompute the storages ``wanted``, in order, if the storages in the
        set ``there`` are present."""
        always, storage, producer = self.always, self.storage, self.producer
        stack = [
            producer[r] for r in wanted if r not in there and r not in always and self.losable[r]
        ]
        if not stack:
            return stack
        reads = self.graph.losable_reads
        found: set[int] = set()
        while stack:
            op = stack.pop()
            if op in found:
                continue
            found.add(op)
            for value in reads[op]:
                root = storage[value]
                # Views always run again, storages only if they are absent.
                if root != value or (root not in there and root not in always):
                    stack.append(producer[value])
        return sorted(found)

    def _time(self, ops: list[int]) -> float:
        return sum(self.seconds[op] for op in ops)

    def _peak(self, ops: list[int], kept: Collection[int]) -> int:
        """Return the most bytes while ``ops`` run, in addition to the bytes before; the storages in
        ``kept`` stay."""
        last: dict[int, int] = {}
        for now, op in enumerate(ops):
            for value in self.graph.reads[op]:
                last[self.storage[value]] = now
        stays = set(kept)
        alive = peak = 0
        made: set[int] = set()
        for now, op in enumerate(ops):
            read = dict.fromkeys(self.storage[v] for v in self.graph.reads[op])
            dying = [r for r in read if r in made and last[r] == now and r not in stays]
            outputs = [v for v in self.graph.writes[op] if self.size[v]]
            alive += sum(self.size[v] for v in outputs)
            free = [self.size[r] for r in dying] if self.forwards[op] else ()
            over = taken_over((self.size[v] for v in outputs), free)
            peak = max(peak, alive - over + self.workspace[op])
            made.update(outputs)
            gone = [*dying, *(v for v in outputs if v not in last and v not in stays)]
            alive -= sum(self.size[r] for r in gone)
            made.difference_update(gone)
        return peak

    def _options(self, s: int) -> list[_Option]:
        """Return the ways to keep the history of stage s, all of it first; none that another way
        beats."""
        history = self._history(s)
        made = self._needed(history, set(self.inputs[s]))
        dear = {v for op in made for v in self.graph.writes[op] if v in self.expensive}
        chosen = dict.fromkeys([history])
        for whole in (history, tuple(sorted(dear.union(history))), tuple(sorted(dear))):
            total = sum(self.size[r] for r in whole)
            there = {*whole, *self.inputs[s]}
            ranked = sorted(whole, key=lambda r: self._dearness(r, there))
            # Drop expensive values last: they must not be recomputed from dropped ones.
            ranked.sort(key=dear.__contains__)
            for share in QUARTERS:
                left, kept = total, list(ranked)
                while kept and left > share * total:
                    left -= self.size[kept.pop(0)]
                chosen[tuple(sorted(kept))] = None
        options: list[_Option] = []
        for option in (self._option(s, kept) for kept in chosen):
            if not any(other.beats(option) for other in options):
                options = [o for o in options if not option.beats(o)] + [option]
        return sorted(options, key=lambda o: (o.inside, o.saved, o.kept))

    def _history(self, s: int) -> tuple[int, ...]:
        """Return the storages that stage s makes and its backward ops read."""
        first, last = self.begin[s], self.begin[s + 1]
        found = {
            self.storage[v]
            for op in self.order[self.bounds[s + 1] : self.bounds[s]]
            for v in self.graph.reads[op]
        }
        return tuple(
            sorted(
                r
                for r in found
                if self.losable[r]
                and r not in self.always
                and first < self.producer[r] <= last
                and self.size[r]
            )
        )

    def _dearness(self, storage: int, there: set[int]) -> tuple[float, int]:
        """Return the seconds per byte to recompute ``storage`` from the rest of ``there``."""
        there.remove(storage)
        again = self._time(self._needed([storage], there))
        there.add(storage)
        return again / self.size[storage], storage

    def _option(self, s: int, kept: tuple[int, ...]) -> _Option:
        """Measure stage s with ``kept`` of its history kept."""
        before = set(self.inputs[s])
        behind = set(self.inputs[s + 1])
        last_run = self._needed(kept, before)
        run = self._needed([*kept, *behind], before)
        saved = {*kept, *behind} - before
        inside, backward_peak = self._backward(s, kept)
        return _Option(
            kept=kept,
            saved=sum(self.size[r] for r in saved),
            forward_peak=self._peak(run, saved),
            backward_peak=backward_peak,
            run_history=self._time(run),
            run_last=self._time(last_run),
            inside=inside,
        )

    def _backward(self, s: int, kept: tuple[int, ...]) -> tuple[float, int]:
        """Return the seconds that backward through s spends on recomputing, and its bytes in
        addition to the input of s and the storages always kept."""
        first, end = self.bounds[s + 1], self.bounds[s]
        last: dict[int, int] = {}
        for now in range(first, end):
            for value in self.graph.reads[self.order[now]]:
                last[self.storage[value]] = now
        dies: dict[int, list[int]] = {}
        alive, inside = 0, 0.0
        there = {*kept, *self.inputs[s]}
        for r in kept:
            alive += self.size[r]
            # Values that only recomputations read stay to the end, at the most.
            dies.setdefault(last.get(r, end - 1), []).append(r)
        peak = 0
        for now in range(first, end):
            op = self.order[now]
            ops = self._needed((self.storage[v] for v in self.graph.reads[op]), there)
            if ops:
                inside += self._time(ops)
                made = [v for o in ops for v in self.graph.writes[o] if self.size[v]]
                later = [v for v in made if last.get(v, -1) >= now and v not in there]
                peak = max(peak, alive + self.beside[now] + self._peak(ops, later))
                for v in later:
                    alive += self.size[v]
                    dies.setdefault(last[v], []).append(v)
                there.update(made)
            peak = max(peak, alive + self.beside[now] + self.workspace[op])
            alive -= sum(self.size[r] for r in dies.pop(now, ()))
        return inside, peak


@dataclass(frozen=True)
class _Option:
    """The part of a stage's history that is kept, and the costs of that."""

    kept: tuple[int, ...]
    saved: int
    forward_peak: int
    backward_peak: int
    run_history: float
    run_last: float
    inside: float

    def beats(self, other: _Option) -> bool:
        """Return whether this option is no worse in anything."""
        return (
            self.saved <= other.saved
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
            and self.run_history <= other.run_history
            and self.run_last <= other.run_last
            and self.inside <= other.inside
        )
