"""Sums of several additions, which grappler turns into one ``AddN``.

``a + b + c + d`` is three ops, and two tensors are alive when one addend after the other is made.
Grappler replaces a tree of additions of one shape by a single ``AddN`` (``AddOpsRewrite`` in
``arithmetic_optimizer.cc``, TensorFlow 2.16 to 2.21), which starts when the last addend is there:
all of them are alive together. The gradients of microbatches that a step adds up by hand are such
addends. An addition becomes part of another one if that is its only reader, on the same device, and
no control edge begins or ends at it. Grappler must know the shapes. It does in functions, but not
of tensors that a session feeds. `graph_tools.tf_private.graphs.protect` prevents the merge.
O(edges).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.ops.views import rewrites_arithmetic
from graph_tools.tf_private import graphs

__all__ = ["is_addition", "merged_sums"]

_ADDITIONS = frozenset("Add AddV2 AddN".split())


def is_addition(op: tf.Operation) -> bool:
    """Return whether an op adds numbers of one known shape, and is not protected."""
    if op.type not in _ADDITIONS:
        return False
    shape = op.outputs[0].shape
    if not shape.is_fully_defined() or any(tensor.shape != shape for tensor in op.inputs):
        return False
    return not graphs.is_protected(op)


def merged_sums(
    ops: OpGraph, reads: Sequence[Sequence[int]], without: Collection[int], held: Collection[int]
) -> dict[int, list[int]]:
    """Return the additions that become one, each with its addends; of an addition that becomes a
    part of another one, there are none.

    Parameters
    ----------
    ops
        The graph.
    reads
        The values that each op reads when the graph runs.
    without
        Ops that do not run.
    held
        Values that are read after the last op.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> numbers = [tf.TensorSpec([4])] * 3
    >>> step = tf.function(lambda a, b, c: tf.tanh(a + b + c)).get_concrete_function(*numbers)
    >>> ops = capture(step.outputs)
    >>> named = {op.name: k for k, op in enumerate(ops.ops)}
    >>> merged = merged_sums(ops, ops.inputs, (), ())
    >>> merged[named["add"]], len(merged[named["add_1"]])
    ([], 3)
    """
    if not ops.ops or not graphs.is_function(ops.ops[0].graph) or not rewrites_arithmetic():
        return {}
    additions = {
        i
        for i, op in enumerate(ops.ops)
        if ops.here[i] and i not in without and not ops.controls[i] and is_addition(op)
    }
    additions.difference_update(other for waits in ops.controls for other in waits)
    if len(additions) < 2:
        return {}
    readers: dict[int, list[int]] = {}
    for i, values in enumerate(reads):
        for value in () if i in without else values:
            readers.setdefault(value, []).append(i)
    found: dict[int, list[int]] = {}
    for i in sorted(additions):
        addends: list[int] = []
        for value in reads[i]:
            part = int(ops.producer[value])
            if (
                part in additions
                and value not in held
                and readers[value] == [i]
                and ops.ops[part].device == ops.ops[i].device
            ):
                addends += found.get(part, reads[part])
                found[part] = []
            else:
                addends.append(value)
        if len(addends) > len(reads[i]):
            found[i] = addends
    return found
