"""The common language of planners: which op runs when, and which copy of each input it reads.

A schedule is what a plan comes down to. The special case that most planners make is a *kept set*: a set of storages
that stay, while every other residual is recomputed, once, just before its first backward reader (`recompute_lazily`).
`simulate` gives the bytes alive over any schedule, by the reference counting that TensorFlow's executor does: buffers
are freed at their last use, views cost nothing, and an elementwise op writes into an input that dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_tools.memory.bfc_allocator import Buffers, Peaks, allocated_peak, irregular_peaks
from graph_tools.memory.liveness import timeline
from graph_tools.memory.peak_tensors import Alive
from memsaving_gradients.lifetimes import Lives, Runs, lifetimes, runs_lazily, runs_of
from memsaving_gradients.stored import Stored
from memsaving_gradients.training_graph import TrainingGraph
from memsaving_gradients.transfers import transfers

__all__ = [
    "Schedule",
    "Simulation",
    "Step",
    "as_schedule",
    "ordered",
    "plain",
    "recompute_lazily",
    "simulate",
    "simulate_runs",
]

#: See `Schedule.lag`.
LAG = 1 / 32
#: Steps that are simulated to see into which holes buffers fall: as many as allocate about so many buffers, within bounds; …
ALLOCATED, FEWEST_STEPS, MOST_STEPS = 50_000, 6, 8
#: … each in so many arenas, if they have fewer buffers than this.
ARENAS, FEW_BUFFERS = 3, 20_000


class Step(NamedTuple):
    """One execution of an op.

    ``copy`` is 0 for the original and k for its k-th clone; ``reads`` gives, for each value that the op reads,
    which copy of it, by the number of the execution of the op that made it (empty: the originals). A clone of an op whose
    value is stored runs nothing: it loads the value.
    """

    op: int
    copy: int = 0
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A sequence of op executions in which every value is made before it is read.

    Attributes
    ----------
    steps
        The executions, in order.
    chained
        Sums (ops) that add their addends one by one as they come.
    stored
        For ops whose value is stored when it is made, how. All their clones are loads.
    lag
        The share of all bytes of the forward pass that may be written before what was made is stored.
    """

    steps: tuple[Step, ...]
    chained: frozenset[int] = frozenset()
    stored: Mapping[int, Stored] = field(default_factory=dict)
    lag: float = LAG

    @property
    def moves(self) -> bool:
        """Whether anything is stored on another device."""
        return any(how.moving_seconds for how in self.stored.values())

    @property
    def clones(self) -> int:
        """How many executions are recomputations."""
        return sum(1 for step in self.steps if step.copy and step.op not in self.stored)


@dataclass(frozen=True, eq=False)
class Simulation:
    """Bytes alive at every step of a schedule, and the time that its recomputations take.

    Attributes
    ----------
    bytes_alive
        Bytes during each step.
    peak
        The most of them: the simulated transient peak.
    extra_seconds
        Estimated time of the clones, of storing and loading, and of waiting for transfers.
    buffers
        First step, last step and bytes of every buffer, workspace included.
    owner
        For each buffer, the value that it was made for; workspace, at the end, has none.
    other_orders
        Buffers for other orders that the ops may run in.
    persistent
        Bytes of variables and fed inputs, which are there before the step: they decide what holes buffers fall into.
    replaces
        For these buffers and those of other orders, which of the persistent ones each takes the place of (-1: of none).
    margin
        Share of its chunks by which a step may need more, for chance.
    largest
        The largest buffers at the peak, by name, where they were looked up.
    """

    bytes_alive: npt.NDArray[np.int64]
    peak: int
    extra_seconds: float
    buffers: Buffers
    owner: list[int] = field(default_factory=list)
    other_orders: tuple[Buffers, ...] = ()
    persistent: tuple[int, ...] = ()
    replaces: tuple[npt.NDArray[np.int64], ...] = ()
    margin: float = 0.0
    largest: tuple[Alive, ...] = ()

    @cached_property
    def allocated_least(self) -> int:
        """The peak in chunks if the allocator has no past, in the order in which this one is least."""
        return min(allocated_peak(*order) for order in (self.buffers, *self.other_orders))

    @cached_property
    def allocated_peak(self) -> int:
        """The peak in chunks of TensorFlow's allocator, which are larger than the buffers in them.

        A schedule is one order, step after step. A step that was played is several, and small things are irregular: what may be
        needed is more than this, by `margin`.
        """
        return self._peaks.average

    @property
    def allocated_worst(self) -> int:
        """The peak in chunks in the worst of the steps that were simulated."""
        return self._peaks.worst

    @cached_property
    def _peaks(self) -> Peaks:
        if not (self.other_orders or self.persistent):
            peak = allocated_peak(*self.buffers)
            return Peaks(peak, peak)
        orders = (self.buffers, *self.other_orders)
        many = len(self.buffers[0])
        return irregular_peaks(
            orders,
            before=self.persistent,
            steps=min(max(ALLOCATED // max(many, 1), FEWEST_STEPS), MOST_STEPS),
            arenas=ARENAS if many < FEW_BUFFERS else 1,
            replaces=self.replaces,
        )


def plain(graph: TrainingGraph, chained: Iterable[int] = ()) -> Schedule:
    """Every op once, in the order of the graph."""
    return Schedule(tuple(Step(op) for op in range(graph.length)), frozenset(chained))


def ordered(graph: TrainingGraph, chained: Iterable[int] = ()) -> Schedule:
    """Every op once, in the order in which plans run the originals: `plain`, with postponable ops when they are due."""
    return Schedule(tuple(Step(op) for op in graph.order), frozenset(chained))


def recompute_lazily(graph: TrainingGraph, kept: set[int], chained: Iterable[int] = ()) -> Schedule:
    """Keep the storages in ``kept``; recompute what else the backward ops read, once, as late as possible.

    Storages whose op must not be copied are kept as well, whether named or not. Backward ops that can be postponed
    run as late as possible, too.
    """
    return as_schedule(graph, runs_lazily(graph, kept), chained)


def as_schedule(graph: TrainingGraph, runs: Runs, chained: Iterable[int] = ()) -> Schedule:
    """The schedule in which nothing is stored and ops run as in ``runs``."""
    picks = runs.picks.tolist()
    steps = []
    at = 0
    for op, copy in zip(runs.ops.tolist(), runs.copies.tolist(), strict=True):
        picked = tuple(picks[at : (at := at + len(graph.reads[op]))])
        steps.append(Step(op, copy, picked if copy or any(picked) else ()))
    return Schedule(tuple(steps), frozenset(chained))


def simulate(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Bytes alive at every step of ``schedule`` (fed inputs, variables and constants not counted)."""
    stream = transfers(graph, schedule) if schedule.moves else None
    moved = {} if stream is None else stream.out_until
    runs = runs_of(graph, schedule.steps)
    return _simulation(
        graph,
        runs,
        lifetimes(graph, runs, schedule.chained, schedule.stored, moved),
        schedule.stored,
        0.0 if stream is None else stream.stalled,
    )


def simulate_runs(graph: TrainingGraph, runs: Runs, chained: Iterable[int] = ()) -> Simulation:
    """As `simulate`, where nothing is stored."""
    return _simulation(graph, runs, lifetimes(graph, runs, frozenset(chained)))


def _simulation(
    graph: TrainingGraph,
    runs: Runs,
    lives: Lives,
    stored: Mapping[int, Stored] | None = None,
    stalled: float = 0.0,
) -> Simulation:
    stored = stored or {}
    again = runs.copies > 0
    seconds = graph.seconds[runs.ops] * again
    loads = np.zeros(len(runs.ops), np.bool_)
    if stored:
        loads = again & np.isin(runs.ops, list(stored))
        seconds[loads] = [stored[op].load_seconds for op in runs.ops[loads].tolist()]
    # One after the other, so that rounding does not depend on how many there are.
    extra = float(seconds.cumsum()[-1]) if len(seconds) else 0.0
    extra += stalled
    for op in dict.fromkeys(runs.ops[loads].tolist()):
        extra += stored[op].store_seconds
    born, dies, sizes, owner = lives
    if graph.workspace is not None:
        scratch = graph.workspace[runs.ops]
        scratch[loads] = 0
        during = np.flatnonzero(scratch)
        born, dies = np.concatenate([born, during]), np.concatenate([dies, during])
        sizes = np.concatenate([sizes, scratch[during]])
    alive = timeline(born, dies, sizes, len(runs.ops))
    buffers = (born, dies, sizes)
    return Simulation(alive, int(alive.max(initial=0)), extra, buffers, owner.tolist())
