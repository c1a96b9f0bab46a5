"""What grappler's constant folding moves past what: constants travel down a tree of additions or multiplications.

``c * (x * y)`` becomes ``x * (c * y)`` where the product in parentheses has no other reader (``ConstantPushDown`` in
TensorFlow's ``constant_folding.cc``, 2.16 to 2.21), so that constants meet and are folded. Which of two factors is x is a matter
of names: before that, grappler sorts what commutative ops read (`input_name`, ``canonicalizer.cc``). Three consequences matter to
whoever edits a graph: an op put between two ops of such a tree changes the last bits of the result; so may an op of another name in
the place of a factor; and ``c * y`` is an op of its own, ready as soon as y is, which may be long before x.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools import optypes
from graph_tools.capture import OpGraph
from graph_tools.sizes import tensor_bytes

__all__ = ["input_name", "pushed_down", "takes_constant"]


def input_name(tensor: tf.Tensor) -> str:
    """A tensor as the list of an op's inputs names it in a serialized graph."""
    return f"{tensor.op.name}:{tensor.value_index}" if tensor.value_index else str(tensor.op.name)


def takes_constant(ops: OpGraph) -> npt.NDArray[np.bool_]:
    """For each op, whether it combines a constant with something: its own, or one that its only reader has.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.sin(tf.sin(x) * x) * (tf.cos(x) * x * 0.5)])
    >>> [op.name for op, takes in zip(graph.ops, takes_constant(graph)) if takes]
    ['mul_1', 'mul_2']
    """
    takes = np.zeros(len(ops.ops), np.bool_)
    for i in range(len(ops.ops) - 1, -1, -1):
        kind = ops.ops[i].type
        if not any(kind in family for family in optypes.FOLDED_TOGETHER):
            continue
        readers = ops.readers[i]
        takes[i] = ops.reads_constant(i) or (
            len(readers) == 1
            and bool(takes[readers[0]])
            and optypes.fold_together(kind, ops.ops[readers[0]].type)
        )
    return takes


def pushed_down(ops: OpGraph) -> list[tuple[int, ...]]:
    """What each op reads when constants have moved down: ``c * (x * y)`` reads x and ``c * y``, which reads y alone.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x, y = tf.compat.v1.placeholder(tf.float32, [4]), tf.compat.v1.placeholder(tf.float32, [4])
    ...     product = tf.sin(x) * tf.sin(y)
    ...     graph = capture([0.5 * product])
    >>> inner = graph.position[product.op.name]
    >>> [graph.ops[graph.producer[v]].name for v in pushed_down(graph)[inner]]
    ['Sin_1']
    """
    found = list(ops.inputs)
    # Of ops that hold a constant: the position of their other operand.
    operand: dict[int, int] = {}
    for i in range(len(ops.ops) - 1, -1, -1):
        kind = ops.ops[i].type
        if len(ops.inputs[i]) != 2 or not any(kind in family for family in optypes.FOLDED_TOGETHER):
            continue
        fixed = ops.constants(i)
        if i not in operand and any(fixed):
            operand[i] = fixed.index(False) if not all(fixed) else 0
        if i not in operand:
            continue
        value = ops.inputs[i][operand[i]]
        child = int(ops.producer[value])
        if (
            ops.readers[child] != [i]
            or len(ops.inputs[child]) != 2
            or any(ops.constants(child))
            or not optypes.fold_together(kind, ops.ops[child].type)
            or not _is_smaller(ops, i, operand[i], child)
        ):
            continue
        first = _first(ops.ops[child])
        operand[child] = 1 - first
        found[child] = (ops.inputs[child][1 - first],)
        found[i] = (*found[i], ops.inputs[child][first])
    return found


def _first(op: tf.Operation) -> int:
    """Which of two inputs is the first one when those of commutative ops are sorted."""
    x, y = op.inputs
    return int(optypes.is_commutative(op) and input_name(y) < input_name(x))


def _is_smaller(ops: OpGraph, parent: int, operand: int, child: int) -> bool:
    """Whether the constant of ``parent`` is no larger than what it would change places with; unknown if it was pushed."""
    constant, op = ops.ops[parent].inputs[1 - operand], ops.ops[child]
    return sum(tensor_bytes(constant)) <= sum(tensor_bytes(op.inputs[_first(op)]))
