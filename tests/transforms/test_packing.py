"""Dropout masks kept in bits."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import NothingSavedWarning
from memsaving_gradients.keras import MemorySavingGradients
from memsaving_gradients.transforms.packing.packing import _pack, _unpack
from tests.helpers.sampling import slow
from tests.helpers.support import Inputs, assert_identical, assert_same, in_session, numbers

v1 = tf.compat.v1

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")


@pytest.mark.parametrize("shape", [[8], [4, 6, 8], [3, 5, 16], [64], [2, 4096]])
def test_nothing_is_lost(shape):
    mask = tf.constant(numbers("mask", *shape) > 0.3)
    packed = _pack(mask)
    bits = packed.shape.num_elements() * packed.dtype.size * 8
    assert packed.dtype.is_integer and bits == mask.shape.num_elements()
    np.testing.assert_array_equal(_unpack(packed, mask).numpy(), mask.numpy())


def dropping(p, width=256, layers=6, **kwargs):
    h = p["x"]
    for i in range(layers):
        h = tf.tanh(tf.matmul(h, p.weight(f"w{i}", width, width)))
        h = tf.nn.dropout(h, 0.4, **kwargs)
    return tf.reduce_sum(tf.square(h))


def data(width=256, *, dynamic=False):
    return Inputs({"x": numbers("x", 32, width)}, dynamic=dynamic)


def program(p, gradients):
    loss = dropping(p)
    return [loss, gradients(loss, p.all)]


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [True, *slow(False)])
def test_gradients_are_the_same(dynamic):
    assert_same(program, data(dynamic=dynamic), modes=("memory", "speed", None), steps=3)


def test_masks_take_an_eighth():
    plan = in_session(program, data(), "memory").plans[-1]
    masks = [d for d in plan.decisions if d.reason == "mask, in bits"]
    assert len(masks) >= 2  # masks of the last segment are not lost, so not needed
    assert {d.bytes for d in masks} == {32 * 256 // 8}
    assert not any(d.op_type == "GreaterEqual" for d in plan.decisions)


@pytest.mark.parametrize("width", [17, *slow(3)])
def test_odd_masks_are_left_alone(width):
    def odd(p, gradients):
        loss = dropping(p, width)
        return [loss, gradients(loss, p.all)]

    inputs = Inputs({"x": numbers("x", 31, width)})
    assert not any(
        d.reason == "mask, in bits" for d in in_session(odd, inputs, "memory").plans[-1].decisions
    )
    assert_same(odd, inputs, modes=("memory",))


def test_a_mask_that_the_user_reads_as_well():
    def shared(p, gradients):
        keep = tf.random.uniform([32, 256], seed=5) > 0.5
        h = p["x"]
        for i in range(6):
            h = tf.where(keep, tf.tanh(tf.matmul(h, p.weight(f"w{i}", 256, 256))), h)
        found = gradients(tf.reduce_sum(h), p.all)
        return [h, found, tf.reduce_sum(tf.cast(keep, tf.float32))]

    assert_same(shared, data(), modes=("memory",))


def test_second_order():
    def twice(p, gradients):
        loss = dropping(p, layers=4, seed=3)
        first = gradients(loss, p["x"])[0]
        return [first, gradients(tf.reduce_sum(tf.square(first)), p.all)]

    assert_same(twice, data(), modes=("memory",))


def test_where_nothing_is_saved_the_graph_stays_as_it_was():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [64, 256])
        y = tf.reduce_sum(tf.nn.dropout(x, 0.5))
        before = {op.name: [t.name for t in op.inputs] for op in graph.get_operations()}
        with pytest.warns(NothingSavedWarning):
            ms.gradients(y, x, checkpoints="memory")
        after = {op.name: [t.name for t in op.inputs] for op in graph.get_operations()}
        assert {name: after[name] for name in before} == before


@pytest.mark.usefixtures("exact")
def test_fit_with_dropout():
    def trained(callbacks):
        keras.utils.set_random_seed(3)
        layers = [
            layer
            for _ in range(5)
            for layer in (keras.layers.Dense(256, "tanh"), keras.layers.Dropout(0.3))
        ]
        model = keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        x, y = numbers("features", 96, 16), numbers("targets", 96, 1)
        model.fit(x, y, 32, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    callback = MemorySavingGradients("memory")
    assert_identical(trained([callback]), trained([]), "weights")
    assert len(callback.plans) == 1, "traced more than once"


def pyramid(pooled):
    """Return a loss of poolings of one tensor with windows of two sizes."""
    return [tf.reduce_sum(tf.sin(pooled(2)) ** 2) + tf.reduce_sum(tf.exp(pooled(4)))]


def twice(pooled):
    """Return two losses of one pooling, each of which is differentiated by a call."""
    once = pooled(2)
    return [tf.reduce_sum(tf.sin(once)), tf.reduce_sum(tf.exp(once))]


def again(pooled):
    """Return a loss of two poolings of one tensor with the same windows."""
    return [tf.reduce_sum(tf.sin(pooled(2))) + tf.reduce_sum(tf.exp(pooled(2)))]


@pytest.mark.parametrize("losses", [pyramid, twice, again])
def test_several_gradients_of_pooling_read_one_tensor(exact, losses):
    """Gradients with equal windows share their winners; others have their own."""
    filters = [tf.constant(numbers(f"filter {k}", 3, 3, 4, 4)) for k in range(3)]
    images = tf.constant(numbers("images", 4, 16, 16, 4))

    def gradients(*, plain: bool):
        @tf.function(autograph=False)
        def step(h):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(filters)
                for weights in filters:
                    h = tf.nn.relu(tf.nn.conv2d(h, weights, 1, "SAME"))
                found = losses(lambda size: tf.nn.max_pool2d(h, size, size, "VALID"))
            return [tape.gradient(loss, filters) for loss in found]

        with tf.name_scope("") if plain else ms.patched(checkpoints="memory"):
            return tf.nest.flatten(step(images)), ms.plans(step)

    ours, plans = gradients(plain=False)
    assert plans
    assert_identical(ours, gradients(plain=True)[0], losses.__name__)
