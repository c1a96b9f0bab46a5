"""Which ops are one when the graph runs: grappler makes one of those that compute the same.

Networks say the same thing several times: each branch of a NASNet cell begins with a rectifier of
its own, of one tensor. Grappler keeps the first of the ops that have one type, device and
attributes, read the same and wait for the same (``common_subgraph_elimination.cc``, TensorFlow 2.16
to 2.21), so that their results are held once. Ops that are equal behind equal ops are found as
well, since they are looked at in topological order. What commutative ops read has no order.

O(edges); attributes, and constants by their values, are compared only where the rest is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

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
    alike: dict[tuple[object, ...], list[tuple[int, list[int]]]] = {}
    constants = _Constants(ops)
    producer, start = ops.producer.tolist(), ops.first_value.tolist()
    for i, op in enumerate(ops.ops):
        if not (ops.clonable[i] and ops.here[i]):
            continue
        reads = [
            v - start[producer[v]] + start[found[producer[v]]] if producer[v] in found else v
            for v in ops.inputs[i]
        ]
        if op_types.is_commutative(op):
            reads.sort(key=constants.kind)
        kinds = tuple(map(constants.kind, reads))
        if all(constants.is_one(v) for v in reads):
            # It is a constant itself when the graph runs.
            kinds = tuple((0, v) for v in reads)
        waits = frozenset(found.get(other, other) for other in ops.controls[i])
        others = alike.setdefault((op.type, kinds, waits), [])
        for twin, theirs in others:
            if constants.are_equal(reads, theirs) and graphs.are_equal(op, ops.ops[twin]):
                found[i] = twin
                break
        else:
            others.append((i, reads))
    return found


class _Constants:
    """Results of constants, of which those of one dtype and shape are compared when it matters."""

    def __init__(self, ops: OpGraph) -> None:
        self.ops = ops
        self.producer = ops.producer.tolist()
        self.found: dict[int, tuple[Any, ...]] = {}
        self.equal: dict[int, int] = {}

    def is_one(self, value: int) -> bool:
        return self.ops.ops[self.producer[value]].type == "Const"

    def kind(self, value: int) -> tuple[Any, ...]:
        """The value itself, but of a constant dtype and shape."""
        if not self.is_one(value):
            return (0, value)
        if value not in self.found:
            tensor = self.ops.tensor(value)
            self.found[value] = (1, tensor.dtype.as_datatype_enum, *tensor.shape.as_list())
        return self.found[value]

    def are_equal(self, values: Sequence[int], others: Sequence[int]) -> bool:
        """Of two rows of values whose kinds are equal."""
        for value, other in zip(values, others, strict=True):
            mine, theirs = (self.equal.get(v, v) for v in (value, other))
            if mine == theirs:
                continue
            first, second = (self.ops.ops[self.producer[v]] for v in (mine, theirs))
            if not graphs.are_equal(first, second):
                return False
            self.equal[mine] = theirs
        return True
