"""Values that backward reads only in part, kept in bits: gradients stay the same, to the last
bit."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import one_of, slow
from tests.helpers.support import (
    Inputs,
    asking,
    assert_identical,
    assert_same,
    in_function,
    numbers,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
    pytest.mark.sampled,
]

KEEP = asking(planner="keep")
MODES = (KEEP, "memory", asking(max_slowdown=3.0))


def image(*, dynamic=False, side=32, values=None):
    x = numbers("x", 4, side, side, 3) if values is None else values
    return Inputs({"x": x}, dynamic=dynamic)


def convolution(p, h, name, width, stride=1):
    return tf.nn.conv2d(h, p.weight(name, 3, 3, h.shape[-1], width), stride, "SAME")


def pooled(p, pool, activate=tf.nn.relu, depth=4):
    h = p["x"]
    for k, width in enumerate((8, 16, 32, 64)[:depth]):
        h = activate(convolution(p, h, f"w{k}", width))
        h = pool(activate(convolution(p, h, f"v{k}", width)))
    return tf.reduce_sum(tf.square(h))


def both(p, gradients, pool, activate=tf.nn.relu, depth=4):
    loss = pooled(p, pool, activate, depth)
    return [loss, gradients(loss, p.all)]


def plans_of(outcomes, mode):
    """Return the last plan of each kind that was tried in a mode."""
    return [outcome.plans[-1] for (_, tried), outcome in outcomes.items() if tried == mode]


def same(program, inputs):
    """Return the outcomes of `assert_same`; in the fast suite for two modes, in one kind."""
    modes, kinds = [KEEP, *one_of(MODES[1:])], one_of(("session", "function"))
    return assert_same(program, inputs, modes=modes, kinds=kinds)


def tiles(h):
    return tf.nn.max_pool2d(h, 2, 2, "VALID")


@pytest.mark.parametrize("dynamic", [False, True])
def test_rectified_and_pooled(dynamic):
    def program(p, gradients):
        return both(p, gradients, tiles)

    outcomes = same(program, image(dynamic=dynamic, side=96))
    for plan in plans_of(outcomes, KEEP):
        assert plan.packed and plan.peak < 0.8 * plan.peak_plain
        # In smaller images, holes between chunks decide.
        assert plan.allocated < 0.85 * plan.allocated_plain


@pytest.mark.parametrize(
    "activate",
    [
        tf.nn.relu6,
        tf.nn.leaky_relu,
        tf.tanh,
        *slow(tf.identity, lambda h: tf.nn.relu(h) + 0.0),
    ],
)
def test_other_activations(activate):
    def program(p, gradients):
        return both(p, gradients, tiles, activate)

    same(program, image())


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: tf.nn.max_pool2d(h, 3, 2, "SAME"),
        lambda h: tf.nn.max_pool2d(h, 3, 3, "SAME"),
        lambda h: tf.nn.max_pool2d(h, [2, 4], [2, 4], "VALID"),
        lambda h: tf.nn.max_pool2d(h, 5, 5, "VALID"),
        lambda h: tf.nn.avg_pool2d(h, 2, 2, "VALID"),
        lambda h: tf.reduce_max(h, [1, 2], keepdims=True) + tiles(h)[:, :1],
    ],
)
def test_other_ways_to_pool(pool):
    def program(p, gradients):
        h = pool(tf.nn.relu(convolution(p, p["x"], "w", 16)))
        loss = tf.reduce_sum(tf.square(tf.nn.relu(convolution(p, h, "v", 16))))
        return [loss, gradients(loss, p.all)]

    same(program, image())


@pytest.mark.parametrize("value", [0.0, 1.0, *slow(-1.0)])
def test_ties(value):
    """If all elements are the same, the gradient goes to the first one, or is zero."""

    def program(p, gradients):
        h = tiles(tf.nn.relu(p["x"] * tf.reduce_mean(p.weight("w", 3)) ** 2))
        h = tiles(tf.nn.relu(tf.concat([h, -h, h * 0.0, h], -1)))
        loss = tf.reduce_sum(tf.square(h) + h)
        return [loss, gradients(loss, p.all)]

    same(program, image(values=np.full((8, 32, 32, 8), value, np.float32)))


def test_not_a_number_and_infinity():
    x = numbers("x", 8, 32, 32, 8)
    x[0, 3, 3], x[1, 5, 6], x[2, 7] = np.nan, np.inf, -np.inf

    def program(p, gradients):
        h = tiles(tf.nn.relu(p["x"] + 0.0 * tf.reduce_mean(p.weight("w", 3))))
        h = tiles(tf.nn.relu(tf.concat([h, -h], -1)))
        loss = tf.reduce_sum(h)
        return [gradients(loss, p.all)]

    same(program, image(values=x))


def test_pooled_and_read_by_others():
    """The gradient of the rectifier does not come from pooling alone."""

    def program(p, gradients):
        h = tf.nn.relu(convolution(p, p["x"], "w", 16))
        loss = tf.reduce_sum(tf.square(tiles(h))) + tf.reduce_sum(tiles(tf.concat([h, -h], -1)))
        return [loss, gradients(loss, p.all)]

    same(program, image())


def test_read_in_full_by_somebody():
    """If a convolution needs the numbers, signs are packed only for tensors that may decide the
    peak."""

    def program(p, gradients):
        h = p["x"]
        for k in range(20):
            h = tf.nn.relu(convolution(p, h, f"w{k}", 16))
        loss = tf.reduce_sum(tf.square(convolution(p, h, "v", 16)))
        return [loss, gradients(loss, p.all)]

    outcomes = assert_same(program, image(), modes=(KEEP,))
    assert not any(plan.packed for plan in outcomes["function", KEEP].plans)


def test_the_filter_goes_first_where_that_lets_go_of_much():
    """Of the first layers' input, its gradient and the gradient of their output, only two are alive
    together."""

    def program(p, gradients):
        h = tf.nn.relu(convolution(p, p["x"], "w", 64))
        h = tf.nn.relu(convolution(p, h, "v", 64))
        for k in range(2):
            h = tf.nn.relu(convolution(p, tf.nn.max_pool2d(h, 2, 2, "SAME"), f"u{k}", 64))
        loss = tf.reduce_sum(tf.square(h))
        return [loss, gradients(loss, p.all)]

    modes = [asking(max_slowdown=3.0, encode=encode) for encode in (None, "lossless")]
    outcomes = assert_same(program, image(side=64), modes=modes)
    whole, packed = (plans_of(outcomes, mode)[0] for mode in modes)
    assert packed.packed and packed.peak <= 0.95 * whole.peak


@pytest.mark.parametrize("dynamic", [False, True])
def test_rectified_and_dropped(dynamic):
    """The product behind dropout reads the dropped values, not the rectified ones."""

    def program(p, gradients):
        h = p["x"]
        for k in range(4):
            h = tf.nn.relu(tf.matmul(h, p.weight(f"w{k}", 256, 256)))
            h = tf.nn.experimental.stateless_dropout(h, 0.4, [1, k])
        loss = tf.reduce_sum(tf.square(h))
        return [loss, gradients(loss, p.all)]

    inputs = Inputs({"x": numbers("x", 64, 256)}, dynamic=dynamic)
    outcomes = same(program, inputs)
    assert all(plan.packed for plan in plans_of(outcomes, KEEP))


def test_indices():
    def program(p, gradients):
        h = tf.tanh(tf.matmul(p["x"], p.weight("w", 64, 200)))
        most, where = tf.math.top_k(h, 64)
        best = tf.gather(p.weight("v", 200, 128), tf.argmax(h, 1))
        loss = tf.reduce_sum(tf.square(most)) + tf.reduce_sum(tf.tanh(best))
        loss += tf.reduce_sum(tf.gather(tf.square(h), where, batch_dims=1))
        return [loss, gradients(loss, p.all)]

    inputs = Inputs({"x": numbers("x", 512, 64)})
    outcomes = same(program, inputs)
    assert all(plan.packed for plan in plans_of(outcomes, KEEP))


def test_pooled_with_places():
    def program(p, gradients):
        h = tf.nn.relu(convolution(p, p["x"], "w", 16))
        h, _ = tf.nn.max_pool_with_argmax(h, 2, 2, "VALID")
        loss = tf.reduce_sum(tf.square(h))
        return [loss, gradients(loss, p.all)]

    same(program, image())


def test_second_order():
    def program(p, gradients):
        loss = pooled(p, tiles)
        first = gradients(loss, p["x"])[0]
        return [first, gradients(tf.reduce_sum(tf.square(first)), p.all)]

    kinds = one_of(("session", "function"))
    assert_same(program, image(), modes=one_of((KEEP, "memory")), kinds=kinds)


@pytest.mark.parametrize(
    ("mode", "depth"),
    [(KEEP, 2), *(pytest.param(mode, 4, marks=pytest.mark.slow) for mode in MODES)],
)
def test_under_xla(mode, depth):
    def program(p, gradients):
        return both(p, gradients, tiles, depth=depth)

    plain = in_function(program, image(), jit_compile=True)
    ours = in_function(program, image(), mode, jit_compile=True)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        ours.results,
        plain.results,
    )


def test_nothing_is_encoded_where_that_is_asked_for():
    def program(p, gradients):
        return both(p, gradients, tiles)

    outcome = in_function(program, image(), asking(planner="keep", encode=None))
    assert not any(plan.packed for plan in outcome.plans)
    assert_identical(outcome.results, in_function(program, image()).results, "encode=None")


def test_the_graph_is_left_as_it_was_where_nothing_fits():
    def build(graph):
        x = tf.compat.v1.placeholder(tf.float32, [4, 32, 32, 3])
        w = tf.compat.v1.placeholder(tf.float32, [3, 3, 3, 16])
        return w, tf.reduce_sum(tf.square(tiles(tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME")))))

    with tf.Graph().as_default() as graph:
        w, loss = build(graph)
        before = {op.name: [t.name for t in op.inputs] for op in graph.get_operations()}
        with pytest.raises(ms.errors.BudgetError):
            ms.gradients(loss, w, budget=1000, batch_size=4)
        after = {op.name: [t.name for t in op.inputs] for op in graph.get_operations()}
    assert {name: after[name] for name in before} == before
