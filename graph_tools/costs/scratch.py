"""Scratch space of kernels: the bytes that TensorFlow's own kernels allocate in addition to their
outputs while they run, by the rules in their sources.

- A **reduction** with more than three alternating groups of kept and reduced axes transposes its
  input first (``reduction_ops_common.h``): as many bytes as the input, on every device. (Group
  normalization reduces axes 1, 2 and 4 of 5.)
- A **gradient of a convolution** on a CPU without oneDNN (it is off on CPUs without AVX512, and has
  no kernel for float64) unfolds images into columns. It unfolds so many at a time that the matrix
  product fills the third-level cache (``conv_grad_filter_ops.cc``, ``conv_grad_input_ops.h``,
  ``conv_grad_ops_3d.cc``). In two dimensions it assumes a cache of 30 MiB, and unfolds so many even
  if the batch is smaller: some 15 to 30 MB for tensors of a megabyte.
- **Max pooling's gradient** without oneDNN pools again, and stores the winners in 64 bits each.

The rules are exact except in three dimensions, where Eigen asks the processor for its cache. Other
kernels take a tenth of their outputs at most on a CPU. On a GPU, cuDNN chooses the convolutions'
bytes, which only :func:`graph_tools.costs.profiles.measured` finds. Cost: 5 µs for each such op.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import groupby

import tensorflow as tf

from graph_tools.costs.kernels import threads
from graph_tools.costs.parameters import known_shape
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

__all__ = ["scratch_bytes"]

#: Fact: bytes of the cache that convolutions in two dimensions assume.
CACHE = 30 << 20
#: Fact: bytes of a matrix product that is worth a thread of its own.
THREAD_CACHE = 256 << 10
#: Fact: a convolution in three dimensions unfolds nothing if the columns have more than this many
#: times the elements that it reads and writes.
MOST_UNFOLDED = 25
#: Fact: the most alternating groups of kept and reduced axes that need no transposition.
MOST_GROUPS = 3


def scratch_bytes(op: tf.Operation, batch: int) -> int:
    """Return the bytes that the kernel of ``op`` takes while it runs, in addition to its outputs,
    at a batch of ``batch`` examples; 0 if no rule is known.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.ones([8, 16, 16, 4, 32])
    ...     groups, whole = tf.reduce_mean(x, [1, 2, 4]), tf.reduce_mean(x, [1, 2])
    >>> scratch_bytes(groups.op, batch=8) == x.shape.num_elements() * 4
    True
    >>> scratch_bytes(whole.op, batch=8)
    0
    """
    if op.type in op_types.REDUCTIONS:
        return _transposed(op, batch)
    rule = _WITHOUT_ONEDNN.get(op.type)
    if rule is None or tf.config.list_logical_devices("GPU"):
        return 0
    if graphs.has_onednn() and op.outputs[0].dtype in (tf.float32, tf.bfloat16):
        return 0
    return rule(op, batch)


def _transposed(op: tf.Operation, batch: int) -> int:
    shape = known_shape(op.inputs[0], batch)
    if shape is None or len(shape) <= MOST_GROUPS:
        return 0
    axes = tf.get_static_value(op.inputs[1])
    if axes is None:
        return 0
    reduced = {int(axis) % len(shape) for axis in axes.flat}
    # An axis of one element counts with its neighbors.
    groups = groupby(axis in reduced for axis, size in enumerate(shape) if size != 1)
    if sum(1 for _ in groups) <= MOST_GROUPS:
        return 0
    return math.prod(shape) * int(op.inputs[0].dtype.size)


def _unfolded(op: tf.Operation, batch: int) -> int:
    of_filter = "Filter" in op.type
    filters = known_shape(op.outputs[0] if of_filter else op.inputs[1], batch)
    gradient = known_shape(op.inputs[2], batch)
    whole = known_shape(op.inputs[0] if of_filter else op.outputs[0], batch)
    if filters is None or gradient is None or whole is None:
        return 0
    if 0 in (*filters, *gradient, *whole):
        return 0
    images, *size, made = gradient
    columns, pixels = math.prod(filters[:-1]), math.prod(size)
    image = pixels * columns
    work = image + pixels * made + columns * made
    item = int(op.outputs[0].dtype.size)
    if len(size) == 2:
        # Gradients of images unfold one at a time if that keeps all threads busy.
        busy = work // threads() >= THREAD_CACHE // item
        one, cache = not of_filter and (images == 1 or busy), CACHE
    else:
        one, cache = images == 1, _third_level_cache()
    unfolded = image * (1 if one else -(-(cache // item) // work))
    read = math.prod(whole) + math.prod(filters) + math.prod(gradient)
    if len(size) == 3 and unfolded // read > MOST_UNFOLDED:
        return 0
    return unfolded * item


def _pooled_again(op: tf.Operation, batch: int) -> int:
    pooled = known_shape(op.inputs[1], batch)
    item = int(op.inputs[1].dtype.size)
    return 0 if pooled is None else math.prod(pooled) * (item + tf.int64.size)


_WITHOUT_ONEDNN: dict[str, Callable[[tf.Operation, int], int]] = {
    "Conv2DBackpropFilter": _unfolded,
    "Conv2DBackpropInput": _unfolded,
    "Conv3DBackpropFilterV2": _unfolded,
    "Conv3DBackpropInputV2": _unfolded,
    "MaxPoolGrad": _pooled_again,
}


def _third_level_cache() -> int:
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows, nor on macOS
        return CACHE
