"""Mirror counts: for each storage, how many times it may be recomputed (Chen, Xu, Zhang and
Guestrin 2016, Algorithm 2).

A count m(v) for each storage v defines a schedule (arXiv 1604.06174):

- m(v) = 0: v is kept.
- m(v) = 1: v is dropped after the forward pass and recomputed once, when backward first reads it.
- m(v) > 1: v is recomputed up to m(v) times, and dropped in between. The copies of v have levels 1
  to m(v). The copy of level k reads the copy of level min(k, m(u)) of each input u (level 0 is the
  original), and backward reads level m(v).

Copies of low levels serve to compute a value with a lower count. A value of count 1 among values of
count 2 is a checkpoint of the recomputation. A value of count 0 is a checkpoint of the forward
pass. Every copy runs as late as possible, and a copy that no op needs does not run, so counts are
upper limits. With all counts 0 the schedule is plain training; with counts 0 and 1 only it is
`memsaving_gradients.schedules.schedule.recompute_lazily`.

`sectioned` chooses counts by the paper's recursion g(n) = k + g(n/(k+1)): k cuts divide the line of
forward positions, and each part is divided in turn. The values at the cuts get the count of their
part. The parts themselves get one more, except for the last one, which backward reaches first. So
m(v) counts the turns away from the last part on the way to v. A chain of n equal ops needs about
k·log(n)/log(k+1) units and n/2·log₂(n) recomputations (k = 1).

Linear in the steps of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memsaving_gradients.budget import is_integer
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners.chains.frontiers import TINY, measure_segments
from memsaving_gradients.planners.proposal import Limits
from memsaving_gradients.schedules.builder import without_idle
from memsaving_gradients.schedules.dependency_order import after_needs
from memsaving_gradients.schedules.order import deferrable_before, requested
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["checked", "scheduled", "sectioned"]

#: Fact: larger counts have no use: a recursion of this many levels halves a line of more ops than
#: there can be.
MOST_LEVELS = 64


def checked(mirror: Mapping[int, int]) -> None:
    """Raise an `ArgumentError` if these cannot be mirror counts."""
    for storage, count in mirror.items():
        if not is_integer(count, 0, MOST_LEVELS):
            raise ArgumentError(
                "mirror",
                {storage: count},
                "the mirror count of a tensor is how many times it may be recomputed: a whole"
                f" number from 0 (keep it) to {MOST_LEVELS}",
            )


def scheduled(graph: TrainingGraph, counts: Mapping[int, int], chained: frozenset[int]) -> Schedule:
    """Return the schedule of Algorithm 2, each copy as late as possible.

    Parameters
    ----------
    graph
        The training graph.
    counts
        Storage → count. Storages without a count, or that cannot be recomputed, are kept.
    chained
        The sums that are added up as their addends come.

    Examples
    --------
    Three ops in a row and the backward ops of the third and the second, which read the inputs of
    these:

    >>> from memsaving_gradients.schedules.training_graph import TrainingGraph
    >>> graph = TrainingGraph.of(
    ...     [(), (0,), (1,), (2, 1), (3, 0)], 3, clonable=[True, True, True, False, False])
    >>> for step in scheduled(graph, {0: 2, 1: 1}, frozenset()).steps[3:]:
    ...     print(*step)
    0 1 ()
    1 1 (1,)
    3 0 (0, 1)
    0 2 ()
    4 0 (0, 2)
    """
    border = graph.first_backward
    producer, losable = graph.producer.tolist(), graph.losable.tolist()
    before, reads = deferrable_before(graph), graph.losable_reads
    level = [
        int(counts.get(root, 0)) if may else 0
        for root, may in zip(graph.storage.tolist(), losable, strict=True)
    ]

    def needs(node: tuple[int, int]) -> list[tuple[int, int]]:
        op, copy = node
        most = copy if op < border else MOST_LEVELS
        wanted = ((producer[v], min(most, level[v])) for v in reads[op] if level[v])
        return [*wanted, *((maker, 0) for maker in before.get(op, ()))]

    steps = [Step(op) for op in range(border)]
    for op, copy in after_needs(((op, 0) for op in requested(graph)), needs):
        most = copy if op < border else MOST_LEVELS
        copies = tuple(min(most, level[v]) for v in graph.reads[op])
        steps.append(Step(op, copy, copies if copy or any(copies) else ()))
    return without_idle(graph, Schedule(tuple(steps), chained))


def sectioned(graph: TrainingGraph, limits: Limits, k: int) -> dict[int, int]:
    """Return mirror counts by the recursion g(n) = k + g(n/(k+1)), for every storage that can be
    recomputed."""
    segments = measure_segments(graph, limits.keep)
    width, held = segments.frontier_bytes(), segments.held
    counts: dict[int, int] = {}
    at_cut: dict[int, int] = {}
    turns = np.zeros(segments.length, np.int64)
    cuts = np.flatnonzero(segments.cuttable & (np.diff(held, prepend=0) > 0))
    # Parts to divide: first and last position (both included), turns away from the last part, cuts
    # in it.
    todo = [(0, segments.length - 1, 0, 0, len(cuts))]
    while todo:
        first, last, count, low, high = todo.pop()
        before = held[first - 1] if first else 0
        # A cut behind the last residual of a part divides nothing.
        high = low + int(np.searchsorted(held[cuts[low:high]], held[last]))
        chosen = _between(cuts[low:high], held, width, int(before), int(held[last]), k)
        if not chosen:
            turns[first : last + 1] = count
            continue
        for cut in chosen:
            for storage in segments.frontier(cut):
                at_cut[storage] = min(count, at_cut.get(storage, count))
        bounds = [first, *(cut + 1 for cut in chosen), last + 1]
        for number in range(len(chosen) + 1):
            a, b = bounds[number], bounds[number + 1] - 1
            inner = int(np.searchsorted(cuts, a)), int(np.searchsorted(cuts, b))
            todo.append((a, b, count + (number < len(chosen)), *inner))
    # Only statistics stay: leaving out all of `small` would also keep a share of equal values.
    largest = int(graph.size.max(initial=0))
    fixed = segments.pinned | {s for s in segments.small if TINY * largest >= graph.size[s]}
    for root in np.unique(graph.storage[graph.losable]).tolist():
        if root not in fixed:
            counts[root] = at_cut.get(root, int(turns[graph.producer[root]]))
    return counts


def _between(
    cuts: np.ndarray, held: np.ndarray, width: np.ndarray, low: int, high: int, k: int
) -> list[int]:
    """Return up to ``k`` of ``cuts`` that divide the bytes from ``low`` to ``high`` evenly; the
    narrowest near each place."""
    if not len(cuts):
        return []
    chosen = []
    filled = held[cuts]
    reach = (high - low) / (4 * (k + 1))
    for number in range(1, k + 1):
        place = low + (high - low) * number / (k + 1)
        a, b = np.searchsorted(filled, [place - reach, place + reach])
        near = np.arange(a, max(b, a + 1)).clip(max=len(cuts) - 1)
        order = np.lexsort((np.abs(filled[near] - place), width[cuts[near]]))
        chosen.append(int(cuts[near[order[0]]]))
    return sorted(set(chosen))
