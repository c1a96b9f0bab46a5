"""Tensors that are kept on another device: they take no memory here, and a copy back is no view.

TensorFlow moves a tensor between devices when an op on one reads an op on the other. Identities on
both sides make a copy out and a copy back. Grappler removes identities, so these are protected. A
private attribute marks the ops whose outputs are kept elsewhere, so that captured graphs know them.
"""

from __future__ import annotations

import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = ["copy_back", "copy_out", "is_elsewhere", "stays_elsewhere"]

_MARK = "_kept_elsewhere"


def copy_out(tensor: tf.Tensor, device: str, name: str) -> tf.Tensor:
    """Return a copy of ``tensor`` on another device."""
    with tf.device(None), tf.device(device):
        copy = tf.raw_ops.Identity(input=tensor, name=name)
    graphs.protect(copy.op)
    return stays_elsewhere(copy)


def stays_elsewhere(tensor: tf.Tensor) -> tf.Tensor:
    """Mark ``tensor`` as one that takes no memory here, and return it."""
    graphs.set_attribute(tensor.op, _MARK, tf.compat.v1.AttrValue(b=True))
    return tensor


def copy_back(tensor: tf.Tensor, device: str, name: str) -> tf.Tensor:
    """Return a copy on ``device`` of a tensor that is kept elsewhere."""
    with tf.device(None), tf.device(device or None):
        copy = tf.raw_ops.Identity(input=tensor, name=name)
    graphs.protect(copy.op)
    return copy


def is_elsewhere(op: tf.Operation) -> bool:
    """Return whether the output of ``op`` is marked as one that takes no memory here.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     out = copy_out(x, "/job:host/device:CPU:0", "out")
    ...     back = copy_back(out, "/device:CPU:0", "back")
    >>> is_elsewhere(out.op), is_elsewhere(back.op)
    (True, False)
    """
    # Reading a device is cheap, reading attributes is not.
    return op.type == "Identity" and bool(op.device) and _MARK in op.node_def.attr
