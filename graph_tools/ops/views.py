"""Outputs that are views of an input's buffer instead of having one of their own.

Some ops always pass a buffer on (`graph_tools.ops.op_types.VIEWS`). Others do so for some shapes. A
slice along the first dimension is a window on the whole buffer if its rows are aligned; the buffer
lives as long as any window. Grappler removes an addition of zero and a product with one. It also
removes a transposition of matrices that only products read: these read the matrices transposed.
(``unpack_op.cc``, ``split_op.cc``, ``slice_op.cc``, ``strided_slice_op.cc``,
``constant_folding.cc`` and ``arithmetic_optimizer.cc`` of TensorFlow 2.16 to 2.21.)
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.ops.device_copies import is_elsewhere
from graph_tools.tf_private import graphs

__all__ = ["rewrites_arithmetic", "unchanged_input", "viewed_input"]

#: Fact: windows begin at multiples of this many bytes (``EIGEN_MAX_ALIGN_BYTES``, at most).
ALIGNMENT = 64

#: Fact: for each op that cuts a tensor, the position of that input.
_CUTS = {"Unpack": 0, "Split": 1, "SplitV": 0, "Slice": 0, "StridedSlice": 0}
#: Fact: the number with which each op returns its other operand unchanged; and ``True`` if that
#: operand must be the first one.
_NEUTRAL = {
    "Mul": (1, False),
    "Add": (0, False),
    "AddV2": (0, False),
    "Sub": (0, True),
    "Div": (1, True),
    "RealDiv": (1, True),
}
#: Ops that can read a matrix transposed.
_PRODUCTS = frozenset("MatMul BatchMatMul BatchMatMulV2".split())


class _Numbers(dict[int, Any]):
    """Values of constants, by the creation index of their op."""


def viewed_input(op: tf.Operation, output: int) -> int | None:
    """Return the input whose buffer an output of ``op`` uses, or ``None`` for a buffer of its own.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4, 32])
    ...     first, narrow, same = x[0], x[:, 0], x * 1.0
    >>> [viewed_input(t.op, 0) for t in (first, narrow, same)]
    [0, None, 0]
    """
    kind = op.type
    if kind in op_types.VIEWS:
        if kind == "Identity" and is_elsewhere(op) != is_elsewhere(op.inputs[0].op):
            return None
        return output if kind == "IdentityN" else 0
    if kind in _CUTS:
        return _CUTS[kind] if _is_window(op) else None
    if kind in _NEUTRAL:
        return unchanged_input(op)
    if kind == "Transpose":
        return 0 if _is_read_by_products(op) else None
    return None


def _number(constant: tf.Tensor) -> Any:
    """Return the number that a constant holds. It is read once, because a graph is captured several
    times and parsing a proto takes 40 µs."""
    graph = constant.graph
    known = notes(graph, _Numbers)
    index = graphs.creation_index(constant.op)
    if index not in known:
        known[index] = tf.get_static_value(constant)
    return known[index]


def _is_window(op: tf.Operation) -> bool:
    whole = op.inputs[_CUTS[op.type]]
    if whole.shape.rank is None or whole.shape.rank < 2:
        return False
    row = whole.shape.as_list()[1:]
    if None in row or math.prod(row) * whole.dtype.size % ALIGNMENT:
        return False
    if op.type == "Unpack":
        return int(op.get_attr("axis")) % whole.shape.rank == 0
    if op.type in ("Split", "SplitV"):
        axis = tf.get_static_value(op.inputs[2 if op.type == "SplitV" else 0])
        return axis is not None and int(axis) % whole.shape.rank == 0
    part = op.outputs[0].shape
    if part.rank is None:
        return False
    if op.type == "Slice":
        return bool(part.as_list()[1:] == row)
    strides = tf.get_static_value(op.inputs[3])
    if strides is None or (strides != 1).any():
        return False
    dropped = int(op.get_attr("shrink_axis_mask")) == 1
    added = int(op.get_attr("new_axis_mask")) != 0
    return not added and bool(part.as_list()[0 if dropped else 1 :] == row)


def unchanged_input(op: tf.Operation) -> int | None:
    """Return the input that ``op`` returns unchanged because it adds zero or multiplies by one;
    ``None`` for all other ops."""
    if op.type not in _NEUTRAL:
        return None
    number, first_only = _NEUTRAL[op.type]
    inputs = op.inputs
    for k, other in ((0, 1),) if first_only else ((0, 1), (1, 0)):
        tensor = inputs[other]
        if (
            tensor.op.type == "Const"
            and tensor.shape.rank == 0
            and _number(tensor) == number
            and inputs[k].shape.is_fully_defined()
            and inputs[k].shape == op.outputs[0].shape
        ):
            return k
    return None


def _is_read_by_products(op: tf.Operation) -> bool:
    """Return whether an op transposes matrices, and grappler makes its readers transpose them."""
    readers = op.outputs[0].consumers()
    if not readers or op.outputs[0].dtype.is_complex:
        return False
    if any(reader.type not in _PRODUCTS for reader in readers):
        return False
    order = tf.get_static_value(op.inputs[1])
    if order is None or len(order) < 2:
        return False
    *outer, row, column = range(len(order))
    return [int(axis) for axis in order] == [*outer, column, row] and rewrites_arithmetic()


def rewrites_arithmetic() -> bool:
    """Return whether grappler will rewrite arithmetic, as far as is known here: a session may have
    options of its own."""
    options = tf.config.optimizer.get_experimental_options()
    off = options.get("disable_meta_optimizer", False)
    return bool(options.get("arithmetic_optimization", True)) and not off
