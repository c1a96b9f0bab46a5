"""A lower bound on the extra time of any plan within a budget.

Consider the moment when an original op runs. Its inputs and outputs are present, and so are values
read later that cannot be recomputed. Other values made before and read later by originals are
present and take their bytes, or have to be recomputed later. That takes at least the time of a
value's own op, or a share of it if the op has several results. If it has one, the ops before it add
their time while their one result has this one reader and is not smaller: keeping such a result
instead would free nothing. The time lost is at least the price of the cheapest choice that frees
enough bytes: a knapsack. Here it is relaxed to fractions, which is exact up to one value and needs
a sort. The bound is the largest over all moments.

It holds for every schedule that runs the originals in the order of the graph, however often it
recomputes. It ignores that recomputing a value may need others. Linear in ops for each moment
considered; moments with few bytes alive are left out, since nothing has to be freed there.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from graph_tools.ops.in_place import taken_over
from memsaving_gradients.schedules.arrays import BoolArray, FloatArray, IntArray
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.schedule import ordered
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Crowd", "least_extra_seconds"]

#: Of more crowded moments, this many to twice as many are considered, spread by bytes alive.
MOST_MOMENTS = 200


def least_extra_seconds(graph: TrainingGraph, budget: int, *, accumulate: bool = True) -> float:
    """Return extra seconds that no schedule with a simulated peak of ``budget`` bytes can go below
    (``inf``: there is no such schedule).

    Examples
    --------
    Three one-byte values wait for the backward pass. Each missing byte costs a second to recompute
    one, until no plan fits:

    >>> chain = TrainingGraph.of([(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)], 4)
    >>> [least_extra_seconds(chain, budget) for budget in (5, 4, 3, 2)]
    [0.0, 1.0, 2.0, inf]
    """
    return Crowd(graph, budget, accumulate=accumulate).bound


class Crowd:
    """The values alive in plain training, at the places of the order where they exceed a budget.

    Attributes
    ----------
    places
        The places of ``run_order(graph)`` where more bytes than the budget are alive.
    alive
        Bytes alive at each place of the order.
    storages, size
        The storages that take memory, and their bytes.
    born, last
        For each storage, the place of its op, and of the last original that reads it (-1: none).
    summed
        For each storage, whether it is part of a sum that is added up as its addends come.
    """

    def __init__(self, graph: TrainingGraph, budget: int, *, accumulate: bool) -> None:
        self.graph, self.budget = graph, budget
        lives: _Lives = graph.derived(_Lives, accumulate)
        self.alive, self.storages, self.size = lives.alive, lives.storages, lives.size
        self.born, self.last, self.free = lives.born, lives.last, lives.free
        self._seconds, self._rate, self.summed = lives.seconds, lives.rate, lives.summed
        self.places = np.flatnonzero(self.alive > budget)

    @property
    def bound(self) -> float:
        """The most time that has to be lost at one place, seconds."""
        return max(self._losses.values(), default=0.0)

    @cached_property
    def _losses(self) -> dict[int, float]:
        """The time that has to be lost at each place considered."""
        return {place: self.least_seconds(place) for place in self.spread}

    def at(self, place: int) -> tuple[int, IntArray]:
        """Return the bytes that no plan can spare at a place, and the other storages (by their
        index here) that are present in plain training."""
        op = run_order(self.graph)[place]
        across = (self.born < place) & (self.last > place) & ~self.summed
        touched = self.touched(place)
        fixed = (across & ~self.free) | (touched & ~self.summed)
        bytes_fixed = int(self.size[fixed].sum()) + _made(self.graph, op)
        return bytes_fixed, np.flatnonzero(across & self.free & ~touched)

    def least_seconds(self, place: int) -> float:
        """Return the time that has to be lost because not all values have room at a place."""
        fixed, items = self.at(place)
        missing = fixed + int(self.size[items].sum()) - self.budget
        if missing <= 0:
            return 0.0
        if fixed > self.budget:
            return float("inf")
        items = items[np.argsort(self._rate[items], kind="stable")]
        freed = np.cumsum(self.size[items])
        k = int(np.searchsorted(freed, missing))
        before = int(freed[k - 1]) if k else 0
        last = (missing - before) * float(self._rate[items[k]])
        return float(self._seconds[items[:k]].sum()) + last

    def worst(self, many: int) -> list[int]:
        """Return at most ``many`` places where most time has to be lost, no two close together."""
        ranked = sorted(self._losses, key=lambda place: (-self._losses[place], place))
        found: list[int] = []
        for place in ranked:
            if all(abs(place - other) > len(self.alive) // (4 * many) for other in found):
                found.append(place)
        return found[:many]

    @cached_property
    def spread(self) -> list[int]:
        """The crowded places; if there are many, a selection evenly spread by bytes alive, with the
        most crowded one."""
        ranked = self.places[np.argsort(-self.alive[self.places], kind="stable")]
        return [int(p) for p in ranked[:: max(1, len(ranked) // MOST_MOMENTS)]]

    def touched(self, place: int) -> BoolArray:
        """Return, for each storage, whether the op at a place reads it."""
        read = np.array(self.graph.reads[run_order(self.graph)[place]], np.int64)
        return np.isin(self.storages, self.graph.storage[read])


class _Lives:
    """The attributes of a crowd that do not depend on its budget."""

    def __init__(self, graph: TrainingGraph, accumulate: bool) -> None:
        chained = frozenset(graph.sums if accumulate else ())
        self.alive = simulate(graph, ordered(graph, chained)).bytes_alive
        place = np.empty(graph.length, np.int64)
        place[run_order(graph)] = np.arange(graph.length)
        roots = graph.storage == np.arange(len(graph.storage))
        self.storages = np.flatnonzero(roots & ~graph.source & (graph.size > 0))
        self.size = graph.size[self.storages]
        self.born = place[graph.producer][self.storages]
        self.last = _last_reads(graph, place)[self.storages]
        self.free = graph.losable[self.storages]
        self.seconds = _seconds_again(graph, self.storages)
        self.rate = self.seconds / self.size
        added = {int(v) for op in chained for v in (*graph.reads[op], *graph.writes[op])}
        self.summed = np.isin(self.storages, sorted(added))


def _seconds_again(graph: TrainingGraph, storages: IntArray) -> FloatArray:
    """Return, for each storage, the least time that recomputing it adds to recomputing others:
    results of one op share its time."""
    storage, size, producer = graph.storage.tolist(), graph.size.tolist(), graph.producer.tolist()
    losable = graph.losable.tolist()
    readers = [0] * len(storage)
    for values in graph.reads:
        for root in {storage[v] for v in values}:
            readers[root] += 1
    for value in graph.targets:
        readers[storage[value]] += 1
    results = [sum(storage[v] == v and size[v] > 0 for v in made) for made in graph.writes]
    found = np.zeros(len(storages))
    for k, wanted in enumerate(storages.tolist()):
        made = producer[wanted]
        if results[made] > 1:
            # Keeping the op's inputs instead may free bytes, so earlier ops add no time.
            found[k] = graph.seconds[made] / results[made]
            continue
        stack, seen = [made], {made}
        while stack:
            op = stack.pop()
            found[k] += graph.seconds[op]
            for value in graph.reads[op]:
                root, maker = storage[value], producer[storage[value]]
                only = losable[value] and readers[root] == 1 and size[root] >= size[wanted]
                if only and results[maker] == 1 and maker not in seen:
                    seen.add(maker)
                    stack.append(maker)
    return found


def _last_reads(graph: TrainingGraph, place: IntArray) -> IntArray:
    """Return, for each storage, the place of the last original that reads it."""
    last = np.full(len(graph.storage), -1, np.int64)
    for op, values in enumerate(graph.reads):
        if values:
            np.maximum.at(last, graph.storage[list(values)], place[op])
    for value in graph.targets:
        last[graph.storage[value]] = graph.length
    return last


def _made(graph: TrainingGraph, op: int) -> int:
    """Return the bytes that an op certainly takes in addition to its inputs: its scratch space, and
    its outputs, one of which may use the buffer of an input."""
    made = [int(graph.size[v]) for v in graph.writes[op]]
    read = {int(graph.storage[v]) for v in graph.reads[op]} if graph.forwards[op] else ()
    scratch = 0 if graph.workspace is None else int(graph.workspace[op])
    return scratch + sum(made) - taken_over(made, (int(graph.size[root]) for root in read))
