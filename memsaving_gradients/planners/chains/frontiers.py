"""The forward half of a training graph as a line of positions that can be cut.

For every position of the forward order, planners that cut into segments need the values that a cut
there would keep (its frontier). They also need the values between two cuts that backward will read
(residuals), and the other bytes of the backward pass (gradients, temporaries). This module measures
all of these once, in linear time, in bytes.

Three rules make it work where a search for single bottleneck tensors finds nothing:

- Only ops that a recomputation could run count as readers, so metrics and unused outputs hide no
  cut.
- Frontiers leave out values one cheap op away from sources (half-precision copies of weights) and
  concatenations; they have the parts of these. DenseNet's growing features and U-Net's skips then
  cost each part once, however many cuts they cross.
- Results that must not be recomputed (stateful random draws) are pinned: kept wherever the cuts
  are. The smallest value in the chain of single readers behind the result is kept (a dropout mask
  in bits, not the numbers it was drawn from).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graph_tools.graph.separators import frontier, frontier_bytes
from memsaving_gradients.schedules.arrays import BoolArray, FloatArray, IntArray
from memsaving_gradients.schedules.schedule import recompute_lazily
from memsaving_gradients.schedules.simulate import TIE, simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = [
    "TINY",
    "Segments",
    "expensive_storages",
    "measure_segments",
    "narrow_cuts",
    "narrowest_cuts",
    "small_storages",
]

#: Plans always keep the smallest residuals, up to this share of all residual bytes together; or up
#: to `TIE`, if each is below this share of the largest one (statistics of normalizations:
#: reductions, expensive to recompute). They also keep equally tiny values that only recomputations
#: read. A bound that is lower by no more than this share is near enough. Chosen by judgement.
TINY = 1e-3


@dataclass(frozen=True, eq=False)
class Segments:
    """The costs of cuts, by forward position.

    Attributes
    ----------
    parts
        Storages that frontiers are made of, except storages that the runtime may merge away, where
        no cut is allowed.
    born, last, size
        For each part: the position that makes it, the last position whose recomputation reads it,
        its bytes.
    small
        Storages that are so small together that plans always keep them.
    pinned
        Storages that are kept wherever the cuts are: they cannot be recomputed, or the caller asked
        for them.
    residuals
        Storages that backward ops read and a plan decides on, in order of creation.
    residual_born
        The position that makes each residual.
    held
        For each position, bytes of residuals and pinned storages made up to there.
    pinned_held
        For each position, bytes of pinned storages made up to there.
    working
        For each position, the most bytes that backward needs there in addition to residuals.
    cuttable
        For each position, whether a cut there separates no ops that the runtime may fuse and that
        may run again. Keeping the value between such ops would run the originals unfused, with
        other last bits than in plain training.
    """

    parts: IntArray
    born: IntArray
    last: IntArray
    size: IntArray
    small: frozenset[int]
    pinned: frozenset[int]
    residuals: IntArray
    residual_born: IntArray
    held: IntArray
    pinned_held: IntArray
    working: IntArray
    cuttable: BoolArray

    @property
    def length(self) -> int:
        """Number of forward positions."""
        return len(self.held)

    def frontier(self, position: int) -> list[int]:
        """Return the storages that a cut behind ``position`` keeps."""
        return [int(s) for s in self.parts[frontier(self.born, self.last, position)]]

    def frontier_bytes(self) -> IntArray:
        """Return the bytes of the frontier behind every position."""
        return frontier_bytes(self.born, self.last, self.size, self.length)

    def added_bytes(self, positions: IntArray) -> FloatArray:
        """Return, at [i, j] with i < j, the bytes that a cut behind the position j of ``positions``
        keeps and one behind the position i does not."""
        first, end = np.searchsorted(positions, self.born), np.searchsorted(positions, self.last)
        crosses = first < end
        first, end, size = first[crosses], end[crosses], self.size[crosses]
        # A part adds to the cuts from ``first`` to before ``end``, for each i before ``first``.
        # The sums of these differences are the bytes.
        delta = np.zeros((len(positions) + 1, len(positions) + 1))
        np.add.at(delta, (np.zeros_like(first), first), size)
        np.add.at(delta, (np.zeros_like(first), end), -size)
        np.add.at(delta, (first, first), -size)
        np.add.at(delta, (first, end), size)
        return delta.cumsum(axis=0).cumsum(axis=1)

    def kept_by(self, cuts: list[int]) -> dict[int, str]:
        """Return the storages kept by ``cuts``, with reasons; residuals behind the last cut are
        kept, not recomputed."""
        kept = dict.fromkeys(self.small, "small")
        kept |= dict.fromkeys(self.pinned, "pinned")
        for number, cut in enumerate(cuts, 1):
            for storage in self.frontier(cut):
                kept.setdefault(storage, f"checkpoint {number}")
        behind = self.residuals[self.residual_born > (cuts[-1] if cuts else -1)]
        for storage in behind.tolist():
            kept.setdefault(storage, "last segment")
        return kept


def narrow_cuts(cuts: IntArray, width: IntArray) -> IntArray:
    """Return the ``cuts`` (positions) that are no wider than their neighbors; ``width``: bytes of a
    cut, by position."""
    at = width[cuts]
    endless = np.iinfo(np.int64).max
    before, after = np.append(endless, at[:-1]), np.append(at[1:], endless)
    return cuts[(at <= before) & (at <= after)]


def narrowest_cuts(cuts: IntArray, width: IntArray, stretch: IntArray) -> IntArray:
    """Return the first narrowest cut of each stretch; ``stretch``: a number for each cut."""
    order = np.lexsort((cuts, width[cuts], stretch))
    _, first = np.unique(stretch[order], return_index=True)
    return np.sort(cuts[order][first])


def measure_segments(graph: TrainingGraph, keep: Collection[int] = ()) -> Segments:
    """Measure the forward half of ``graph``, with the storages in ``keep`` kept; linear in ops and
    edges."""
    residual = graph.residuals
    small = small_storages(graph, keep)
    needed = _needed(graph, residual, small | set(keep))
    forward = _walk(graph, small | set(keep), needed)
    pinned = _pinned(graph, forward.unmade, forward.readers, residual, needed)
    pinned |= {s for s in keep if s in forward.parts_of and s not in small}
    listed = [
        s
        for s, own in forward.parts_of.items()
        if own == (s,) and s in forward.last and s not in pinned and graph.end_of_kernel(s) == s
    ]
    parts = np.array(listed, np.int64)
    producer, source = graph.producer, graph.source
    free = [
        s
        for s in residual
        if s not in small and s not in pinned and graph.clonable[producer[s]] and not source[s]
    ]
    free.sort(key=lambda s: int(producer[s]))
    residuals = np.array(free, np.int64)

    border = graph.first_backward
    pinned_list = np.array(sorted(pinned), np.int64)
    pinned_held = _sum_by_position(producer, graph.size, pinned_list, border)
    held = pinned_held + _sum_by_position(producer, graph.size, residuals, border)
    return Segments(
        parts=parts,
        born=producer[parts],
        last=np.array([forward.last[s] for s in listed], np.int64),
        size=graph.size[parts],
        small=frozenset(small),
        pinned=frozenset(pinned),
        residuals=residuals,
        residual_born=producer[residuals],
        held=held,
        pinned_held=pinned_held,
        working=_working(graph),
        cuttable=_cuttable(graph, needed),
    )


class _Forward(NamedTuple):
    """The findings of a walk over the forward ops.

    Attributes
    ----------
    parts_of
        For each needed storage, the storages that a frontier keeps in its place.
    last
        For each part, the last op that reads it and may run again.
    readers
        For each storage, the ops that read it and may run again.
    unmade
        The needed storages that cannot be recomputed.
    """

    parts_of: dict[int, tuple[int, ...]]
    last: dict[int, int]
    readers: dict[int, list[int]]
    unmade: list[int]


def _walk(graph: TrainingGraph, kept: Collection[int], needed: Collection[int]) -> _Forward:
    storage, source = graph.storage.tolist(), graph.source.tolist()
    clonable = graph.clonable.tolist()
    parts_of: dict[int, tuple[int, ...]] = {}
    last: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    unmade: list[int] = []
    for op in range(graph.first_backward):
        if not any(storage[v] in needed for v in graph.writes[op]):
            continue
        read = [storage[v] for v in graph.reads[op] if not source[storage[v]]]
        if clonable[op]:
            for root in read:
                readers.setdefault(root, []).append(op)
                for part in parts_of.get(root, ()):
                    last[part] = op
        for value in graph.writes[op]:
            root = storage[value]
            if root != value or root not in needed or source[root]:
                continue
            if root in kept:
                parts_of[root] = ()
            elif not clonable[op]:
                parts_of[root] = ()
                unmade.append(root)
            else:
                parts_of[root] = _parts(graph, op, root, read, parts_of)
    return _Forward(parts_of, last, readers, unmade)


def small_storages(graph: TrainingGraph, keep: Collection[int] = ()) -> set[int]:
    """Return the storages that are so small together that plans always keep them."""
    residual = graph.residuals
    small = _small(graph)
    return small | _tiny(graph, residual, _needed(graph, residual, small | set(keep)))


def _small(graph: TrainingGraph) -> set[int]:
    """Return the smallest residuals, up to their share of all residual bytes."""
    residual, size = graph.residuals, graph.size.tolist()
    tiny = TINY * max((size[s] for s in residual), default=0)
    small = set()
    held = 0
    for s in sorted(residual, key=lambda s: (size[s], s)):
        held += size[s]
        if held > graph.residual_bytes * (TIE if size[s] <= tiny else TINY):
            break
        small.add(s)
    return small


def _tiny(graph: TrainingGraph, residual: Collection[int], needed: set[int]) -> set[int]:
    """Return tiny values that only recomputations read: recomputing one costs an op and a gate, and
    saves next to nothing."""
    limit = TINY * max((int(graph.size[s]) for s in residual), default=0)
    tiny = [
        s
        for s in sorted(needed)
        if s not in residual
        and 0 < graph.size[s] <= limit
        and graph.clonable[graph.producer[s]]
        and not graph.fuses[graph.producer[s]]
    ]
    fits = graph.size[tiny].sum() <= graph.residual_bytes * TINY
    return set(tiny) if fits else set()


def _needed(graph: TrainingGraph, residual: Collection[int], kept: set[int]) -> set[int]:
    """Return the residuals and the storages that recomputing them may read; kept storages need no
    others."""
    storage, source = graph.storage.tolist(), graph.source.tolist()
    clonable = graph.clonable.tolist()
    needed = set(residual)
    for op in range(graph.first_backward - 1, -1, -1):
        if not clonable[op]:
            continue
        roots = [storage[v] for v in graph.writes[op]]
        if any(r in needed and r not in kept for r in roots):
            needed.update(storage[v] for v in graph.reads[op] if not source[storage[v]])
    return needed


def _parts(
    graph: TrainingGraph, op: int, root: int, read: list[int], parts_of: dict[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the storages that a frontier keeps in place of ``root``: itself, or the parts from
    which it is made for free."""
    if not read and not graph.expensive[op]:
        return ()
    inherited = tuple(dict.fromkeys(part for r in read for part in parts_of.get(r, (r,))))
    return inherited if graph.joins[op] else (root,)


def _pinned(
    graph: TrainingGraph,
    unmade: list[int],
    readers: dict[int, list[int]],
    residual: Collection[int],
    needed: set[int],
) -> set[int]:
    """Return, for each storage that cannot be recomputed, the smallest one to keep instead."""
    pinned = set()
    size, storage = graph.size.tolist(), graph.storage.tolist()
    for root in unmade:
        best = at = root
        while at not in residual and len(after := readers.get(at, [])) == 1:
            made = [v for v in graph.writes[after[0]] if storage[v] in needed]
            if len(made) != 1 or graph.expensive[after[0]]:
                break
            at = storage[made[0]]
            if at != made[0]:
                continue
            if size[at] < size[best]:
                best = at
        pinned.add(best)
    return pinned


def _sum_by_position(
    producer: IntArray, size: IntArray, storages: IntArray, border: int
) -> IntArray:
    added = np.zeros(border, np.int64)
    if len(storages):
        np.add.at(added, producer[storages], size[storages])
    return np.cumsum(added)


def _cuttable(graph: TrainingGraph, needed: Collection[int]) -> BoolArray:
    delta = np.zeros(graph.first_backward + 1, np.int64)
    for value, reader in graph.merged.items():
        if graph.storage[value] not in needed:
            # No clone reads it, and no cut keeps it. (Otherwise, a sum of losses would forbid all
            # cuts between the losses.)
            continue
        delta[graph.producer[value]] += 1
        delta[reader] -= 1
    return np.cumsum(delta[:-1]) == 0


def _working(graph: TrainingGraph) -> IntArray:
    """Return the bytes that backward holds in addition to residuals, by the forward position that
    it has come back to."""
    border = graph.first_backward
    residual = graph.residuals
    schedule = recompute_lazily(graph, set(residual), graph.sums)
    alive = simulate(graph, schedule).bytes_alive
    working = np.zeros(border, np.int64)
    at = border - 1
    storage, producer = graph.storage.tolist(), graph.producer.tolist()
    last = {}
    for now, step in enumerate(schedule.steps[border:], border):
        for value in graph.reads[step.op]:
            if storage[value] in residual:
                last[storage[value]] = now
    freed = np.zeros(graph.length + 1, np.int64)
    for root, now in last.items():
        freed[now + 1] += graph.size[root]
    beside = alive - (graph.residual_bytes - np.cumsum(freed[: graph.length]))
    for now, step in enumerate(schedule.steps[border:], border):
        made = [producer[storage[v]] for v in graph.reads[step.op] if storage[v] in residual]
        at = max(made, default=at)
        working[at] = max(working[at], beside[now])
    return working


def expensive_storages(graph: TrainingGraph) -> list[int]:
    """Return the storages to keep: outputs of expensive forward ops, or of the last cheap op in a
    chain of single readers behind them."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    readers: dict[int, list[int]] = {}
    for op in range(graph.length):
        for value in graph.reads[op]:
            readers.setdefault(storage[value], []).append(op)
    kept = []
    for op in range(graph.first_backward):
        if not graph.expensive[op]:
            continue
        for value in graph.writes[op]:
            root = storage[value]
            while len(after := readers.get(root, [])) == 1 and after[0] < graph.first_backward:
                made = graph.writes[after[0]]
                if (
                    len(made) != 1
                    or storage[made[0]] == root
                    or not (graph.forwards[after[0]] and graph.clonable[after[0]])
                    or size[storage[made[0]]] != size[root]
                ):
                    break
                root = storage[made[0]]
            kept.append(root)
    return kept
