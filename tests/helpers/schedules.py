"""Schedules in which ops are recomputed several times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable

from memsaving_gradients.schedules.schedule import Schedule, Step

#: The number of copies after which nothing more is forgotten: if everything is, some programs need
#: exponentially many.
MOST_COPIES = 150


def forgetful(
    graph,
    seed: int,
    *,
    forget: float = 0.5,
    older: float = 0.1,
    alone: Collection[int] = (),
    chained: bool = False,
    order: Iterable[int] | None = None,
) -> Schedule:
    """Return a random schedule, which forgets a value after a read with probability ``forget``, and
    recomputes it for the next read.

    ``older``: the probability to read an earlier copy instead of the newest. ``alone``: ops merged
    with their only reader, so that every copy of an op belongs to one copy of the reader.
    ``chained``: whether to chain long sums. ``order``: of the backward ops, by default the graph's.
    """
    draw = random.Random(seed)
    border, losable = graph.first_backward, graph.losable.tolist()
    producer = graph.producer.tolist()
    count: Counter[int] = Counter()
    # The available copy of each op that was not forgotten.
    have = {
        op: 0
        for op in range(border)
        if op not in alone
        and (not any(losable[v] for v in graph.writes[op]) or draw.random() > forget)
    }
    steps = [Step(op) for op in range(border)]

    def run(wanted: int) -> None:
        # Each frame: an op, and the copies that it reads, as far as they are known.
        stack: list[tuple[int, list[int]]] = [(wanted, [])]
        while stack:
            op, copies = stack[-1]
            reads = graph.reads[op]
            if len(copies) < len(reads):
                value = reads[len(copies)]
                maker = producer[value]
                same = [c for v, c in zip(reads, copies, strict=False) if producer[v] == maker]
                if maker >= border or not losable[value]:
                    copies.append(0)
                elif same:
                    copies.append(same[0])
                elif maker in alone:
                    if op >= border and draw.random() > forget:
                        copies.append(0)
                    else:
                        stack.append((maker, []))
                elif maker not in have:
                    stack.append((maker, []))
                else:
                    old = draw.random() < older
                    copies.append(draw.randint(0, count[maker]) if old else have[maker])
                    if draw.random() < forget and sum(count.values()) < MOST_COPIES:
                        del have[maker]
                continue
            stack.pop()
            copy = 0
            if op < border:
                count[op] += 1
                copy = count[op]
                if op in alone:
                    # The op that needs it is the next frame, and its only reader.
                    stack[-1][1].append(copy)
                else:
                    have[op] = copy
            steps.append(Step(op, copy, tuple(copies) if copy or any(copies) else ()))

    for op in range(border, graph.length) if order is None else order:
        run(op)
    return Schedule(tuple(steps), frozenset(graph.sums if chained else ()))


def shuffled(step, seed: int) -> list[int]:
    """Return the backward ops of a captured step in a random order in which each op comes after the
    ops that it needs."""
    draw = random.Random(seed)
    ops, border = step.source, step.graph.first_backward
    readers: dict[int, list[int]] = {i: [] for i in range(border, step.graph.length)}
    missing = dict.fromkeys(readers, 0)
    for i in readers:
        needs = {*(int(ops.producer[v]) for v in ops.inputs[i]), *ops.controls[i]}
        for before in needs & readers.keys():
            readers[before].append(i)
            missing[i] += 1
    ready = [i for i, many in missing.items() if not many]
    found = []
    while ready:
        # The newest op or any other, so that whole branches come late.
        k = len(ready) - 1 if draw.random() < 0.5 else draw.randrange(len(ready))
        found.append(op := ready.pop(k))
        for reader in readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return found


def halving(graph) -> Schedule:
    """Return the recursive schedule of a chain: keep the middle, finish the second half, then treat
    the first half likewise.

    About log2 n of n values are alive at a time, and each is computed about log2 n times.
    """
    border, losable = graph.first_backward, graph.losable.tolist()
    line = [op for op in range(border) if any(losable[v] for v in graph.writes[op])]
    place = {op: k for k, op in enumerate(line)}
    count: Counter[int] = Counter()
    steps = [Step(op) for op in range(border)]

    def middles(first: int, last: int) -> set[int]:
        """Return the values to keep on the way from ``first``, which is available, to ``last``."""
        kept = {last}
        while last - first > 1:
            first = (first + last) // 2
            kept.add(first)
        return kept

    # The number of the copy of each available value. The input is always available.
    there = dict.fromkeys(middles(-1, len(line) - 1), 0)

    def make(wanted: int) -> None:
        before = max((k for k in there if k < wanted), default=-1)
        kept = middles(before, wanted)
        copy = there.get(before, 0)
        for k in range(before + 1, wanted + 1):
            op = line[k]
            count[op] += 1
            reads = tuple(
                copy if place.get(int(graph.producer[v])) == k - 1 else 0 for v in graph.reads[op]
            )
            steps.append(Step(op, count[op], reads))
            copy = count[op]
            if k in kept:
                there[k] = copy

    for op in range(border, graph.length):
        wanted = [place.get(int(graph.producer[v])) for v in graph.reads[op]]
        read = [k for k in wanted if k is not None]
        for k in read:
            if k not in there:
                make(k)
        steps.append(Step(op, 0, tuple(0 if k is None else there[k] for k in wanted)))
        for k in [k for k in there if read and k > min(read)]:
            del there[k]
    return Schedule(tuple(steps))
