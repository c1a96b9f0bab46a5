"""Bytes that steps of a loop hold when they start before earlier steps have ended.

TensorFlow's executor starts a step as soon as the loop's condition allows, and up to
``parallel_iterations`` of them at once. Values that a step computes only from its number, from
lists, and from values that no step changes do not wait for the previous step. Each step that runs
ahead holds its own. If the condition reads values that the steps compute, no step runs ahead.
"""

from __future__ import annotations

import tensorflow as tf

from graph_tools.graph.capture import OpGraph, capture
from graph_tools.graph.topology import Edges, ancestors
from graph_tools.ops.trip_counts import behind_identities, steps_of
from graph_tools.tf_private import loops

__all__ = ["bytes_ahead"]


def bytes_ahead(loop: tf.Operation, batch: int) -> int:
    """Return the most bytes that steps of ``loop`` hold before an earlier step has ended, at a
    batch of ``batch`` examples.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [256])
    ...     _, y = tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y + tf.exp(x)), (0, x))
    ...     loop = y.op.inputs[0].op
    >>> bytes_ahead(loop, batch=1)  # Four steps, each with its exponentials and its number.
    4112
    """
    body, condition = loops.body_of(loop), loops.condition_of(loop)
    if body is None or condition is None:
        return 0
    parallel = min(loop.get_attr("parallel_iterations"), steps_of(loop))
    if parallel < 2:
        return 0
    graph = capture(body.outputs, unfetched=body.inputs)
    waits, late = _waiting(graph, body)
    read = ancestors([t.op for t in condition.outputs], Edges())
    if any(condition.inputs[i].op in read for i in late):
        return 0
    return (parallel - 1) * _held(graph, waits, batch)


def _waiting(graph: OpGraph, body: tf.Graph) -> tuple[list[bool], set[int]]:
    """Return, for each op of a body, whether it waits for the previous step; and the loop variables
    that the steps compute one after the other."""
    pairs = enumerate(zip(body.inputs, body.outputs, strict=True))
    changing = [(i, out) for i, (arg, out) in pairs if behind_identities(out) is not arg]
    # Counters and lists are available at once, unless they depend on slower values.
    late = {i for i, _ in changing if not _is_quick(body.inputs[i])}
    producer = graph.producer.tolist()
    while True:
        begins = {body.inputs[i].op for i in late}
        waits: list[bool] = []
        for op, values, controls in zip(graph.ops, graph.inputs, graph.controls, strict=True):
            before = (*(producer[v] for v in values), *controls)
            waits.append(op in begins or any(waits[k] for k in before))
        found = {i for i, out in changing if waits[producer[graph.value(out)]]} | late
        if found == late:
            return waits, late
        late = found


def _is_quick(variable: tf.Tensor) -> bool:
    return variable.dtype == tf.variant or variable.shape.rank == 0


def _held(graph: OpGraph, waits: list[bool], batch: int) -> int:
    """Return the bytes of early values that late ops read, and of the largest other early one."""
    sizes, storage = graph.value_bytes(batch).tolist(), graph.storage.tolist()
    producer = graph.producer.tolist()
    begins = {i for i, op in enumerate(graph.ops) if op.type == "Placeholder"}
    early = {root for root in storage if not waits[producer[root]] and producer[root] not in begins}
    read = {
        root
        for i, values in enumerate(graph.inputs)
        if waits[i]
        for v in values
        if (root := storage[v]) in early
    }
    return sum(sizes[root] for root in read) + max((sizes[v] for v in early - read), default=0)
