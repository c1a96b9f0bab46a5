"""Static costs: floating point operations from shapes, and estimated seconds from these and
bytes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from graph_tools import capture
from graph_tools.costs import estimates

v1 = tf.compat.v1


def types(found):
    return [op.type for op in found.ops]


def place(*shape, dtype=tf.float32):
    return v1.placeholder(dtype, shape)


def seconds_of(*tensors, batch=1):
    """Return the estimated seconds of the ops that make ``tensors``."""
    found = capture(tensors)
    seconds = estimates.op_seconds(found, batch)
    return [float(seconds[found.position[t.op.name]]) for t in tensors]


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("m", "k", "n"), [(8, 16, 4), (1, 1, 1), (3, 5, 7), (128, 64, 1)])
def test_flops_of_matrix_products_are_exact(graph, m, k, n, ta, tb):
    a = v1.placeholder(tf.float32, [k, m] if ta else [m, k])
    b = v1.placeholder(tf.float32, [n, k] if tb else [k, n])
    assert estimates.op_flops(tf.matmul(a, b, ta, tb).op, 1) == pytest.approx(
        2 * m * k * n, rel=1e-12
    )


def test_flops_of_batched_products_are_exact(graph):
    a = v1.placeholder(tf.float32, [None, 3, 8, 16])
    b = v1.placeholder(tf.float32, [None, 3, 16, 4])
    assert estimates.op_flops(tf.matmul(a, b).op, 5) == pytest.approx(
        5 * 3 * 2 * 8 * 16 * 4, rel=1e-12
    )
    product = tf.einsum(
        "abc,cd->abd", v1.placeholder(tf.float32, [2, 3, 4]), v1.placeholder(tf.float32, [4, 5])
    )
    einsum = next(op for op in capture([product]).ops if op.type in ("Einsum", "MatMul"))
    assert estimates.op_flops(einsum, 1) == pytest.approx(2 * 2 * 3 * 4 * 5, rel=1e-12)


def test_flops_of_a_product_with_a_broadcast_batch_are_exact(graph):
    a = v1.placeholder(tf.float32, [6, 8, 16])
    b = v1.placeholder(tf.float32, [16, 4])
    assert estimates.op_flops(tf.raw_ops.BatchMatMulV2(x=a, y=b).op, 1) == pytest.approx(
        6 * 2 * 8 * 16 * 4, rel=1e-12
    )


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_flops_of_convolutions_and_their_gradients_are_exact(graph, stride, padding):
    x = v1.placeholder(tf.float32, [None, 9, 11, 3])
    w = v1.placeholder(tf.float32, [3, 2, 3, 5])
    y = tf.nn.conv2d(x, w, stride, padding)
    batch = 7
    out = batch * int(np.prod(y.shape[1:]))
    expected = 2 * out * 3 * 2 * 3
    assert estimates.op_flops(y.op, batch) == expected
    for grad in tf.gradients(y, [x, w]):
        assert "Backprop" in grad.op.type
        assert estimates.op_flops(grad.op, batch) == expected, grad.op.type


def test_flops_of_depthwise_convolutions_and_their_gradients_are_exact(graph):
    x = v1.placeholder(tf.float32, [4, 8, 8, 3])
    w = v1.placeholder(tf.float32, [3, 3, 3, 2])
    y = tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME")
    expected = 2 * 4 * 8 * 8 * 6 * 9
    assert estimates.op_flops(y.op, 1) == expected
    for grad in tf.gradients(y, [x, w]):
        assert estimates.op_flops(grad.op, 1) == expected, grad.op.type


def test_flops_of_three_dimensional_convolutions_and_their_gradients_are_exact(graph):
    x = v1.placeholder(tf.float32, [2, 4, 6, 6, 3])
    w = v1.placeholder(tf.float32, [2, 3, 3, 3, 5])
    y = tf.nn.conv3d(x, w, [1, 1, 1, 1, 1], "SAME")
    expected = 2 * (2 * 4 * 6 * 6 * 5) * (2 * 3 * 3 * 3)
    assert estimates.op_flops(y.op, 1) == expected
    for grad in tf.gradients(y, [x, w]):
        assert estimates.op_flops(grad.op, 1) == expected, grad.op.type


def test_views_and_sources_take_no_time(graph):
    x = v1.placeholder(tf.float32, [128, 128])
    y = tf.matmul(tf.reshape(tf.tanh(x), [128, 128]), tf.identity(x))
    found = capture([y])
    seconds = dict(zip(types(found), estimates.op_seconds(found, 1), strict=True))
    assert (
        seconds["Placeholder"] == seconds["Reshape"] == seconds["Identity"] == seconds["Const"] == 0
    )
    assert 0 < seconds["Tanh"] < seconds["MatMul"]


def test_what_is_taken_out_or_looks_at_a_part_takes_no_time(graph):
    x = tf.tanh(v1.placeholder(tf.float32, [128, 128]))
    found = capture([x * 1.0 + 0.0, x[:64], x[:, :64], x * 2.0])
    seconds = dict(zip((op.name for op in found.ops), estimates.op_seconds(found, 1), strict=True))
    assert seconds["mul"] == seconds["add"] == seconds["strided_slice"] == 0
    assert seconds["strided_slice_1"] > 0 < seconds["mul_1"]


def test_time_grows_with_the_batch(graph):
    x = v1.placeholder(tf.float32, [None, 128])
    found = capture([tf.tanh(tf.matmul(x, v1.placeholder(tf.float32, [128, 128])))])
    assert estimates.op_seconds(found, 64).sum() > 2 * estimates.op_seconds(found, 8).sum()


def test_an_op_without_outputs_costs_nothing(graph):
    assert estimates.op_flops(tf.no_op(), 1) == 0.0


LABELS = [
    # equation, shapes, combinations of labels
    ("ij,jk->ik", [(5, 7), (7, 3)], 5 * 7 * 3),
    ("bhqd,bhkd->bhqk", [(2, 4, 8, 16), (2, 4, 9, 16)], 2 * 4 * 8 * 9 * 16),
    ("abc,cd->abd", [(None, 3, 4), (4, 5)], 6 * 3 * 4 * 5),
    ("...ij,...jk->...ik", [(2, 3, 5, 7), (7, 4)], 2 * 3 * 5 * 7 * 4),
    ("...ij,...jk->...ik", [(3, 5, 7), (2, 3, 7, 4)], 2 * 3 * 5 * 7 * 4),
    ("i...,i...->...", [(9, 2, 3), (9, 2, 3)], 9 * 2 * 3),
    ("i,j->ij", [(9,), (11,)], 9 * 11),
    ("bij,bij->b", [(4, 5, 6), (4, 5, 6)], 4 * 5 * 6),
]


@pytest.mark.parametrize(("equation", "shapes", "combinations"), LABELS)
def test_an_einsum_multiplies_once_for_each_combination_of_its_labels(
    graph, equation, shapes, combinations
):
    op = tf.raw_ops.Einsum(inputs=[place(*shape) for shape in shapes], equation=equation).op
    assert estimates.op_flops(op, 6) == 2 * combinations


def test_an_einsum_of_one_tensor_multiplies_nothing(graph):
    op = tf.raw_ops.Einsum(inputs=[place(5, 7)], equation="ij->ji").op
    assert estimates.op_flops(op, 1) == 35


def test_einsum_and_matrix_product_agree(graph):
    a, b = place(3, 40, 50), place(3, 50, 60)
    einsum = tf.raw_ops.Einsum(inputs=[a, b], equation="bij,bjk->bik").op
    assert estimates.op_flops(einsum, 1) == estimates.op_flops(
        tf.raw_ops.BatchMatMulV2(x=a, y=b).op, 1
    )


def test_recurrent_kernels_multiply_every_row_with_every_weight(graph):
    steps, batch, inputs, hidden = 7, 3, 5, 11
    lstm = tf.raw_ops.BlockLSTMV2(
        seq_len_max=tf.constant(steps, tf.int64),
        x=place(steps, batch, inputs),
        cs_prev=place(batch, hidden),
        h_prev=place(batch, hidden),
        w=place(inputs + hidden, 4 * hidden),
        wci=place(hidden),
        wcf=place(hidden),
        wco=place(hidden),
        b=place(4 * hidden),
    )
    flops = 2 * steps * batch * (inputs + hidden) * 4 * hidden
    assert estimates.op_flops(lstm.h.op, 1) == flops


def test_a_window_is_read_for_each_pooled_element(graph):
    x = place(2, 8, 8, 4)
    pooled = tf.nn.max_pool2d(x, 3, 2, "SAME")
    assert estimates.op_flops(pooled.op, 1) == 2 * 4 * 4 * 4 * 9
    (grad,) = tf.gradients(pooled, [x])
    assert estimates.op_flops(grad.op, 1) == estimates.op_flops(pooled.op, 1)


def test_an_op_takes_what_its_traffic_or_its_products_need(graph):
    x, narrow, wide = place(1024, 64), place(64, 1), place(64, 4096)
    traffic, products, sum_, added = seconds_of(x @ narrow, x @ wide, tf.reduce_sum(x, 0), x + x)
    start = estimates.START_SECONDS
    assert traffic - start == pytest.approx(
        4 * (1024 * 64 + 64 + 1024) / estimates.BYTES_PER_SECOND
    )
    assert products - start == pytest.approx(2 * 1024 * 64 * 4096 / estimates.FLOPS_PER_SECOND)
    assert added - start == pytest.approx(4 * 3 * 1024 * 64 / estimates.BYTES_PER_SECOND)
    assert sum_ > start + 4 * 1024 * 64 / estimates.BYTES_PER_SECOND


def test_transcendental_functions_reductions_and_normalizations_cost_more_than_their_bytes(graph):
    x = place(64, 32, 32, 16)
    channel = place(16)
    normal = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=channel, offset=channel, mean=channel, variance=channel
    )
    relu, tanh, softmax, transposed, normal_, product = seconds_of(
        tf.nn.relu(x),
        tf.tanh(x),
        tf.nn.softmax(x),
        tf.transpose(x, [0, 3, 1, 2]),
        normal.y,
        tf.nn.conv2d(x, place(3, 3, 16, 128), 1, "SAME"),
    )
    assert relu < min(tanh, softmax, transposed, normal_)
    assert max(tanh, softmax, transposed, normal_) < product


def test_variables_are_read_though_they_cost_no_memory(graph):
    x, weights = place(1, 4096), tf.Variable(tf.zeros([4096, 4096]))
    (seconds,) = seconds_of(x @ weights)
    assert seconds > 4 * 4096 * 4096 / estimates.BYTES_PER_SECOND


def test_what_is_folded_takes_no_time(graph):
    x = place(8, 8)
    constant = tf.exp(tf.ones([8, 8])) + tf.cast(tf.size(x), tf.float32)
    found = capture([x * constant])
    seconds = dict(zip(types(found), estimates.op_seconds(found, 1), strict=True))
    assert seconds["Exp"] == seconds["AddV2"] == 0 < seconds["Mul"]


def test_readers_of_shapes_take_no_longer_for_larger_tensors(graph):
    small, large = v1.placeholder(tf.float32, [None, 4]), v1.placeholder(tf.float32, [None, 4000])
    first, second = seconds_of(tf.shape(small), tf.shape(large), batch=100)
    assert first == second > 0


def test_costs_of_a_long_chain_are_linear(graph):
    def spent(length):
        """Return the least time of three, as other processes may run at the same time."""
        x = place(4, 4)
        for _ in range(length):
            x = tf.raw_ops.Tanh(x=x)
        found = capture([x])
        times = []
        for _ in range(3):
            start = time.process_time()
            seconds = estimates.op_seconds(found, 1)
            times.append(time.process_time() - start)
        assert np.ptp(seconds[1:]) == 0
        return min(times)

    short = spent(500)
    assert spent(5000) <= 25 * short
