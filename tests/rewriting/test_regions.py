"""Regions of the backward pass under XLA: which ops may be in one."""

from __future__ import annotations

import pytest
import tensorflow as tf

from memsaving_gradients.rewriting.backends.regions import _movable

v1 = tf.compat.v1


@pytest.mark.parametrize("parted", [False, True])
def test_a_list_is_made_and_read_in_one_region(parted: bool) -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4])
        before = len(graph.get_operations())
        y = tf.tanh(x)
        items = tf.raw_ops.TensorListFromTensor(tensor=y, element_shape=tf.constant([], tf.int32))
        if parted:
            # A stateful op stays outside of regions, and parts them.
            tf.raw_ops.RandomUniform(shape=tf.constant([4]), dtype=tf.float32)
        stacked = tf.raw_ops.TensorListStack(
            input_handle=items, element_shape=tf.constant([], tf.int32), element_dtype=tf.float32
        )
        tf.exp(stacked)
        window = graph.get_operations()[before:]
    found = {op.type for op in _movable(window)}
    assert {"Tanh", "Exp"} <= found
    assert "RandomUniform" not in found
    assert ({"TensorListFromTensor", "TensorListStack"} <= found) is not parted
