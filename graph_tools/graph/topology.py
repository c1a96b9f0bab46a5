"""The dependencies of ops in a TensorFlow graph, and a topological order of the ops.

The order follows creation wherever creation was topological. TensorFlow is asked once for the edges
of each op. All functions are linear in ops and edges, except for sorting.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

__all__ = [
    "Edges",
    "ancestors",
    "by_creation",
    "conditional",
    "keep_order_of_collectives",
    "ordered",
]


class Edges(dict[tf.Operation, tuple[list[tuple[tf.Operation, int]], list[tf.Operation]]]):
    """For each op, the outputs that it reads (op and number of output), and the ops that it waits
    for; asked of TensorFlow only once, because that is slow.

    ``cut``: ops whose edges are left out. ``without``: for an op, the ops whose control edges to it
    are left out.
    """

    def __init__(
        self,
        cut: Collection[tf.Operation] = (),
        without: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    ) -> None:
        super().__init__((op, ([], [])) for op in cut)
        self.cut = cut
        self._without = without or {}

    def __missing__(
        self, op: tf.Operation
    ) -> tuple[list[tuple[tf.Operation, int]], list[tf.Operation]]:
        waits = op.control_inputs
        if op in self._without:
            waits = [other for other in waits if other not in self._without[op]]
        found = self[op] = [(t.op, t.value_index) for t in op.inputs], waits
        return found

    def before(self, op: tf.Operation) -> list[tf.Operation]:
        """Return the ops that must run before ``op``."""
        reads, waits = self[op]
        return [*(maker for maker, _ in reads), *waits]


def ancestors(
    roots: Sequence[tf.Operation], edges: Edges, known: Collection[tf.Operation] = ()
) -> set[tf.Operation]:
    """Return ``roots``, all ops that they need, and ``known``, a set that contains all ops that its
    members need."""
    seen = {*known, *roots}
    stack = list(seen.difference(known))
    while stack:
        for before in edges.before(stack.pop()):
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return seen


def ordered(ops: list[tf.Operation], edges: Edges) -> list[tf.Operation]:
    """Return ``ops`` in topological order, by creation where possible: edited graphs have edges
    against the order of creation."""
    place = {op: i for i, op in enumerate(ops)}
    before = [{place[b] for b in edges.before(op)} for op in ops]
    if all(b < i for i, waits in enumerate(before) for b in waits):
        return ops
    after: list[list[int]] = [[] for _ in ops]
    missing = [len(waits) for waits in before]
    for i, waits in enumerate(before):
        for b in waits:
            after[b].append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(ops[i])
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, j)
    if len(order) < len(ops):
        stuck = next(op.name for op, count in zip(ops, missing, strict=True) if count)
        raise GraphError(f"the graph has a cycle through {stuck!r} (a TF1 while loop?)")
    return order


def by_creation(
    early: Collection[tf.Operation], edges: Edges
) -> Callable[[tf.Operation], tuple[int, int]]:
    """Return a sort key: an op's creation; an ``early`` op follows the last op it reads."""
    place: dict[tf.Operation, tuple[int, int]] = {}

    def key(op: tf.Operation) -> tuple[int, int]:
        return place.get(op) or (graphs.creation_index(op), -1)

    for op in sorted(early, key=graphs.creation_index):
        last, _ = max((key(before) for before in edges.before(op)), default=(0, 0))
        place[op] = last, graphs.creation_index(op)
    return key


def keep_order_of_collectives(ops: Iterable[tf.Operation], edges: Edges) -> None:
    """Let each op that waits for other devices also wait for the one before it on its own device.

    TensorFlow adds this order once a function has been traced. All devices must meet in one order,
    so no plan may reverse it.
    """
    last: dict[str, tf.Operation] = {}
    for op in sorted(filter(op_types.is_collective, ops), key=graphs.creation_index):
        before = last.get(op.device)
        if before is not None and before not in edges.before(op):
            edges[op][1].append(before)
        last[op.device] = op


def conditional(
    ops: Sequence[tf.Operation], edges: Edges, place: Mapping[tf.Operation, int]
) -> frozenset[int]:
    """Return the ops that may be dead by the executor's rule: the ops that depend on an output of a
    switch, until a merge joins all of its outputs."""
    if not any(op.type in op_types.SWITCHES for op in ops):
        return frozenset()
    nothing: frozenset[tuple[int, int]] = frozenset()
    # For each op, the outputs of switches without which it is dead: the predicate, and which of the
    # two outputs.
    needs: list[frozenset[tuple[int, int]]] = []
    for op in ops:
        reads, waits = edges[op]
        found = []
        for maker, k in reads:
            i = place[maker]
            # A switch has two outputs; its predicate, the second input, selects the live one.
            predicate = edges[maker][0][1:] if maker.type in op_types.SWITCHES else ()
            switched = {(place[decides], k) for decides, _ in predicate}
            found.append(needs[i].union(switched))
        join = frozenset.intersection if op.type in op_types.MERGES else nothing.union
        always = nothing.union(*(needs[place[other]] for other in waits))
        needs.append(always.union(join(*found)) if found else always)
    return frozenset(i for i, switched in enumerate(needs) if switched)
