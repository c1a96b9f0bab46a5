"""The text that says why a plan saves nothing, and what to do."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.support import numbers


def warned(step) -> str:
    x, w = numbers("x", 256, 16), numbers("w", 16, 16)
    with pytest.warns(ms.errors.NothingSavedWarning) as found, ms.patched():
        tf.function(step, autograph=False).get_concrete_function(tf.constant(x), tf.constant(w))
    return str(found[-1].message)


def test_ops_that_must_not_run_twice():
    @tf.function
    def drawn(h):
        return tf.tanh(h) * tf.random.uniform(h.shape)

    def step(x, w):
        h = x
        for _ in range(4):
            h = drawn(tf.matmul(h, w))
        return tf.gradients(tf.reduce_sum(h), w)

    said = warned(step)
    assert "must not run twice (StatefulPartitionedCall); split these functions into" in said


def test_values_that_something_outside_of_the_gradients_reads():
    def step(x, w):
        with tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)) as forward:
            with tf.GradientTape() as tape:
                tape.watch(w)
                h = x
                for _ in range(4):
                    h = tf.tanh(tf.matmul(h, w))
                loss = tf.reduce_sum(h)
            gradient = tape.gradient(loss, w)
        return forward.jvp(gradient)

    said = warned(step)
    assert "whose clones might compute other bits (Tanh)" in said
    assert "must not run twice" not in said and "inline" not in said
