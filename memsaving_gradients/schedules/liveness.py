"""The lifetimes of all buffers of a schedule, computed at once.

The executions of a schedule are arrays here (`Runs`), and so are the resulting lifetimes. A buffer
is born with the execution that makes it, and dies with the last one that reads it, directly or
through views. Planners simulate one graph hundreds of times; a graph of a hundred thousand ops
takes a second step by step, and 30 ms in arrays. The cost is linear in the reads, except for views
of views, where it grows with the logarithm of the length of their chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from memsaving_gradients.schedules.arrays import BoolArray, IntArray
from memsaving_gradients.schedules.order import deferrable, deferrable_before, requested
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["SUMMED_AT_ONCE", "Lives", "Runs", "lifetimes", "runs_lazily", "runs_of", "summed_first"]

#: Fact: addends of one group in TensorFlow's kernel for sums (``aggregate_ops.cc``).
SUMMED_AT_ONCE = 8


class Runs(NamedTuple):
    """Executions of ops, in order.

    Attributes
    ----------
    ops, copies
        For each execution, its op, and the number of its copy: 0 is the original.
    picks
        For each value that each execution reads, one after the other, the number of its copy.
    """

    ops: IntArray
    copies: IntArray
    picks: IntArray


class _Rows:
    """Tuples of unequal length, one for each op, in one array."""

    def __init__(self, rows: Sequence[tuple[int, ...]]) -> None:
        self.counts = np.fromiter(map(len, rows), np.int64, len(rows))
        self.starts = np.concatenate([[0], self.counts.cumsum()])
        self.items = np.fromiter(chain.from_iterable(rows), np.int64, int(self.starts[-1]))

    def places(self, ops: IntArray) -> IntArray:
        """Return the positions in ``items`` of the rows of ``ops``, one after the other."""
        return _ranges(self.starts[:-1][ops], self.counts[ops])


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return ``counts`` whole numbers from each start on, one range after the other."""
    skipped = starts - (counts.cumsum() - counts)
    found: IntArray = np.repeat(skipped, counts)
    found += np.arange(len(found))
    return found


class _Arrays:
    """The reads and writes of a graph's ops, and its views, as arrays."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.reads, self.writes = _Rows(graph.reads), _Rows(graph.writes)
        self.reader = np.repeat(np.arange(graph.length), self.reads.counts)
        self.is_view = (graph.size == 0) & (graph.storage != np.arange(len(graph.storage)))
        # For each view, the position of the viewed value among the reads of its op.
        self.slot = np.full(len(graph.storage), -1)
        storage = graph.storage.tolist()
        for value in np.flatnonzero(self.is_view).tolist():
            for k, seen in enumerate(graph.reads[int(graph.producer[value])]):
                if storage[seen] == storage[value]:
                    self.slot[value] = k
                    break

    @staticmethod
    def of(graph: TrainingGraph) -> _Arrays:
        return graph.derived(_Arrays)


class _Wanted:
    """The backward ops in the order of requests, and which of them are or need deferrable ops."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.ops = np.array(requested(graph), np.int64)
        self.before = deferrable_before(graph)
        self.watched = np.zeros(graph.length, np.bool_)
        self.watched[[*self.before, *deferrable(graph)]] = True


def runs_of(graph: TrainingGraph, steps: Sequence[tuple[int, int, tuple[int, ...]]]) -> Runs:
    """Return ``steps`` as arrays; each step is an op, the number of its copy, and the copies that
    it reads (empty: originals)."""
    ops = np.fromiter((op for op, _, _ in steps), np.int64, len(steps))
    copies = np.fromiter((copy for _, copy, _ in steps), np.int64, len(steps))
    counts = _Arrays.of(graph).reads.counts[ops]
    picks = np.zeros(int(counts.sum()), np.int64)
    said = np.fromiter((bool(reads) for _, _, reads in steps), np.bool_, len(steps))
    picks[np.repeat(said, counts)] = list(
        chain.from_iterable(
            reads[:many] for (_, _, reads), many in zip(steps, counts.tolist(), strict=True)
        )
    )
    return Runs(ops, copies, picks)


def runs_lazily(graph: TrainingGraph, kept: Collection[int]) -> Runs:
    """Return every forward op, then the backward ops, each after the clones that recompute the
    values it reads outside of ``kept``, once and as late as possible."""
    arrays, wanted = _Arrays.of(graph), graph.derived(_Wanted)
    lost = graph.losable & ~np.isin(graph.storage, list(kept))
    reads = arrays.reads
    again = lost[reads.items]
    asks = wanted.watched.copy()
    asks[arrays.reader[again]] = True
    makers = graph.producer[reads.items[again]].tolist()
    begins = np.concatenate([[0], again.cumsum()])[reads.starts].tolist()
    order = _after_needs(wanted, asks[wanted.ops], makers, begins)
    border = graph.first_backward
    later = np.array(order, np.int64)
    ops = np.concatenate([np.arange(border), later])
    copies = np.concatenate([np.zeros(border, np.int64), later < border])
    first = int(reads.starts[border])
    picks = np.concatenate([np.zeros(first, np.int64), lost[reads.items[reads.places(later)]]])
    return Runs(ops, copies, picks)


def _after_needs(
    wanted: _Wanted, asks: BoolArray, makers: list[int], begins: list[int]
) -> list[int]:
    """Order ops as `memsaving_gradients.schedules.dependency_order.after_needs` does; an op needs
    the makers of the dropped values that it reads.

    ``asks``: the wanted ops to examine; the ops between them run in their order. ``makers``: for
    all ops, one after the other, the ops that they need; ``begins``: where the needs of each begin.
    """
    before = wanted.before
    ops = wanted.ops.tolist()
    order: list[int] = []
    done = bytearray(len(begins))
    so_far = 0
    for place in np.flatnonzero(asks).tolist():
        order += ops[so_far:place]
        so_far = place + 1
        stack = [ops[place]]
        while stack:
            op = stack.pop()
            if op < 0:
                # All of its needs have run.
                op = ~op
            elif done[op]:
                continue
            else:
                needs = makers[begins[op] : begins[op + 1]]
                if op in before:
                    needs += before[op]
                if needs := [need for need in needs if not done[need]]:
                    needs.reverse()
                    stack.append(~op)
                    stack += needs
                    continue
            done[op] = True
            order.append(op)
    return order + ops[so_far:]


class Lives(NamedTuple):
    """The buffers of a schedule, in the order in which they are made.

    Attributes
    ----------
    born, dies
        The first and the last execution during which each exists.
    sizes
        Bytes.
    owner
        The value that each was made for.
    """

    born: IntArray
    dies: IntArray
    sizes: IntArray
    owner: IntArray


def lifetimes(
    graph: TrainingGraph,
    runs: Runs,
    chained: Collection[int] = (),
    stored: Mapping[int, Stored] | None = None,
    moved: Mapping[int, int] | None = None,
) -> Lives:
    """Return the buffers of ``runs``, without scratch space.

    ``chained``: sums (ops) that add their addends one by one as they become available. ``stored``:
    for each op whose value is stored, the way; its copies are loads. ``moved``: for ops whose value
    is moved, the execution until which the original stays because of that.
    """
    stored = stored or {}
    ops = runs.ops
    is_sum = _marked(graph, chained)[ops]
    is_load = _marked(graph, stored)[ops] & (runs.copies > 0)
    computes = ~(is_sum | is_load)
    made = _make(graph, runs, is_sum, is_load, stored)
    read_from, read = _see_through_views(graph, runs, computes, made)
    buffer, sizes = made.buffer, graph.size[made.owner]
    born, dies = made.at.copy(), made.at.copy()

    reader = np.repeat(np.arange(len(ops)), np.diff(read_from))
    at = buffer[read]
    at[~computes[reader]] = -1
    # If several executions read one buffer, the last assignment remains.
    dies[at[at >= 0]] = reader[at >= 0]

    added_at, totals = _sum_up(graph, runs, is_sum, buffer, born, dies)
    for op, until in (moved or {}).items():
        moving = buffer[stored[op].value]
        dies[moving] = max(dies[moving], until)
    held = buffer[list(graph.targets)]
    dies[held[held >= 0]] = len(ops) - 1
    for total, first_two in totals:
        for addend in first_two:
            # The first addition writes into an addend's buffer, if nothing else still needs that.
            begins = born[total]
            if dies[addend] == begins and born[addend] < begins and sizes[addend] == sizes[total]:
                dies[addend] = begins - 1
                break
    lives = Lives(born, dies, sizes, made.owner)
    may = np.flatnonzero(graph.forwards[ops[made.at]] & computes[made.at])
    _pass_on(may, made.at[may], read_from, at, lives, added_at)
    return _with_stored(lives, ops, is_load, stored)


class _Made(NamedTuple):
    """The values and buffers that executions make.

    Attributes
    ----------
    written, by
        The values that they write, one execution after the other, and the execution of each.
    buffer
        For each copy of each value, the number of its buffer (-1: none). Copy k of value v has the
        index v + k × the number of values.
    owner, at
        For each buffer, the value that it is made for, and the execution that makes it.
    """

    written: IntArray
    by: IntArray
    buffer: IntArray
    owner: IntArray
    at: IntArray


def _make(
    graph: TrainingGraph,
    runs: Runs,
    is_sum: BoolArray,
    is_load: BoolArray,
    stored: Mapping[int, Stored],
) -> _Made:
    """Give a number to each copy of each value that takes memory; views have none yet."""
    writes, many = _Arrays.of(graph).writes, len(graph.storage)
    written = writes.items[writes.places(runs.ops)]
    by = np.repeat(np.arange(len(runs.ops)), writes.counts[runs.ops])
    takes = ~is_load[by] & (graph.size[written] > 0) | is_sum[by]
    if stored:
        values = np.zeros(many, np.bool_)
        values[[how.value for how in stored.values()]] = True
        takes |= is_load[by] & values[written]
    owner, at = written[takes], by[takes]
    buffer = np.full(many * (int(runs.copies.max(initial=0)) + 1), -1)
    buffer[owner + runs.copies[at] * many] = np.arange(len(owner))
    return _Made(written, by, buffer, owner, at)


def _see_through_views(
    graph: TrainingGraph, runs: Runs, computes: BoolArray, made: _Made
) -> tuple[IntArray, IntArray]:
    """Give each view the buffer of its viewed value. Return where the reads of each execution
    begin, and the copies of values that are read, one execution after the other."""
    arrays, many = _Arrays.of(graph), len(graph.storage)
    read_from = np.concatenate([[0], arrays.reads.counts[runs.ops].cumsum()])
    read = arrays.reads.items[arrays.reads.places(runs.ops)] + runs.picks * many
    written, by = made.written, made.by
    looks = computes[by] & arrays.is_view[written] & (arrays.slot[written] >= 0)
    written, by = written[looks], by[looks]
    views, seen = written + runs.copies[by] * many, read[read_from[by] + arrays.slot[written]]
    stands_for = np.arange(len(made.buffer))
    stands_for[views] = seen
    while not np.array_equal(further := stands_for[stands_for[views]], stands_for[views]):
        stands_for[views] = further
    made.buffer[views] = made.buffer[stands_for[views]]
    return read_from, read


def _with_stored(
    lives: Lives, ops: IntArray, is_load: BoolArray, stored: Mapping[int, Stored]
) -> Lives:
    """Add the buffers that hold stored values between their op and their last load."""
    last_load = dict(zip(ops[is_load].tolist(), np.flatnonzero(is_load).tolist(), strict=True))
    packed = [(op, now, stored[op]) for op, now in last_load.items() if stored[op].bytes]
    if not packed:
        return lives
    # Forward ops run first, in order: an op and its execution have the same number.
    return Lives(
        np.concatenate([lives.born, [op for op, _, _ in packed]]),
        np.concatenate([lives.dies, [now for _, now, _ in packed]]),
        np.concatenate([lives.sizes, [how.bytes for _, _, how in packed]]),
        np.concatenate([lives.owner, [how.value for _, _, how in packed]]),
    )


def _marked(graph: TrainingGraph, ops: Iterable[int]) -> BoolArray:
    found = np.zeros(graph.length, np.bool_)
    found[list(ops)] = True
    return found


def _sum_up(
    graph: TrainingGraph,
    runs: Runs,
    is_sum: BoolArray,
    buffer: IntArray,
    born: IntArray,
    dies: IntArray,
) -> tuple[IntArray, list[tuple[int, list[int]]]]:
    """Let addends die when they are added, and sums be born with their first two addends.

    Return, for each buffer, the step in which it is added (-1: it is no addend); and each sum with
    the buffers that it begins with.
    """
    added_at = np.full(len(born), -1)
    totals = []
    for now in np.flatnonzero(is_sum).tolist():
        op = int(runs.ops[now])
        (value,) = graph.writes[op]
        total = int(buffer[value])
        # Addends are made by backward ops, which run once.
        addends = [at for at in buffer[list(graph.sums[op])].tolist() if at >= 0]
        begun = born[addends].tolist()
        for addend, when in zip(addends, _added_at(begun), strict=True):
            dies[addend] = max(int(dies[addend]), when)
            added_at[addend] = when
        totals.append((total, addends[:2]))
        born[total] = max(begun[:2], default=now)
    return added_at, totals


def _pass_on(
    made: IntArray,
    now: IntArray,
    read_from: IntArray,
    at: IntArray,
    lives: Lives,
    added_at: IntArray,
) -> None:
    """Let each output take over the buffer of an input of the same size that dies at that time.

    ``made``, ``now``: the outputs that may do so, and the executions that make them. ``at``: the
    buffers that are read; ``read_from``: where the reads of each execution begin in it.
    """
    born, dies, sizes, _ = lives
    counts = read_from[now + 1] - read_from[now]
    old = at[_ranges(read_from[now], counts)]
    made, now = np.repeat(made, counts), np.repeat(now, counts)
    fits = (old >= 0) & (sizes[old] == sizes[made])
    fits &= (dies[old] == now) & (born[old] < now) & (added_at[old] < now)
    now, first = np.unique(now[fits], return_index=True)
    dies[old[fits][first]] = now - 1


def summed_first(addends: int) -> int:
    """Return how many of ``addends`` TensorFlow's kernel adds before it continues in whole
    groups."""
    head = addends % SUMMED_AT_ONCE
    return head if head >= 2 else head + SUMMED_AT_ONCE


def _added_at(born: Sequence[int]) -> list[int]:
    """Return, for each addend, the last step that needs it for the sum: it is added once the
    addends before it exist.

    ``born``: the first step of each.
    """
    reached = list(accumulate(born, max))
    head = summed_first(len(born))
    # The first one waits for the second.
    reached[:1] = reached[1:2] or reached[:1]
    for k in range(head, len(born), SUMMED_AT_ONCE):
        # The first one of each further group becomes the sum of that group.
        reached[k] = reached[min(k + SUMMED_AT_ONCE, len(born)) - 1]
    return reached
