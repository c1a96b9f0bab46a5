"""The order in which plans run the original ops, which differs from TensorFlow's in two ways.

**Deferred ops** could run long before their result is needed, and would hold memory from then on.
TensorFlow computes gradients in the order in which they become known, and those that need nothing
of the backward pass are known at once. There are two kinds:

- ops that write many bytes but read few: gradients of penalties on weights, broadcast scalars;
- ops that read forward values alone, and whose result waits for a distant op. An example is the
  gradient of a loss on a hidden value (a penalty on activities, an exit). It is ready at the
  beginning, but is added to the main loss's gradient only when that reaches the layer. Deferring it
  holds nothing longer if, at about that time, other ops read the same forward values, or values
  from which a few ops recompute these. A dropped value is then recomputed once for all its readers.
  Ops that only such an op needs are deferred with it.

**Ops brought forward** are gradients of filters that alone read a huge residual: they free it
before the gradient of the layer's input, which TensorFlow computes first, takes as many bytes.

Linear in the edges. Each function computes its result once for a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from memsaving_gradients.schedules.dependency_order import after_needs
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = [
    "EXPANSION",
    "FAR",
    "LONG_SUM",
    "brought_forward",
    "deferrable",
    "deferrable_before",
    "huge_bytes",
    "requested",
    "run_order",
]

#: Fact: a sum of at least so many addends is long. (`AddN` adds up to nine in one expression.)
LONG_SUM = 10
#: A residual with at least this share of all residuals' bytes is huge.
HUGE_SHARE = 1 / 12
#: An op that writes this many times the bytes that it reads should run late; a reduction, which
#: reads this many times the bytes that it writes, early. Chosen by judgement.
EXPANSION = 16
#: A value waits for a distant op if it is first read after this share of the forward or backward
#: ops. Chosen by judgement.
FAR = 1 / 16
#: A value counts as alive until the result of a deferrable op is read if another op reads it after
#: at least this share of the ops between.
ABOUT_THEN = 1 / 2
#: A value also counts as alive if at most this many ops in a row recompute it from such values.
NEAR = 4


def run_order(graph: TrainingGraph) -> list[int]:
    """Return all ops in the order in which plans run the originals: as in the graph, except ops
    brought forward, and deferrable ops when they are due."""
    return graph.derived(_run_order)


def requested(graph: TrainingGraph) -> list[int]:
    """Return backward ops in the order in which they are requested; each runs after those it needs.

    It is the order of the graph, except ops brought forward, with deferrable ops last. A deferrable
    op that another op needs runs before that op; the others are results.
    """
    return graph.derived(_requested)


def deferrable(graph: TrainingGraph) -> frozenset[int]:
    """Return the backward ops that could run long before their result is needed, and would hold
    memory from then on."""
    return graph.derived(_deferrable)


def deferrable_before(graph: TrainingGraph) -> dict[int, tuple[int, ...]]:
    """Return, for each op that reads or waits for deferrable ops, these deferrable ops."""
    return graph.derived(_deferrable_before)


def brought_forward(graph: TrainingGraph) -> dict[int, int]:
    """Return the products that alone read a huge residual in the backward pass, each with the op
    that it runs before instead of after."""
    return graph.derived(_brought_forward)


def huge_bytes(graph: TrainingGraph) -> float:
    """Return the least bytes with which a single residual may decide the height of the peak."""
    return HUGE_SHARE * graph.residual_bytes


def _run_order(graph: TrainingGraph) -> list[int]:
    before = deferrable_before(graph)
    backward = after_needs(requested(graph), lambda op: before.get(op, ()))
    return [*range(graph.first_backward), *backward]


def _requested(graph: TrainingGraph) -> list[int]:
    late, sooner = deferrable(graph), brought_forward(graph)
    in_place = [op for op in range(graph.first_backward, graph.length) if op not in late]
    return [
        *sorted(in_place, key=lambda op: (sooner.get(op, op), op not in sooner)),
        *sorted(late),
    ]


def _deferrable(graph: TrainingGraph) -> frozenset[int]:
    producer = graph.producer.tolist()
    # The addends of a long sum become available one by one.
    long = (addends for addends in graph.sums.values() if len(addends) >= LONG_SUM)
    added = {producer[v] for addends in long for v in addends}
    found = _expanding(graph, added)
    return frozenset(found | _waiting(graph, added, found))


def _deferrable_before(graph: TrainingGraph) -> dict[int, tuple[int, ...]]:
    late, producer = deferrable(graph), graph.producer.tolist()
    found = {}
    for op in range(graph.first_backward, graph.length):
        makers = (*(producer[v] for v in graph.reads[op]), *graph.waits.get(op, ()))
        if late and not late.isdisjoint(makers):
            found[op] = tuple(maker for maker in makers if maker in late)
    return found


def _brought_forward(graph: TrainingGraph) -> dict[int, int]:
    storage, size, producer = graph.storage.tolist(), graph.size.tolist(), graph.producer.tolist()
    made = graph.written
    border, huge = graph.first_backward, huge_bytes(graph)
    readers: dict[int, set[int]] = {}
    for op in range(border, graph.length):
        for value in graph.reads[op]:
            readers.setdefault(storage[value], set()).add(op)
    found: dict[int, int] = {}
    for root in sorted(graph.residuals):
        op, *others = readers[root]
        lets_go = size[root] >= huge and made[op] < size[root]
        if others or not lets_go or not graph.expensive[op]:
            continue
        makers = (*(producer[v] for v in graph.reads[op]), *graph.waits.get(op, ()))
        ready = max(border, *(maker + 1 for maker in makers))
        first = next((other for other in range(ready, op) if made[other] >= huge), None)
        if first is not None:
            found[op] = first
    return found


def _expanding(graph: TrainingGraph, added: Collection[int]) -> set[int]:
    """Return the ops that write many bytes but read few."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    source, producer = graph.source.tolist(), graph.producer.tolist()
    found: set[int] = set()
    for op in range(graph.first_backward, graph.length):
        made = graph.written[op]
        read = {storage[v] for v in graph.reads[op]}
        needs = sum(size[s] for s in read if not source[s] and producer[s] not in found)
        if needs * EXPANSION <= made and op not in added:
            found.add(op)
    return found


def _waiting(graph: TrainingGraph, added: Collection[int], expanding: Collection[int]) -> set[int]:
    """Return the ops whose result waits for a distant op, and the ops that only these need, if the
    values that they read are available until then anyway."""
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
        # A group longer than the stretch that it is moved past would be as much in the way there.
        fits = len(ops) <= way and ops.isdisjoint(added)
        if made and fits and sum(size[s] for s in held) * EXPANSION <= made:
            found |= ops
    return found


def _is_near(graph: TrainingGraph, root: int, last: Mapping[int, int], turn: float) -> bool:
    """Return whether a storage is a source, is read by a backward op after ``turn``, or is made
    from such storages by a few ops."""
    need = {root}
    for _ in range(NEAR + 1):
        need = {s for s in need if not graph.source[s] and last.get(s, -1) < turn}
        makers = {int(graph.producer[s]) for s in need}
        if any(op >= graph.first_backward or not graph.clonable[op] for op in makers):
            return False
        need = {int(graph.storage[v]) for op in makers for v in graph.reads[op]}
    return not need


def _groups(graph: TrainingGraph, readers: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return, for each backward op whose result waits for a distant op, it and the backward ops
    that only it needs."""
    far = max((graph.length - graph.first_backward) * FAR, 2)
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
    """Return, for each op, the backward ops that read its values, the first one first."""
    producer = graph.producer.tolist()
    found: list[list[int]] = [[] for _ in range(graph.length)]
    for op in range(graph.first_backward, graph.length):
        for value in graph.reads[op]:
            found[producer[value]].append(op)
    return found
