"""Loops in all forms that TensorFlow allows: shapes and kinds of their states, what they read,
where they run."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.replayed_loops import (
    STEPS,
    WAYS,
    W,
    X,
    assert_same,
    looped,
    of_sum,
    replayed,
)
from tests.helpers.sampling import one_of, slow
from tests.helpers.support import assert_identical

pytestmark = [pytest.mark.usefixtures("exact"), pytest.mark.sampled]


def test_swapped_memory():
    assert_same(of_sum(lambda i, h: None, swap_memory=True))


@pytest.mark.parametrize("parallel", [64, *slow(1, 2)])
def test_parallel_iterations(parallel):
    assert_same(of_sum(lambda i, h: None, parallel_iterations=parallel))


@pytest.mark.parametrize("shape", ["grows", "shrinks", "another rank"])
def test_a_state_whose_shape_changes(shape):
    def program(gradients):
        def step(x, w):
            def body(i, h):
                if shape == "shrinks":
                    h = h[: tf.maximum(tf.shape(h)[0] - 1, 2)]
                elif shape == "grows":
                    h = tf.concat([h, x[:1]], 0)
                else:
                    h = tf.reshape(h, tf.where(i % 2 == 0, [1, -1, 8], [-1, 1, 8]))
                return i + 1, tf.tanh(tf.einsum("...i,ij->...j", h, w))

            start = tf.tile(x, [8, 1])
            if shape == "another rank":
                start, free = start[None], tf.TensorShape([None, None, 8])
            else:
                free = tf.TensorShape([None, 8])
            h = tf.while_loop(
                lambda i, _: i < STEPS,
                body,
                (0, start),
                shape_invariants=(tf.TensorShape([]), free),
            )[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)


def test_a_state_of_unknown_rank():
    def program(gradients):
        def step(x, w):
            def body(i, h):
                h = tf.tanh(tf.matmul(tf.reshape(h, [4, 8]), w))
                return i + 1, tf.cond(i % 2 == 0, lambda: tf.reshape(h, [-1]), lambda: h)

            h = tf.while_loop(
                lambda i, _: i < STEPS,
                body,
                (0, x),
                shape_invariants=(tf.TensorShape([]), tf.TensorShape(None)),
            )[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    # The number of its bytes is unknown, and a loop is replayed only if that saves bytes.
    assert_same(program, kept=None)


def _ragged(i, h, w):
    return h.with_flat_values(tf.tanh(tf.matmul(h.flat_values, w)))


def _complex(i, h, w):
    return 0.9 * h * tf.complex(tf.cos(w[:4]), tf.sin(w[4:]))


def _sparse(i, h, w):
    return tf.sparse.map_values(lambda v: tf.tanh(v * w[0, 0] + v), h)


VALUES = {
    "ragged": (lambda x: tf.RaggedTensor.from_row_lengths(tf.sin(x), [1, 0, 3]), _ragged),
    "complex": (lambda x: tf.complex(x, tf.sin(x)), _complex),
    "sparse": (lambda x: tf.sparse.from_dense(tf.sin(x)), _sparse),
    # With a known shape, a replay would save nothing, and the loop would stay.
    "no rows": (
        lambda x: tf.boolean_mask(tf.sin(x), tf.reduce_sum(x, 1) > 1e9),
        lambda i, h, w: tf.tanh(tf.matmul(h, w)),
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_states_of_other_kinds(kind):
    make, advance = VALUES[kind]

    def program(gradients):
        def step(x, w):
            body = lambda i, h: (i + 1, advance(i, h, w))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, make(x)))[1]
            values = {"ragged": "flat_values", "sparse": "values"}.get(kind)
            y = tf.abs(getattr(h, values) if values else h)
            return [y, *gradients(tf.reduce_sum(y), [x, w])]

        return step

    assert_same(program)


def test_a_string_beside_the_state():
    def program(gradients):
        def step(x, w):
            def body(i, text, h):
                scale = 1.0 + 0.01 * tf.cast(tf.strings.length(text), tf.float32)
                text = tf.strings.join([text, tf.strings.as_string(i)])
                return i + 1, text, scale * tf.tanh(tf.matmul(h, w))

            h = tf.while_loop(lambda i, *_: i < STEPS, body, (0, tf.constant("a"), x))[2]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)


def test_a_table_that_is_read():
    def program(gradients):
        values = tf.lookup.KeyValueTensorInitializer(tf.range(STEPS), tf.linspace(0.5, 1.0, STEPS))
        table = tf.lookup.StaticHashTable(values, 0.0)

        def step(x, w):
            body = lambda i, h: (i + 1, table.lookup(i) * tf.tanh(tf.matmul(h, w)))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)


@pytest.mark.parametrize("inner", ["layer", "loop"])
def test_gradients_in_the_body(inner):
    """The loop takes steps of a descent, and is itself differentiated."""

    def program(gradients):
        def step(x, w):
            def body(i, h):
                y = looped(h, w, steps=6) if inner == "loop" else tf.tanh(tf.matmul(h, w))
                return i + 1, h - 0.1 * tf.gradients(tf.reduce_sum(tf.square(y)), h)[0]

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
            return [h, *gradients(tf.reduce_sum(tf.square(h)), [x, w])]

        return step

    assert_same(program)


def test_several_devices_colocation_and_names():
    def program(gradients):
        def step(x, w):
            with tf.device("CPU:0"), tf.name_scope("scope"):
                h = looped(x, w)
            return [h, *gradients(tf.reduce_sum(h), [x, w], name="named")]

        return step

    assert_same(program)


def test_a_distribution_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def outcome(patched):
        with strategy.scope():
            weight = tf.Variable(W)

        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(looped(x, weight))
            grad = tape.gradient(loss, weight)
            weight.assign_sub(0.1 * grad)
            return grad

        @tf.function(autograph=False)
        def step(x):
            return strategy.run(replica, [x])

        with patched:
            found = [step(tf.constant(X)).numpy() for _ in range(2)]
        return [found, weight.numpy()], ms.plans(step)

    plain, _ = outcome(contextlib.nullcontext())
    for way in one_of(WAYS):
        found, plans = outcome(ms.patched(loops=way))
        assert_identical(found, plain, way)
        assert replayed(plans)


def test_a_loop_as_autograph_writes_it():
    def outcome(patched):
        @tf.function
        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                h, total = x, tf.zeros([4])
                for i in tf.range(40):
                    h = tf.tanh(tf.matmul(h, w))
                    if i % 5 == 0:
                        continue
                    total += tf.reduce_sum(h, 1)
                    if tf.reduce_sum(tf.square(h)) < 1e-3:
                        break
                loss = tf.reduce_sum(total)
            return [h, total, *tape.gradient(loss, [x, w])]

        with patched:
            found = [t.numpy() for t in step(tf.constant(X), tf.constant(W))]
        return found, ms.plans(step)

    plain, _ = outcome(contextlib.nullcontext())
    for way in one_of(WAYS):
        found, plans = outcome(ms.patched(loops=way))
        assert_identical(found, plain, way)
        assert replayed(plans)
