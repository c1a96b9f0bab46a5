"""Sums of several additions, which grappler turns into one ``AddN``.

``a + b + c + d`` is three ops, and two tensors are alive when one addend after the other is made.
Grappler replaces a tree of additions by a single ``AddN``, and adds smaller shapes, which are
broadcast, to its result (``AddOpsRewrite`` in ``arithmetic_optimizer.cc``, TensorFlow 2.16 to
2.21). The ``AddN`` starts when the last addend is there: all of them are alive together. The
gradients of microbatches that a step adds up by hand are such addends. An addition becomes part of
another one if that is its only reader, on the same device, and no control edge begins or ends at
it. Ops between two additions that do nothing, such as an identity, are removed first. Grappler must
know the shapes. It does in functions, but not of tensors that a session feeds.
`graph_tools.tf_private.graphs.protect` prevents the merge. O(edges).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.graph.separators import IntArray
from graph_tools.ops.views import rewrites_arithmetic, unchanged_input
from graph_tools.tf_private import graphs

__all__ = ["ADDITIONS", "merged_sums"]

ADDITIONS = frozenset("Add AddV2 AddN".split())
_NOTHING = frozenset("Identity StopGradient PreventGradient Reshape".split())


def _is_addition(op: tf.Operation) -> bool:
    """Return whether an op adds tensors of known shapes, maybe broadcast, and is not protected."""
    if op.type not in ADDITIONS or graphs.is_protected(op):
        return False
    return all(tensor.shape.is_fully_defined() for tensor in (*op.inputs, op.outputs[0]))


def _passed_on(op: tf.Operation) -> int | None:
    """Return the input that an op passes on unchanged, so that grappler removes the op; ``None``:
    there is none."""
    passed: int | None = None
    if op.type in _NOTHING:
        shape = op.outputs[0].shape
        passed = 0 if shape.is_fully_defined() and shape == op.inputs[0].shape else None
    elif op.type not in ADDITIONS:
        passed = unchanged_input(op)
    return None if passed is None or graphs.is_protected(op) else passed


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
    waited_for = {other for waits in ops.controls for other in waits}
    alone = [
        i
        for i, waits in enumerate(ops.controls)
        if ops.here[i] and not waits and i not in without and i not in waited_for
    ]
    additions = {i for i in alone if _is_addition(ops.ops[i])}
    if len(additions) < 2:
        return {}
    unchanged = {i: _passed_on(ops.ops[i]) for i in alone}
    nothing = {i: ops.inputs[i][k] for i, k in unchanged.items() if k is not None}
    readers: dict[int, list[int]] = {value: [] for value in held}
    for i, values in enumerate(reads):
        for value in () if i in without else values:
            readers.setdefault(value, []).append(i)
    only = {value: read[0] for value, read in readers.items() if len(read) == 1}
    for value in held:
        only.pop(value, None)
    found: dict[int, list[int]] = {}
    for i in sorted(additions):
        addends: list[int] = []
        for value in reads[i]:
            passed, source = _past(nothing, ops.producer, only, i, value)
            part = int(ops.producer[source])
            reader = passed[-1] if passed else i
            alike = ops.ops[part].device == ops.ops[i].device
            if part in additions and only.get(source) == reader and alike:
                addends += found.get(part, reads[part])
                found |= {gone: [] for gone in (part, *passed)}
            else:
                addends.append(value)
        if len(addends) > len(reads[i]):
            found[i] = addends
    return found


def _past(
    nothing: Mapping[int, int], producer: IntArray, only: Mapping[int, int], reader: int, value: int
) -> tuple[list[int], int]:
    """Return the ops that do nothing between a reader of a value and the op that computes it, and
    the value that the first of them reads.

    ``nothing``: the value that each such op passes on. ``only``: the only reader of a value.
    """
    passed: list[int] = []
    while only.get(value) == reader and (made := int(producer[value])) in nothing:
        passed.append(made)
        reader, value = made, nothing[made]
    return passed, value
