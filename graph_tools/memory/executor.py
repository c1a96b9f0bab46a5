"""A simulation of TensorFlow's executor: the order of a finished graph's ops, and the peak.

Planners think in schedules. The executor knows no schedule. When an op ends, the cheap ops (by
kind) that it made ready run next in the same thread. If there are none, the last of the other ready
ops runs next. All others go to a queue, the newest first, from which idle threads steal the oldest.
So backward ops that read only forward values run during the forward pass where nothing holds them.
An unrolled recurrence multiplies all its inputs by their weights before its second step. The
buffers of ops that run at the same time are alive at the same time.

The model follows ``executor.cc``, ``propagator_state.h`` and Eigen's thread pool (TensorFlow 2.16
to 2.21), and uses the estimated time of each op. It simulates the graph as it will run after the
rewrite, with clones, gates and holds, and as grappler leaves it
(:mod:`graph_tools.grappler.optimized`). Outputs are views where kernels make views
(:mod:`graph_tools.ops.views`).

**The allowance for chance.** Chance decides which of several threads is faster, and estimated times
are rough. So a step is simulated several times: with threads of equal speed, with one thread slower
than the others, and with the times of single ops varied at random (from fixed seeds). The model has
as many threads as the process has for ops (`tf.config.threading`), but at least two. One thread
alone has an order of its own. It is as near to the orders of two threads as these are to each other
(measured peaks of five networks: 9 % below to 2 % above the simulated peak of two threads). The
model ignores a thread that stalls for long because its core serves another process. The peak is the
worst of the runs; the first run gives the expected peak (`simulate_execution` returns both). A
large difference means that the order matters and nothing fixes it. Chance also decides which holes
between chunks the buffers take: bytes in chunks are averages
(:func:`graph_tools.memory.bfc_allocator.peaks_in_turn`). A promise adds the share
`graph_tools.memory.timeline.CHANCE`, or takes the worst of many steps if that is more.

O(ops + edges) a run, about 10 µs an op; large graphs are simulated less often.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import tensorflow as tf

from graph_tools.costs import estimates
from graph_tools.graph.capture import OpGraph
from graph_tools.graph.separators import IntArray
from graph_tools.grappler.optimized import optimized
from graph_tools.memory import variables
from graph_tools.memory.liveness import timeline
from graph_tools.memory.regions import first_region
from graph_tools.memory.timeline import CHANCE, MANY_OPS, Timeline
from graph_tools.ops import op_types
from graph_tools.ops.views import viewed_input

__all__ = ["simulate_execution"]

#: For each run, how many times slower the first and the last thread are, and the spread of single
#: ops' times (logarithmic).
RUNS = (
    ((1, 1), 0.0),
    ((1, 4), 0.0),
    ((4, 1), 0.0),
    ((1, 1), 0.5),
    ((1, 1), 0.25),
    ((1, 1), 0.25),
)
#: Share added to `CHANCE` where variables get new buffers, which leaves other holes in every step.
CHANCE_OF_MOVES = 0.03
#: Kernels that the executor runs at once, without asking for a thread. All others count as
#: expensive for about their first twenty runs, until their measured times outweigh the high
#: estimate that they begin with.
CHEAP = op_types.SOURCES | op_types.VIEWS | op_types.SHAPES | {"NoOp"}
#: Seconds that an op of `CHEAP` takes to pass a buffer on. Chosen by judgement.
PASSING = 1e-7


@dataclass(frozen=True, eq=False)
class _Work:
    """The ops as the executor sees them.

    For each op: ``before``, the ops that it waits for; ``after``, the ops that wait for it;
    ``reads`` and ``writes``, values, and ``touches``, their storages; ``there``, whether it ran or
    was folded before the step; ``workspace``, bytes that it takes in addition to its outputs. For
    each value: ``storage`` and ``size`` as in `TrainingGraph`. ``variables``: the updated ones.
    ``persistent``: bytes of each buffer from before the step.
    """

    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    touches: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    storage: Sequence[int]
    size: Sequence[int]
    there: Sequence[bool]
    seconds: Sequence[float]
    cheap: Sequence[bool]
    forwards: Sequence[bool]
    workspace: Sequence[int]
    held: Sequence[int]
    variables: Sequence[variables.Updated]
    persistent: Mapping[object, int]


def simulate_execution(
    ops: OpGraph, *, batch: int, held: Sequence[int] = ()
) -> tuple[Timeline, Timeline]:
    """Return the bytes alive while the executor runs a graph, in the worst order considered.

    Parameters
    ----------
    ops
        The graph of a training step that will not be changed any more.
    batch
        The size to assume for an unknown batch dimension.
    held
        Values that live to the end of the step.

    Returns
    -------
    tuple
        The worst run, and the one with threads of equal speed.
    """
    work = _work(ops, batch, held)
    runs: list[Timeline] = []
    many = len(work.reads)
    # All runs together execute no more ops than the runs of a graph of `MANY_OPS` ops.
    affordable = max(1, len(RUNS) * MANY_OPS // max(many, 1))
    # Ops that ran before the step take no place in it.
    begins = min(sum(work.there), many - 1)
    between = [1] * (_threads() - 2)
    for seed, ((first, last), spread) in enumerate(RUNS[:affordable]):
        noise = np.exp(spread * np.random.default_rng(seed).standard_normal(many))
        times = (np.array(work.seconds) * noise).tolist()
        order, until = _run(replace(work, seconds=times), [first, *between, last])
        born, dies, size, into, owner = _lives(work, order, until)
        lives = (born - begins, dies - begins, size)
        alive = timeline(*lives, many - begins)
        peak = int(alive.max(initial=0))
        runs.append(Timeline(alive, peak, lives, owner, replaces=(into,)))
    worst = max(runs, key=lambda run: run.peak)
    others = [run for run in runs if run is not worst]
    replaces = tuple(run.replaces[0] for run in (worst, *others))
    moves = any((into >= 0).any() for into in replaces)
    worst = replace(
        worst,
        other_orders=tuple(run.buffers for run in others),
        persistent=tuple(work.persistent.values()),
        replaces=replaces if moves else (),
        first_region=first_region(),
        margin=CHANCE + CHANCE_OF_MOVES if moves else CHANCE,
    )
    return worst, runs[0]


def _threads() -> int:
    given = tf.config.threading.get_inter_op_parallelism_threads()
    return max(given or os.cpu_count() or 2, 2)


def _work(ops: OpGraph, batch: int, held: Sequence[int]) -> _Work:
    left = optimized(ops, held)
    same, one, reads = left.same, left.one, list(left.reads)
    storage, source = [one.get(root, root) for root in _storages(ops)], ops.source.tolist()
    sizes, copied = ops.value_bytes(batch).tolist(), variables.copied_on_read(ops)
    for value, size in variables.copies_read(ops, batch, copied):
        source[value], sizes[value] = False, size
    producer = ops.producer.tolist()
    bounds = [*ops.first_value.tolist(), len(producer)]
    silent = left.gone | left.bypassed
    writes = [range(bounds[i], bounds[i + (i not in silent)]) for i in range(len(ops.ops))]
    waits: list[dict[int, None]] = []
    there: list[bool] = []
    for i, op in enumerate(ops.ops):
        if i in left.gone or op_types.reads_known_shapes(op):
            reads[i] = []
        controls = () if i in same else (same.get(other, other) for other in ops.controls[i])
        waits.append(dict.fromkeys((*(producer[v] for v in reads[i]), *controls)))
        # A product that grappler regrouped may come before the ops that it reads.
        ready = all(other < i and there[other] for other in waits[i])
        # An op that has an effect and no results is never folded.
        ready &= bool(op.outputs) or not op_types.is_stateful(op)
        there.append(ready and all(source[storage[v]] for v in writes[i]))
        if op_types.reads_shapes(op):
            reads[i] = []
    before = [[other for other in found if not there[other]] for found in waits]
    after: list[list[int]] = [[] for _ in before]
    for i, waits_for in enumerate(before):
        for other in waits_for:
            after[other].append(i)
    touches = [
        tuple({storage[v] for v in (*read, *made)})
        for read, made in zip(reads, writes, strict=True)
    ]
    persistent = variables.persistent_bytes(ops, batch, copied) | variables.constant_bytes(
        ops, there, one, batch
    )
    runs = ops.here.copy()
    runs[list(left.gone)] = False
    # Folded ops run before the step.
    runs &= ~np.array(there, np.bool_)
    return _Work(
        before=before,
        after=after,
        touches=touches,
        reads=reads,
        writes=writes,
        storage=storage,
        size=[size if storage[v] == v else 0 for v, size in enumerate(sizes)],
        there=there,
        seconds=estimates.op_seconds(ops, batch).tolist(),
        # Ops on other devices ask for no thread here.
        cheap=[op.type in CHEAP or not here for op, here in zip(ops.ops, ops.here, strict=True)],
        forwards=[op.type in op_types.FORWARDING for op in ops.ops],
        workspace=np.where(runs, estimates.op_workspace(ops, batch, held), 0).tolist(),
        held=held,
        variables=variables.updated_variables(ops, reads, storage, persistent, copied),
        persistent=persistent,
    )


def _storages(ops: OpGraph) -> list[int]:
    """Return, for each value, the value whose buffer it uses: as captured, except that backward ops
    may make views of forward buffers."""
    storage, first = ops.storage.tolist(), ops.first_value.tolist()
    producer = ops.producer.tolist()
    for value, root in enumerate(ops.storage.tolist()):
        # Views have higher numbers than the values that they view.
        storage[value] = storage[root]
        i = producer[value]
        op = ops.ops[i]
        if storage[value] == value and op.type in op_types.MAY_VIEW and ops.inputs[i]:
            viewed = viewed_input(op, value - first[i])
            if viewed is not None:
                storage[value] = storage[ops.inputs[i][viewed]]
    return storage


class _Ready:
    """The ops that may start.

    Attributes
    ----------
    inline
        For each thread, the ops that it runs next, one after the other.
    queues
        For each thread, the ops that it runs after those, unless another thread steals them.
    queued
        The number of ops in the queues.
    """

    def __init__(self, roots: Iterable[int], threads: int) -> None:
        self.inline: list[deque[int]] = [deque() for _ in range(threads)]
        self.queues: list[deque[int]] = [deque() for _ in range(threads)]
        self.queued = 0
        for op in roots:
            self.queues[self.queued % threads].append(op)
            self.queued += 1

    def take(self, thread: int) -> int | None:
        """Remove and return the next op for a thread; ``None``: there is none."""
        if self.inline[thread]:
            return self.inline[thread].popleft()
        if not self.queued:
            return None
        self.queued -= 1
        if self.queues[thread]:
            return self.queues[thread].popleft()
        after = (self.queues[(thread + k) % len(self.queues)] for k in range(1, len(self.queues)))
        return next(theirs for theirs in after if theirs).pop()

    def add(self, thread: int, ops: Sequence[int], cheap: Sequence[bool]) -> None:
        """Add the ops that became ready when an op of a thread ended."""
        last = None
        for op in ops:
            if cheap[op]:
                self.inline[thread].append(op)
                continue
            if last is not None:
                self._queue(thread, last)
            last = op
        if last is not None:
            if self.inline[thread]:
                self._queue(thread, last)
            else:
                self.inline[thread].append(last)

    def _queue(self, thread: int, op: int) -> None:
        self.queues[thread].appendleft(op)
        self.queued += 1


def _run(work: _Work, slowness: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the ops in the order of their starts; and for each op, the last place in that order
    that begins before the op ends.

    ``slowness``: for each thread, how many times longer it takes.
    """
    many, threads = len(work.reads), len(slowness)
    missing, after = [len(ops) for ops in work.before], work.after
    cheap, seconds = work.cheap, work.seconds
    order = [op for op in range(many) if work.there[op]]
    until = [0] * many
    for place, op in enumerate(order):
        until[op] = place
    roots = (op for op in range(many) if not missing[op] and not work.there[op])
    ready = _Ready(roots, threads)
    running: list[tuple[float, int, int, int]] = []
    idle = set(range(threads))
    now = 0.0

    def begin(thread: int) -> None:
        op = ready.take(thread)
        if op is None:
            idle.add(thread)
            return
        idle.discard(thread)
        order.append(op)
        takes = PASSING if cheap[op] else seconds[op] + estimates.START_SECONDS
        heappush(running, (now + takes * slowness[thread], len(order), thread, op))

    for thread in range(threads):
        begin(thread)
    while running:
        now, _, thread, op = heappop(running)
        until[op] = len(order) - 1
        freed = []
        for reader in after[op]:
            missing[reader] -= 1
            if not missing[reader]:
                freed.append(reader)
        ready.add(thread, freed, cheap)
        begin(thread)
        for other in sorted(idle) if ready.queued else ():
            if not ready.queued:
                break
            begin(other)
    return order, until


def _let_go(
    work: _Work, start: Sequence[int], until: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return, for each buffer, the op that releases it last, when, and when the last but one does.

    ``start``: the place of each op in the order; ``until``: as `_run` returns it.
    """
    many = len(work.storage)
    holder, dies, others = [-1] * many, [-1] * many, [-1] * many
    for op, end in enumerate(until):
        for root in work.touches[op]:
            if end > dies[root] or (end == dies[root] and start[op] > start[holder[root]]):
                holder[root], dies[root], others[root] = op, end, dies[root]
            elif end > others[root]:
                others[root] = end
    for value in work.held:
        dies[work.storage[value]] = others[work.storage[value]] = len(start) - 1
    return holder, dies, others


def _lives(
    work: _Work, order: list[int], until: list[int]
) -> tuple[IntArray, IntArray, IntArray, IntArray, list[int]]:
    """Return each buffer's first place, last place and bytes; the number of the persistent buffer
    that it replaces when its life ends (or -1); and the values that the buffers are of.

    The last buffers are copies of variables and workspace: they have no value.
    """
    storage, size = work.storage, work.size
    start = [0] * len(order)
    for place, op in enumerate(order):
        start[op] = place
    holder, dies, others = _let_go(work, start, until)
    copies: list[tuple[int, int, int, int]] = []
    into: dict[int, int] = {}
    for variable in work.variables:
        before = -1
        for op, root in sorted(variable.updates, key=lambda update: start[update[0]]):
            if variable.copied:
                copies.append((start[op], until[op], variable.size, variable.number))
                continue
            # Reads since the last update hold the old buffer until their users end.
            read_until = max(
                (
                    until[user]
                    for read, users in variable.reads
                    if before < start[read] < start[op]
                    for user in users
                ),
                default=-1,
            )
            before = start[op]
            if root < 0 and read_until > start[op]:
                copies.append((start[op], read_until, variable.size, variable.number))
            elif root >= 0 and dies[root] >= start[op]:
                # The buffer is the variable's from now on, and replaces the old one.
                holder[root], dies[root] = op, min(dies[root], max(until[op], read_until))
                into[root] = variable.number
    born = [-1] * len(storage)
    for op in order:
        taken: set[int] = set()
        for value in work.writes[op]:
            if not size[value]:
                continue
            born[value] = start[op]
            if not work.forwards[op]:
                continue
            for root in dict.fromkeys(storage[v] for v in work.reads[op]):
                if (
                    holder[root] == op
                    and size[root] == size[value]
                    and others[root] < start[op]
                    and 0 <= born[root] < start[op]
                    and root not in taken
                ):
                    # The output takes over the buffer of an input that no other op still holds.
                    dies[root] = start[op] - 1
                    taken.add(root)
                    break
    made = [value for value, place in enumerate(born) if place >= 0]
    scratch = [(start[op], until[op], work.workspace[op], -1) for op in order if work.workspace[op]]
    lives = [(born[v], dies[v], size[v], into.get(v, -1)) for v in made] + copies + scratch
    found = np.array(lives, np.int64).reshape(-1, 4)
    return found[:, 0].copy(), found[:, 1].copy(), found[:, 2].copy(), found[:, 3].copy(), made
