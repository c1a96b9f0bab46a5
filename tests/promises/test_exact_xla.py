"""Under ``jit_compile=True``: the same gradients to rounding, and clones that XLA does not
merge."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import covering, slow
from tests.helpers.support import numbers

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

DEPTH, WIDTH = 6, 64


def weights():
    return [tf.Variable(numbers(f"w{i}", WIDTH, WIDTH, scale=WIDTH**-0.5)) for i in range(DEPTH)]


def forward(x, ws, dropout=False):
    h = x
    for i, w in enumerate(ws):
        h = tf.tanh(tf.matmul(h, w))
        if dropout:
            h = tf.nn.experimental.stateless_dropout(h, 0.2, seed=[i, 1])
    return tf.reduce_sum(tf.square(h))


def compiled(differentiate, ws, dropout=False):
    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        return differentiate(lambda: forward(x, ws, dropout), [x, *ws])

    return step


def plain(loss, xs):
    return tf.gradients(loss(), xs)


def saving(mode):
    return lambda loss, xs: ms.gradients(loss(), xs, checkpoints=mode)


def taped(loss, xs):
    with tf.GradientTape() as tape:
        tape.watch(xs[0])
        y = loss()
    return tape.gradient(y, xs)


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        a, b = a.numpy(), b.numpy()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-30))


def count(step, x, op):
    text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    return len(re.findall(rf"= \S+ {op}\(", text))


def matmuls(step, x):
    """Return the number of matrix products, in all forms that XLA writes on this machine."""
    text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    return len(re.findall(r"= \S+ (?:dot\(|custom-call\(.*(?:[mM]at[mM]ul|gemm|dot))", text))


@pytest.mark.parametrize(("mode", "dropout"), covering(["memory", None], [False, True]))
def test_gradients(mode, dropout):
    ws, x = weights(), tf.constant(numbers("x", 128, WIDTH))
    expected = compiled(plain, ws, dropout)
    ours = compiled(saving(mode), ws, dropout)
    assert_near(ours(x), expected(x))
    (plan,) = ms.plans(ours)
    assert plan.gating == "data" and plan.clones
    assert count(ours, x, "tanh") > count(expected, x, "tanh")
    assert matmuls(ours, x) > matmuls(expected, x)


def test_tape():
    ws, x = weights(), tf.constant(numbers("x", 128, WIDTH))
    expected, ours = compiled(taped, ws), compiled(taped, ws)
    want = expected(x)
    with ms.patched(checkpoints="memory"):
        found = ours(x)
    assert_near(found, want)
    assert ms.plans(ours)[-1].gating == "data"
    assert count(ours, x, "tanh") > count(expected, x, "tanh")


def test_convolutions_and_pooling():
    kernels = [
        tf.Variable(numbers(f"k{i}", 3, 3, 3 if i == 0 else 8, 8, scale=0.2)) for i in range(5)
    ]

    def loss(x):
        h = x
        for i, k in enumerate(kernels):
            h = tf.nn.relu(tf.nn.conv2d(h, k, 1, "SAME"))
            h = tf.nn.max_pool2d(h, 2, 2, "SAME") if i in (1, 3) else h
        return tf.reduce_mean(tf.square(h))

    @tf.function(jit_compile=True, autograph=False)
    def ours(x):
        return ms.gradients(loss(x), [x, *kernels], checkpoints="speed")

    @tf.function(jit_compile=True, autograph=False)
    def expected(x):
        return tf.gradients(loss(x), [x, *kernels])

    x = tf.constant(numbers("images", 4, 16, 16, 3))
    assert_near(ours(x), expected(x))


def test_the_embedded_zero_does_not_spread_what_is_not_a_number():
    ws, x = weights(), tf.constant(numbers("x", 128, WIDTH))
    x = tf.tensor_scatter_nd_update(x, [[0, 0]], [float("nan")])
    expected, ours = compiled(plain, ws)(x), compiled(saving("memory"), ws)(x)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a.numpy()), np.isnan(b.numpy()))


@pytest.mark.parametrize("depth", [6, *slow(24)])
def test_gradients_of_a_residual_stream_are_computed_once(depth):
    """XLA fuses the whole sum into each of its readers unless something stops it: quadratic in the
    depth."""

    def additions(depth):
        ws = [tf.Variable(numbers(f"w{i}", 32, 32, scale=0.2)) for i in range(depth)]

        def loss(x):
            for w in ws:
                mean, variance = tf.nn.moments(x, [0], keepdims=True)
                normal = (x - mean) * tf.math.rsqrt(variance + 1e-3)
                x = x + tf.matmul(tf.nn.relu(normal), w)
            return tf.reduce_sum(x * x)

        def step(differentiate):
            @tf.function(jit_compile=True, autograph=False)
            def step(x):
                return differentiate(lambda: loss(x), ws)

            return step

        x = tf.constant(numbers("x", 64, 32))
        ours = step(saving("memory"))
        assert_near(ours(x), step(plain)(x))
        return count(ours, x, "add")

    assert additions(2 * depth) <= 2.8 * additions(depth)


def test_second_order():
    ws, x = weights(), tf.constant(numbers("x", 128, WIDTH))

    def twice(loss, xs, gradients):
        first = gradients(loss(), xs)
        return gradients(sum(tf.reduce_sum(g**2) for g in first), xs)

    expected = compiled(lambda loss, xs: twice(loss, xs, tf.gradients), ws)
    ours = compiled(lambda loss, xs: twice(loss, xs, ms.gradients), ws)
    assert_near(ours(x), expected(x))


def test_penalties_of_nested_tapes():
    """The outer tape differentiates the op that replaces the inner tape's gradient."""
    ws, x = weights(), numbers("x", 8, WIDTH)

    def penalty(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                loss = forward(x, ws)
                # A sum of many addends, which may become a chain.
                long = tf.add_n([tf.reduce_sum(tf.sin(x * scale)) for scale in range(1, 13)])
            gradients = [inner.gradient(loss, x), inner.gradient(long, x)]
            penalty = tf.add_n([tf.reduce_sum(tf.square(one)) for one in gradients])
        return outer.gradient(penalty, [x, *ws])

    expected = tf.function(penalty, jit_compile=True)(x)
    for mode in ("memory", None):
        step = tf.function(lambda x: penalty(x), jit_compile=True, autograph=False)
        with ms.patched(checkpoints=mode):
            assert_near(step(x), expected)
        assert len(ms.plans(step)) > 1


def test_what_is_allocated_is_one_buffer():
    ws, x = weights(), tf.constant(numbers("x", 128, WIDTH))
    ours = compiled(saving("memory"), ws)
    ours(x)
    (plan,) = ms.plans(ours)
    for peak, allocated in (
        (plan.peak, plan.allocated),
        (plan.peak_plain, plan.allocated_plain),
    ):
        assert peak <= allocated < 2 * peak + 256


def test_complex_clones_survive():
    ws = [tf.constant(numbers(f"w{i}", 32, 32, scale=0.1) + 0.1j, tf.complex64) for i in range(8)]

    def loss(z):
        for w in ws:
            z = z + 0.1 * tf.sin(z @ w)
        return z

    def step(gradients):
        @tf.function(jit_compile=True, autograph=False)
        def step(z):
            y = loss(z)
            return gradients(y, [z], grad_ys=tf.ones_like(y))

        return step

    z = tf.constant(numbers("z", 64, 32) + 0.3j, tf.complex64)
    expected, ours = step(tf.gradients), step(ms.gradients)
    assert_near([tf.abs(g) for g in ours(z)], [tf.abs(g) for g in expected(z)])
    assert matmuls(ours, z) > matmuls(expected, z)


def test_vectorized_gradients_are_plain_with_a_warning():
    ws, x = weights(), tf.constant(numbers("x", 4, WIDTH))

    def step(gradients):
        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            return tf.vectorized_map(lambda v: gradients(forward(v[None], ws), v)[0], x)

        return step

    with pytest.warns(ms.errors.NothingSavedWarning, match="vectorized"):
        found = step(ms.gradients)(x)
    assert_near([found], [step(tf.gradients)(x)])


def test_sums_that_were_replaced_stay_replaced():
    w, x = tf.constant(numbers("w", 32, 32, scale=0.2)), tf.constant(numbers("x", 64, 32))

    def loss(h):
        for _ in range(3):
            h = h + tf.tanh(h @ w)
            h = tf.add_n([tf.sin(h @ (w + 0.1 * k)) for k in range(12)]) * 0.3
        return tf.reduce_sum(h**2)

    @tf.function(jit_compile=True, autograph=False)
    def ours(x):
        return ms.gradients(loss(x), [x])

    @tf.function(jit_compile=True, autograph=False)
    def expected(x):
        return tf.gradients(loss(x), [x])

    assert_near(ours(x), expected(x))
    operations = ours.get_concrete_function(x).graph.get_operations()
    sums = [op for op in operations if op.type == "AddN" and len(op.inputs) >= 10]
    replaced = [op for op in sums if not op.outputs[0].consumers()]
    assert len(replaced) == 3


@pytest.mark.parametrize("gives", ["output_gradients", "grad_ys", "a custom gradient"])
def test_what_is_captured_while_gradients_are_built(gives):
    """A tensor from outside that the forward pass does not read becomes an input of the function.
    The input is created among the backward ops."""
    ws, x = weights(), numbers("x", 32, WIDTH)
    given = tf.constant(numbers("given", 32, WIDTH))

    @tf.custom_gradient
    def scaled(h):
        return h, lambda upstream: upstream * given

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in ws:
                h = tf.tanh(h @ w)
            if gives == "a custom gradient":
                h = scaled(h)
        if gives == "grad_ys":
            return tf.gradients(h, ws, grad_ys=given)
        upstream = given if gives == "output_gradients" else None
        return tape.gradient(h, ws, output_gradients=upstream)

    expected = tf.function(step, jit_compile=True)(x)
    with ms.patched(checkpoints=None):
        ours = tf.function(step, jit_compile=True)
        assert_near(ours(x), expected)
    assert ms.plans(ours)[-1].clones


def test_depthwise_filters_of_half_precision():
    """The products are smaller than any number of 16 bits; their sum is not."""
    ws = [
        tf.Variable(tf.cast(numbers(f"w{i}", 3, 3, 4, 1, scale=0.3), tf.float16)) for i in range(8)
    ]
    x = tf.cast(tf.abs(numbers("x", 2, 16, 16, 4, scale=0.01)), tf.float16)

    def step(gradients):
        def compute(x):
            h = x
            for w in ws:
                h += tf.nn.relu(tf.nn.depthwise_conv2d(h, w, [1] * 4, "SAME"))
            return gradients(tf.reduce_sum(h * tf.constant(2e-6, tf.float16)), ws)

        return tf.function(compute, jit_compile=True, autograph=False)

    ours = step(lambda loss, ws: ms.gradients(loss, ws, checkpoints=None))
    for mine, theirs in zip(ours(x), step(tf.gradients)(x), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-3 * np.abs(theirs).max())
