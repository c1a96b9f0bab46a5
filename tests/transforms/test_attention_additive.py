"""Additive attention in blocks: the same results and gradients as from its formula."""

from __future__ import annotations

import pytest
import tensorflow as tf

from memsaving_gradients.transforms.attention import additive_attention
from memsaving_gradients.transforms.attention.additive import AdditiveScores
from memsaving_gradients.transforms.attention.attend import Kind, attend
from memsaving_gradients.transforms.attention.grid import Options
from tests.helpers.attention_cases import (
    additive,
    assert_close,
    compiled,
    eagerly,
    first_order,
    second_order,
    tensors,
)
from tests.helpers.sampling import covering
from tests.helpers.support import numbers


def additive_inputs(dtype=tf.float32):
    return tensors((2, 9, 6), (2, 7, 5), (2, 7, 6), (6,), dtype=dtype)


@pytest.mark.parametrize(
    ("cut", "order"),
    covering(
        [(None, tf.function), (4, eagerly), ((4, 3), tf.function), ((3, 4), compiled)],
        [first_order, second_order],
    ),
)
def test_additive(cut, order):
    block, how = cut
    inputs, mask = additive_inputs(), tf.constant(numbers("m", 2, 1, 7) > 0)
    ours = how(
        lambda *xs: order(lambda *ys: additive_attention(*ys, mask=mask, block=block), xs),
        autograph=False,
    )
    expected = order(lambda *ys: additive(*ys, mask=mask), inputs)
    assert_close(ours(*inputs), expected)


@pytest.mark.parametrize("order", [first_order, second_order])
def test_online_softmax_of_additive_scores(order):
    """The passes over blocks serve any scores, though `additive_attention` has a plain softmax."""
    kind = Kind("additive", AdditiveScores.of, Options(block=(4, 3)))
    query, value, key, scale = additive_inputs()
    mask = tf.constant(numbers("m", 2, 9, 7) > 0)

    def ours(*inputs):
        return attend(kind, inputs, masks=[mask])

    def plain(query, key, value, scale):
        return additive(query, value, key, scale, mask)

    inputs = [query, key, value, scale]
    assert_close(order(ours, inputs), order(plain, inputs))


def test_additive_without_key_scale_or_anything_to_see():
    query, value = tensors((2, 9, 5), (2, 7, 5))
    mask = tf.zeros([1, 1, 7], tf.bool)
    assert_close(additive_attention(query, value, block=3), additive(query, value))
    nothing = additive_attention(query, value, mask=mask)
    mean = tf.reduce_mean(value, 1, keepdims=True)
    assert_close(nothing, tf.broadcast_to(mean, nothing.shape))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_additive_other_dtypes(dtype):
    tolerance = {tf.float16: 5e-3, tf.bfloat16: 4e-2, tf.float64: 1e-12}[dtype]
    inputs = additive_inputs(dtype)
    found = first_order(lambda *xs: additive_attention(*xs, block=4), inputs)
    assert {x.dtype for x in found} == {dtype}
    wide = [tf.cast(x, tf.float64) for x in inputs]
    assert_close(found, first_order(additive, wide), tolerance)


def test_additive_unknown_lengths():
    specs = [tf.TensorSpec([None, None, n]) for n in (6, 5, 6)]

    @tf.function(input_signature=specs, autograph=False)
    def ours(query, value, key):
        with tf.GradientTape() as tape:
            tape.watch([query, value, key])
            loss = tf.reduce_sum(tf.square(additive_attention(query, value, key)))
        return tape.gradient(loss, [query, value, key])

    inputs = additive_inputs()[:3]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = tf.reduce_sum(tf.square(additive(*inputs)))
    assert_close(ours(*inputs), tape.gradient(loss, inputs))


def test_additive_scores_and_dropout():
    inputs = additive_inputs()
    _, plain = additive_attention(*inputs, return_scores=True)
    _, weights = additive_attention(*inputs, return_scores=True, dropout=0.5, seed=[1, 2])
    assert_close(tf.reduce_sum(plain, -1), tf.ones([2, 9]))
    kept = weights > 0
    assert 0.2 < float(tf.reduce_mean(tf.cast(kept, tf.float32))) < 0.8
    assert_close(weights, tf.where(kept, 2 * plain, 0))


def test_additive_forward_mode():
    inputs = additive_inputs()
    for x in inputs:
        ours, plain = (_slope(function, inputs, x) for function in (additive_attention, additive))
        assert_close(ours, plain)


def _slope(function, inputs, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        output = function(*inputs)
    return accumulator.jvp(output)
