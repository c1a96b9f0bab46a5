"""Bytes of a tensor before it exists: *fixed + per_example × batch*.

A known shape gives fixed bytes; for an unknown shape, `graph_tools.ops.elements` bounds the number
of elements. The reserve space of a batch normalization has no shape, but its bytes are known. Where
oneDNN merges the op with a ReLU, the space holds a bit for each element. Eight bits are held in one
number of the space's type (measured with TensorFlow 2.21). Elsewhere it takes next to nothing.
Estimates steer choices only: no result ever depends on them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import tensorflow as tf

from graph_tools.ops import op_types
from graph_tools.ops.elements import elements
from graph_tools.tf_private import graphs

__all__ = ["Bytes", "is_guess", "tensor_bytes"]


class Bytes(NamedTuple):
    """Bytes as a function of the batch size.

    Examples
    --------
    >>> Bytes(fixed=0, per_example=4096).at(32)
    131072
    """

    fixed: int
    per_example: int

    def at(self, batch: int) -> int:
        """Return the bytes at a batch of ``batch`` examples."""
        return self.fixed + self.per_example * batch


def tensor_bytes(tensor: tf.Tensor) -> Bytes:
    """Return the bytes of the buffer that ``tensor`` will need.

    Strings, resources and variants count as zero: their buffers are not on the tensor's allocator.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     tensor_bytes(tf.zeros([8, 16]))
    ...     tensor_bytes(tf.compat.v1.placeholder(tf.float32, [None, 16]))
    Bytes(fixed=512, per_example=0)
    Bytes(fixed=0, per_example=64)
    """
    item = _item_bytes(tensor.dtype)
    if not item:
        return Bytes(0, 0)
    if tensor.shape.rank is None and _is_reserve(tensor):
        return _reserved_bytes(tensor)
    fixed, rate = elements(tensor)
    return Bytes(item * fixed, item * rate)


@cache
def _item_bytes(dtype: tf.DType) -> int:
    """Return the bytes of one element; 0 if its buffer is not the tensor's. (Reading a dtype takes
    10 µs.)"""
    base = dtype.base_dtype
    return 0 if base in (tf.string, tf.resource, tf.variant) else int(base.size)


def is_guess(tensor: tf.Tensor) -> bool:
    """Return whether more than the batch is unknown in the shape of ``tensor``."""
    if tensor.shape.rank is None:
        return not _is_reserve(tensor)
    return tensor.shape.as_list().count(None) > 1


def _is_reserve(tensor: tf.Tensor) -> bool:
    """Return whether a tensor of unknown rank is an op's reserve space for its gradient."""
    op = tensor.op
    return op.type in op_types.RESERVES and tensor.value_index == len(op.outputs) - 1


def _reserved_bytes(tensor: tf.Tensor) -> Bytes:
    item, output = tensor.dtype.base_dtype.size, tensor.op.outputs[0]
    readers = [op.type for op in output.consumers()]
    if readers != ["Relu"] or not graphs.has_onednn():
        return Bytes(item, 0)
    bits = output.dtype.base_dtype.size * 8
    return Bytes(*(size * item // bits for size in tensor_bytes(output)))
