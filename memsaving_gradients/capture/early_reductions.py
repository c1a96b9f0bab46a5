"""Forward ops that reduce large values to small ones, and run as soon as they can, though they were
built long after these values.

A penalty on each hidden value, or a distillation or perceptual loss, is often written after the
network: ``sum(penalty(h) for h in hidden)``. In the order of the graph, each hidden value is then
needed until the end of the forward pass, and no cut after it is narrow. But the executor reduces a
value as soon as it exists. So capture puts such ops right after the ops that they read. Branches,
loops and calls stay: they hold the values that they have read, for their gradients.

Linear in the edges, because groups are small.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types
from memsaving_gradients.schedules.order import EXPANSION, FAR

__all__ = ["early_reductions"]

#: The most ops of a group: a reduction and the ops before it that only it needs. Chosen by
#: judgement.
MOST_OPS = 32
#: Types of ops that hold the values that they have read, for their gradients.
HOLDING = op_types.FUNCTIONAL | op_types.PYTHON


def early_reductions(
    ops: OpGraph,
    border: int,
    sizes: npt.NDArray[np.int64],
    early: Collection[tf.Operation] = (),
) -> list[int]:
    """Return the positions of ops before ``border`` that should run right after the ops that make
    the values they read, because no other op needs these values later.

    ``sizes``: bytes of each value. ``early``: ops that already come right after the ops that they
    read; they do not count in distances.
    """
    readers = _readers(ops, border)
    storage, source, producer = ops.storage.tolist(), ops.source.tolist(), ops.producer.tolist()
    size = sizes.tolist()
    # Places count from 1; 0 is before all ops.
    place = np.cumsum([op not in early for op in ops.ops[:border]]).tolist()
    far = FAR * max(place, default=0)
    groups: list[tuple[set[int], int, list[int]]] = []
    for end in range(border):
        made = sum(size[storage[v]] for v in _results(ops, end))
        if made * EXPANSION > max((size[storage[v]] for v in ops.inputs[end]), default=0):
            continue
        group = _only_for(ops, readers, end)
        if group is None or any(ops.ops[i].type in HOLDING for i in group):
            continue
        read = {storage[v] for i in group for v in ops.inputs[i] if producer[v] not in group}
        read = {s for s in read if not source[s]}
        first = place[min(i for i in group if ops.inputs[i] or i == end)]
        if read and first - max(place[producer[s]] for s in read) >= far:
            groups.append((group, first, [s for s in read if size[s] > made * EXPANSION]))
    in_groups = {i for group, *_ in groups for i in group}
    others = (i for i in range(border) if i not in in_groups)
    last = {storage[v]: place[i] for i in others for v in ops.inputs[i]}
    # Several losses may read one value: only readers outside of all groups count.
    needless = (g for g, first, read in groups if any(last.get(s, 0) <= first - far for s in read))
    return sorted(set().union(*needless))


def _results(ops: OpGraph, op: int) -> range:
    first = int(ops.first_value[op])
    return range(first, first + len(ops.ops[op].outputs))


def _readers(ops: OpGraph, border: int) -> list[list[int]]:
    """Return, for each op, the forward ops that read it, including ops that may be pruned."""
    found: list[list[int]] = [[] for _ in ops.ops]
    for i in range(border):
        for value in ops.inputs[i]:
            found[int(ops.producer[value])].append(i)
    return found


def _only_for(ops: OpGraph, readers: list[list[int]], end: int) -> set[int] | None:
    """Return ``end``, and the forward ops before it that no other forward op reads; ``None``: there
    are too many."""
    group, stack = {end}, [end]
    while stack:
        for value in ops.inputs[stack.pop()]:
            maker = int(ops.producer[value])
            if maker not in group and group.issuperset(readers[maker]):
                group.add(maker)
                stack.append(maker)
        if len(group) > MOST_OPS:
            return None
    return group
