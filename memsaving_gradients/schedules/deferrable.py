"""Backward ops that could run long before their result is needed, and would hold memory from then on.

TensorFlow's gradients come in the order in which they become known, and those that need nothing of the backward pass are known at
once. There are two kinds:

- ops that make much of almost nothing: gradients of penalties on weights, broadcast scalars;
- ops whose result waits for something far away, and that read forward values alone: the gradient of a loss on a hidden value (a penalty on
  activities, an exit) is there at the beginning, and is added to what comes from the main loss when backward arrives at the
  layer. If something else reads the same forward values about then, or what these are made of in a few ops, nothing is held longer
  for it, and where they are lost they are made again for all that read them. What such an op alone needs is postponed with it.

Linear in the edges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["postponable"]

#: An op that makes this many times the bytes that it reads is better run late.
EXPANSION = 16
#: What is read first after this share of the backward ops waits for something far away, …
FAR = 1 / 16
#: … and so many ops at least, …
FEWEST = 2
#: … and what else reads the same about then comes after at least this share of the ops between.
ABOUT_THEN = 1 / 2
#: What is made again from what is read about then is made so many ops in a row behind that, at most.
NEAR = 4


def postponable(graph: TrainingGraph, added: Collection[int]) -> frozenset[int]:
    """Backward ops that are better run when their result is needed; those in ``added`` are not, whatever they read."""
    found = _expanding(graph, added)
    return frozenset(found | _waiting(graph, added, found))


def _expanding(graph: TrainingGraph, added: Collection[int]) -> set[int]:
    """Ops that make much of almost nothing."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    source, producer = graph.source.tolist(), graph.producer.tolist()
    found: set[int] = set()
    for op in range(graph.first_backward, graph.length):
        made = sum(size[v] for v in graph.writes[op])
        read = {storage[v] for v in graph.reads[op]}
        needs = sum(size[s] for s in read if not source[s] and producer[s] not in found)
        if needs * EXPANSION <= made and op not in added:
            found.add(op)
    return found


def _waiting(graph: TrainingGraph, added: Collection[int], expanding: Collection[int]) -> set[int]:
    """Ops whose result waits for something far away, and those that only these need, if what they read is there until then anyway."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    producer = graph.producer.tolist()
    readers = _readers(graph)
    backward = range(graph.first_backward, graph.length)
    last = {storage[v]: op for op in backward for v in graph.reads[op]}
    found: set[int] = set()
    for end, ops in _groups(graph, readers).items():
        way = readers[end][0] - end
        turn = end + way * ABOUT_THEN
        made = sum(size[s] for s in {storage[v] for v in graph.writes[end]})
        read = {storage[v] for op in ops for v in graph.reads[op]}
        longer = (s for s in read if not _is_near(graph, s, last, turn))
        held = (s for s in longer if producer[s] not in ops and producer[s] not in expanding)
        # A stretch longer than the one it would be put behind is no less in the way there.
        fits = len(ops) <= way and ops.isdisjoint(added)
        if made and fits and sum(size[s] for s in held) * EXPANSION <= made:
            found |= ops
    return found


def _is_near(graph: TrainingGraph, root: int, last: Mapping[int, int], turn: float) -> bool:
    """Whether a storage is a source, or is read by a backward op behind ``turn``, or is made of such ones in a few ops."""
    need = {root}
    for _ in range(NEAR + 1):
        need = {s for s in need if not graph.source[s] and last.get(s, -1) < turn}
        makers = {int(graph.producer[s]) for s in need}
        if any(op >= graph.first_backward or not graph.clonable[op] for op in makers):
            return False
        need = {int(graph.storage[v]) for op in makers for v in graph.reads[op]}
    return not need


def _groups(graph: TrainingGraph, readers: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """For each backward op whose result waits for something far away, it and the backward ops that only it needs."""
    far = max((graph.length - graph.first_backward) * FAR, FEWEST)
    group: dict[int, int] = {}
    found: dict[int, set[int]] = {}
    for op in range(graph.length - 1, graph.first_backward - 1, -1):
        ends = {group.get(reader, -1) for reader in readers[op]}
        end = ends.pop() if len(ends) == 1 else -1
        if end < 0 and readers[op] and readers[op][0] - op >= far:
            end = op
        if end >= 0:
            group[op] = end
            found.setdefault(end, set()).add(op)
    return found


def _readers(graph: TrainingGraph) -> list[list[int]]:
    """For each op, the backward ops that read what it makes, the first one first."""
    producer = graph.producer.tolist()
    found: list[list[int]] = [[] for _ in range(graph.length)]
    for op in range(graph.first_backward, graph.length):
        for value in graph.reads[op]:
            found[producer[value]].append(op)
    return found
