"""Equal ops, which grappler merges when the graph runs.

Networks compute the same thing several times: each branch of a NASNet cell begins with a rectifier
of its own, of one tensor. Equal ops have one type, device and attributes, read the same values and
wait for the same ops. Grappler keeps the first of them (``common_subgraph_elimination.cc``,
TensorFlow 2.16 to 2.21), so their result is held once. Ops are compared in topological order: equal
ops that read equal ops are found as well. Inputs of commutative ops have no order.

O(edges); attributes, and the values of constants, are compared only where the rest is equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

__all__ = ["equal_ops", "results_as_one"]


def equal_ops(ops: OpGraph) -> dict[int, int]:
    """Return, for each op that equals an earlier one, the first equal op.

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
            # The op is a constant when the graph runs, equal only for the same inputs.
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


def results_as_one(ops: OpGraph, same: Mapping[int, int]) -> dict[int, int]:
    """Return, for each result of an op that equals another op, the other op's result."""
    first = ops.first_value.tolist()
    return {
        first[i] + k: first[other] + k
        for i, other in same.items()
        for k in range(len(ops.ops[i].outputs))
    }


class _Constants:
    """The constants of a graph; values are compared only if dtypes and shapes are equal."""

    def __init__(self, ops: OpGraph) -> None:
        self.ops = ops
        self.producer = ops.producer.tolist()
        self.found: dict[int, tuple[Any, ...]] = {}
        self.equal: dict[int, int] = {}

    def is_one(self, value: int) -> bool:
        return self.ops.ops[self.producer[value]].type == "Const"

    def kind(self, value: int) -> tuple[Any, ...]:
        """Return a key of a value: its number, or the dtype and shape of a constant."""
        if not self.is_one(value):
            return (0, value)
        if value not in self.found:
            tensor = self.ops.tensor(value)
            self.found[value] = (1, tensor.dtype.as_datatype_enum, *tensor.shape.as_list())
        return self.found[value]

    def are_equal(self, values: Sequence[int], others: Sequence[int]) -> bool:
        """Return whether two rows of values are equal; their kinds must be."""
        for value, other in zip(values, others, strict=True):
            mine, theirs = (self.equal.get(v, v) for v in (value, other))
            if mine == theirs:
                continue
            first, second = (self.ops.ops[self.producer[v]] for v in (mine, theirs))
            if not graphs.are_equal(first, second):
                return False
            self.equal[mine] = theirs
        return True
