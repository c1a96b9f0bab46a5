"""Which ops are one when the graph runs: grappler makes one of those that compute the same.

Networks say the same thing several times: each branch of a NASNet cell begins with a rectifier of its own, of one tensor. Grappler keeps
the first of the ops that have one type, device and attributes, read the same and wait for the same
(``common_subgraph_elimination.cc``, TensorFlow 2.16 to 2.21), so that their results are held once. Ops that are equal behind equal ops are
found as well, since they are looked at in topological order. What commutative ops read has no order.

O(edges); attributes are compared only where the rest is equal.
"""

from __future__ import annotations

from graph_tools import _tf, optypes
from graph_tools.capture import OpGraph

__all__ = ["equal_ops"]


def equal_ops(ops: OpGraph) -> dict[int, int]:
    """For each op that equals an earlier one, the first of these.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.tanh(tf.nn.relu(x)), tf.tanh(tf.nn.relu(x)), tf.nn.relu(-x)])
    >>> {graph.ops[op].name: graph.ops[first].name for op, first in equal_ops(graph).items()}
    {'Relu_1': 'Relu', 'Tanh_1': 'Tanh'}
    """
    found: dict[int, int] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    producer, start = ops.producer.tolist(), ops.first_value.tolist()
    for i, op in enumerate(ops.ops):
        if not (ops.clonable[i] and ops.here[i]):
            continue
        reads = tuple(
            v - start[producer[v]] + start[found[producer[v]]] if producer[v] in found else v
            for v in ops.inputs[i]
        )
        if optypes.is_commutative(op):
            reads = tuple(sorted(reads))
        waits = frozenset(found.get(other, other) for other in ops.controls[i])
        others = alike.setdefault((op.type, reads, waits), [])
        twin = next((j for j in others if _tf.are_equal(op, ops.ops[j])), None)
        if twin is None:
            others.append(i)
        else:
            found[i] = twin
    return found
