"""Copies of ops of a loop's body in other graphs, which give the same bits as the originals.

Grappler fuses an op with the only op that reads its result, or moves constants past both. If a copy
has fewer readers than its original, this could happen to the copy alone and change its rounding.
The reader then reads the copy through an identity that grappler leaves alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from graph_tools.ops import op_types
from graph_tools.ops.while_loops import in_order
from graph_tools.tf_private import graphs, loops

__all__ = ["Tensors", "behind", "transplant", "wanted"]

#: The tensors that replace others, by the ``ref()`` of the replaced tensor.
Tensors = dict[object, tf.Tensor]


def behind(tensors: Iterable[tf.Tensor], stop: Iterable[object] = ()) -> set[tf.Operation]:
    """Return the ops that ``tensors`` depend on; ``stop``: refs of tensors to stop at."""
    ends = set(stop)
    found: set[tf.Operation] = set()
    stack = [t for t in tensors if t.ref() not in ends]
    while stack:
        op = stack.pop().op
        if op not in found:
            found.add(op)
            stack.extend(t for t in op.inputs if t.ref() not in ends)
    return found


def wanted(graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Return the ops of a function that ``outputs`` need, the ops that run for their effect, and
    all ops that these need or wait for."""
    found: set[tf.Operation] = set()
    stack = [t.op for t in outputs]
    stack += [
        op for op in graph.get_operations() if op.type != "Placeholder" and op_types.is_stateful(op)
    ]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack.extend(t.op for t in op.inputs)
            stack.extend(op.control_inputs)
    return in_order(found)


def transplant(
    ops: Sequence[tf.Operation],
    stands: Tensors,
    source: tf.Graph,
    idle: Collection[tf.Operation] = (),
    waits: bool = False,
) -> None:
    """Copy ``ops`` of ``source`` into the current graph, and add the copies' outputs to ``stands``.

    ``waits``: control edges among them are copied, too. An op may have several readers in
    ``source``, not counting ``idle`` ones, which grappler removes. If only one of these is copied,
    it reads the op through a protected identity. Otherwise grappler could fuse the two here only.
    """
    inside = set(ops)
    copies: dict[tf.Operation, tf.Operation] = {}
    first = stands[source.inputs[0].ref()].op if source.inputs else None
    for op in ops:
        if op.type == "Placeholder":
            continue
        before = [copies[c] for c in op.control_inputs if c in copies] if waits else []
        copy = loops.copy_op(op, [stands[t.ref()] for t in op.inputs], before)
        copies[op] = copy
        outputs = list(copy.outputs)
        if first is not None and _loses_readers(op, inside, idle):
            with tf.control_dependencies([first]):
                outputs = [tf.identity(output) for output in outputs]
            for output in outputs:
                graphs.protect(output.op)
        stands |= {old.ref(): new for old, new in zip(op.outputs, outputs, strict=True)}


def _loses_readers(
    op: tf.Operation, inside: set[tf.Operation], idle: Collection[tf.Operation]
) -> bool:
    readers = {reader for out in op.outputs for reader in out.consumers()}.difference(idle)
    left = readers & inside
    if len(readers) < 2 or len(left) != 1:
        return False
    (reader,) = left
    return op.type in op_types.FUSED_WITH_READER or op_types.fold_together(op.type, reader.type)
