"""Scratch space of kernels, compared with what the kernels allocate."""

from __future__ import annotations

import pytest
import tensorflow as tf

from graph_tools.costs import kernels
from graph_tools.costs.kernels import Input, Kernel
from graph_tools.costs.scratch import scratch_bytes
from graph_tools.memory.measure import in_fresh_process

#: Number of images, their side in pixels, channels in and out, window's side, stride, dtype.
CONVOLUTIONS = [
    (8, 32, 16, 32, 3, 1, "float32"),
    (64, 8, 8, 8, 3, 1, "float32"),  # a kernel could take more images at a time
    (1, 16, 32, 32, 5, 2, "float32"),
    (4, 14, 64, 64, 1, 1, "float64"),
]


def _allocated(op: tf.Operation) -> int:
    inputs = [Input(t.dtype, tuple(t.shape), tf.get_static_value(t)) for t in op.inputs]
    outputs = tuple((t.dtype, tuple(t.shape)) for t in op.outputs)
    kernel = Kernel(op.type, tuple(inputs), outputs, op.node_def.attr, op.op_def)
    found = kernels.measure(kernel, "CPU:0")
    assert found is not None
    return found.workspace


def _known_and_allocated(ops: list[tf.Operation]) -> list[tuple[str, int, int]]:
    return [(op.type, scratch_bytes(op, batch=1), _allocated(op)) for op in ops]


def convolutions() -> list[tuple[str, int, int]]:
    """Return op types, known and allocated bytes of gradients (in a process without oneDNN)."""
    ops = []
    with tf.Graph().as_default():
        for images, side, channels, made, window, stride, dtype in CONVOLUTIONS:
            x = tf.compat.v1.placeholder(dtype, [images, side, side, channels])
            w = tf.compat.v1.placeholder(dtype, [window, window, channels, made])
            dy = tf.compat.v1.placeholder(dtype, tf.nn.conv2d(x, w, stride, "SAME").shape)
            how = {"strides": [1, stride, stride, 1], "padding": "SAME", "out_backprop": dy}
            of_x = tf.raw_ops.Conv2DBackpropInput(input_sizes=x.shape, filter=w, **how)
            of_w = tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=w.shape, **how)
            ops += [of_x.op, of_w.op]
        volumes = tf.compat.v1.placeholder(tf.float32, [1, 16, 16, 16, 8])
        w = tf.compat.v1.placeholder(tf.float32, [3, 3, 3, 8, 8])
        of_volumes = tf.raw_ops.Conv3DBackpropInputV2(
            input_sizes=volumes.shape,
            filter=w,
            out_backprop=volumes,
            strides=[1] * 5,
            padding="SAME",
        )
        x = tf.compat.v1.placeholder(tf.float32, [8, 16, 16, 8])
        pooled = tf.compat.v1.placeholder(tf.float32, [8, 8, 8, 8])
        window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
        of_pooling = tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=pooled, grad=pooled, **window)
        return _known_and_allocated([*ops, of_volumes.op, of_pooling.op])


def test_gradients_of_convolutions_and_pooling():
    settings = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "0",  # its chunks may be larger than requests
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    found = in_fresh_process(f"{__name__}:convolutions", {}, settings)
    assert len(found) == 2 * len(CONVOLUTIONS) + 2
    for kind, known, allocated in found:
        assert known == allocated > 0, kind


@pytest.mark.parametrize("reduce", [tf.reduce_sum, tf.reduce_mean, tf.reduce_max])
@pytest.mark.parametrize("axes", [[0, 2], [0, 2, 4], [1, 3], [-1, 1], [0, 1, 2], [1], [2, 3]])
def test_reductions(reduce, axes):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 1, 6, 8, 1, 10])
        ((_, known, allocated),) = _known_and_allocated([reduce(x, axes).op])
    # The kernel also allocates a buffer for the result, and the allocator rounds up to chunks.
    assert known <= allocated <= known + 4096
