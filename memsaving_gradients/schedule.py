"""The common language of planners: which op runs when, and which copy of each input it reads.

A schedule is what a plan comes down to. The special case that most planners make is a *kept set*: a set of storages
that stay, while every other residual is recomputed, once, just before its first backward reader (`recompute_lazily`).
`simulate` gives the bytes alive over any schedule, by the reference counting that TensorFlow's executor does: buffers
are freed at their last use, views cost nothing, and an elementwise op writes into an input that dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_tools.allocator import Buffers, allocated_peak, irregular_peak
from graph_tools.liveness import timeline
from memsaving_gradients.alive import Alive
from memsaving_gradients.needs import after_needs
from memsaving_gradients.stored import Stored
from memsaving_gradients.training_graph import TrainingGraph
from memsaving_gradients.transfers import transfers

__all__ = [
    "SUMMED_AT_ONCE",
    "Schedule",
    "Simulation",
    "Step",
    "ordered",
    "plain",
    "recompute_lazily",
    "simulate",
    "summed_first",
]

#: See `Schedule.lag`.
LAG = 1 / 32
#: Addends of one group in TensorFlow's kernel for sums.
SUMMED_AT_ONCE = 8
#: Steps that are simulated to see into which holes buffers fall: as many as allocate about so many buffers, within bounds.
ALLOCATED, FEWEST_STEPS, MOST_STEPS = 50_000, 8, 10


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
        if not (self.other_orders or self.persistent):
            return allocated_peak(*self.buffers)
        orders = (self.buffers, *self.other_orders)
        steps = min(max(ALLOCATED // max(len(self.buffers[0]), 1), FEWEST_STEPS), MOST_STEPS)
        return irregular_peak(orders, before=self.persistent, steps=steps, replaces=self.replaces)


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
    border = graph.first_backward
    reads, before = graph.losable_reads, graph.postponed_before
    producer = graph.producer.tolist()
    lost = (graph.losable & ~np.isin(graph.storage, list(kept))).tolist()

    # Forward ops stand for their clones.
    def needs(op: int) -> list[int]:
        return [*(producer[v] for v in reads[op] if lost[v]), *before.get(op, ())]

    steps = [Step(op) for op in range(border)]
    for op in after_needs(graph.wanted, needs):
        again = op < border
        copies = again or any(lost[v] for v in reads[op])
        steps.append(
            Step(op, int(again), tuple(int(lost[v]) for v in graph.reads[op]) if copies else ())
        )
    return Schedule(tuple(steps), frozenset(chained))


def simulate(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Bytes alive at every step of ``schedule`` (fed inputs, variables and constants not counted)."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    forwards, seconds = graph.forwards.tolist(), graph.seconds.tolist()
    many = len(storage)
    # The buffer of each copy of each value: value + copy * many. Views have the one of the input that they look at.
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
            # Addends are made by backward ops, which run once.
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
            # Forward ops come first, in their order.
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
            # The first addition writes into the buffer of an addend, if only it still needs that.
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
    return Simulation(alive, int(alive.max(initial=0)), extra, lives, owner)


def summed_first(addends: int) -> int:
    """How many of so many addends TensorFlow's kernel adds before it goes on in whole groups."""
    head = addends % SUMMED_AT_ONCE
    return head if head >= 2 else head + SUMMED_AT_ONCE


def _added_at(addends: Sequence[int], born: Sequence[int]) -> list[int]:
    """For each addend (a buffer), the last step that needs it for the sum: it is added once those before it are there.

    ``born``: the first step of each buffer.
    """
    reached = list(accumulate((born[at] for at in addends), max))
    head = summed_first(len(addends))
    # The first one waits for the second.
    reached[:1] = reached[1:2] or reached[:1]
    for k in range(head, len(addends), SUMMED_AT_ONCE):
        # The first one of each further group becomes the sum of that group.
        reached[k] = reached[min(k + SUMMED_AT_ONCE, len(addends)) - 1]
    return reached
