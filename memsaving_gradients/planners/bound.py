"""A lower bound on the extra time of any plan within a budget.

Look at the moment when an original op runs. What it reads and makes is there, and what cannot be made again and is read later.
Every other value that was made before and that originals read later is either there, and takes its bytes, or has to be made again
later, and takes at least the time of its own op, and of the ops before it as long as their results have this one reader and are not
smaller (keeping such a result instead would free nothing). So at least as much time is lost as the cheapest choice that frees enough bytes: a
knapsack, here relaxed to fractions, which is exact up to one value and needs a sort. The bound is the largest over all moments.

It holds for every schedule that runs the originals in the order of the graph, however often it recomputes; it does not see
that making a value again may need others. Linear in ops for each moment looked at; moments with few bytes alive are left out, since
nothing has to be freed there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memsaving_gradients.schedule import ordered, simulate
from memsaving_gradients.training_graph import IntArray, TrainingGraph

__all__ = ["least_extra_seconds"]

#: Moments looked at: those with the most bytes alive, no two of them next to each other.
MOST_MOMENTS = 200


def least_extra_seconds(graph: TrainingGraph, budget: int, *, accumulate: bool = True) -> float:
    """No schedule with a simulated peak of ``budget`` bytes takes less extra time, seconds (``inf``: there is none).

    Examples
    --------
    Three values of a byte wait for the backward pass; two of them have to be made again, a second each:

    >>> import numpy as np
    >>> yes, no = np.ones(7, bool), np.zeros(7, bool)
    >>> chain = TrainingGraph(
    ...     first_backward=4, reads=[(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)],
    ...     writes=[(k,) for k in range(7)], producer=np.arange(7), storage=np.arange(7), size=np.ones(7, int), source=no,
    ...     clonable=yes, joins=no, forwards=no, fuses=no, seconds=np.ones(7), expensive=no)
    >>> [least_extra_seconds(chain, budget) for budget in (5, 4, 3, 2)]
    [0.0, 1.0, 2.0, inf]
    """
    order = graph.order
    chained = frozenset(graph.sums if accumulate else ())
    alive = simulate(graph, ordered(graph, chained)).bytes_alive
    place = np.empty(graph.length, np.int64)
    place[order] = np.arange(graph.length)
    last = _last_reads(graph, place)
    born = place[graph.producer]
    roots = graph.storage == np.arange(len(graph.storage))
    counted = np.flatnonzero(roots & ~graph.source & (graph.size > 0))
    added = {int(v) for op in chained for v in (*graph.reads[op], *graph.writes[op])}
    free = graph.losable[counted]
    summed = np.isin(counted, sorted(added))
    size, seconds = graph.size[counted], _seconds_again(graph, counted)
    rate = seconds / size
    best = 0.0
    for moment in _moments(alive, budget):
        op = order[moment]
        across = (born[counted] < moment) & (last[counted] > moment) & ~summed
        touched = np.isin(counted, graph.storage[np.array(graph.reads[op], np.int64)])
        fixed = int(size[(across & ~free) | (touched & ~summed)].sum()) + _made(graph, op)
        items = np.flatnonzero(across & free & ~touched)
        missing = fixed + int(size[items].sum()) - budget
        if missing <= 0:
            continue
        if fixed > budget:
            return float("inf")
        items = items[np.argsort(rate[items], kind="stable")]
        freed = np.cumsum(size[items])
        k = int(np.searchsorted(freed, missing))
        before = int(freed[k - 1]) if k else 0
        lost = float(seconds[items[:k]].sum()) + (missing - before) * float(rate[items[k]])
        best = max(best, lost)
    return best


def _seconds_again(graph: TrainingGraph, storages: IntArray) -> npt.NDArray[np.float64]:
    """For each storage, the least time that making it again takes."""
    storage, size, producer = graph.storage.tolist(), graph.size.tolist(), graph.producer.tolist()
    losable = graph.losable.tolist()
    readers = [0] * len(storage)
    for values in graph.reads:
        for root in {storage[v] for v in values}:
            readers[root] += 1
    found = np.zeros(len(storages))
    for k, wanted in enumerate(storages.tolist()):
        stack, seen = [producer[wanted]], {producer[wanted]}
        while stack:
            op = stack.pop()
            found[k] += graph.seconds[op]
            for value in graph.reads[op]:
                root, maker = storage[value], producer[storage[value]]
                only = losable[value] and readers[root] == 1 and size[root] >= size[wanted]
                if only and maker not in seen:
                    seen.add(maker)
                    stack.append(maker)
    return found


def _last_reads(graph: TrainingGraph, place: IntArray) -> IntArray:
    """For each storage, the place of the last original that reads it."""
    last = np.full(len(graph.storage), -1, np.int64)
    for op, values in enumerate(graph.reads):
        if values:
            np.maximum.at(last, graph.storage[list(values)], place[op])
    for value in graph.targets:
        last[graph.storage[value]] = graph.length
    return last


def _made(graph: TrainingGraph, op: int) -> int:
    """Bytes that an op certainly takes beside what it reads: an output may lie in the buffer of an input."""
    made = sorted((int(graph.size[v]) for v in graph.writes[op]), reverse=True)
    if graph.forwards[op] and made:
        read = {int(graph.size[graph.storage[v]]) for v in graph.reads[op]}
        taken = next((s for s in made if s in read), 0)
        return sum(made) - taken
    return sum(made)


def _moments(alive: IntArray, budget: int) -> list[int]:
    over = np.flatnonzero(alive > budget)
    ranked = over[np.argsort(-alive[over], kind="stable")]
    return [int(m) for m in ranked[:: max(1, len(ranked) // MOST_MOMENTS)]]
