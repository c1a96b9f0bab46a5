"""Large backward ops near the peak run one after the other, filter gradients among them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms

WIDTH, SIDE, ROWS, LAYERS = 48, 6, 4, 6
#: Each filter takes three times the bytes of a hidden value.
FILTER = [3, 3, WIDTH, WIDTH]


def images() -> tf.Tensor:
    return tf.random.stateless_normal([ROWS, SIDE, SIDE, WIDTH], [0, 1])


def trained(budget: float | None, *, biased: bool):
    """Return the variables after two steps, and the traced function.

    An update takes as much as three filters, so two updates that meet take as much as six.
    """
    filters = [
        tf.Variable(tf.random.stateless_normal(FILTER, [k, 0]) / (9 * WIDTH) ** 0.5)
        for k in range(LAYERS)
    ]
    biases = [tf.Variable(tf.zeros(WIDTH)) for _ in filters]
    squares = [tf.Variable(tf.zeros(FILTER)) for _ in filters]

    @tf.function(autograph=False)
    def step(h):
        with tf.GradientTape() as tape:
            for weights, bias in zip(filters, biases, strict=True):
                h = tf.nn.conv2d(h, weights, 1, "SAME")
                h = tf.tanh(tf.nn.bias_add(h, bias) if biased else h)
            loss = tf.reduce_mean(h * h)
        of_filters, of_biases = tape.gradient(loss, [filters, biases if biased else []])
        for weights, square, grad in zip(filters, squares, of_filters, strict=True):
            square.assign_add(0.1 * (grad * grad - square))
            weights.assign_sub(0.1 * grad / (tf.sqrt(square) + 1e-3))
        for bias, grad in zip(biases, of_biases, strict=False):
            bias.assign_sub(0.1 * grad)
        return loss

    with ms.patched(budget=budget) if budget else tf.name_scope(""):
        for _ in range(2):
            step(images())
    return [*filters, *biases, *squares], step


@pytest.mark.parametrize("biased", [True, False])
def test_filter_gradients_wait_for_the_update_before(exact, biased):
    """If oneDNN fuses a filter gradient with a bias gradient, ops that only it reads wait."""
    variables, step = trained(0.75, biased=biased)
    (plan,) = ms.plans(step)
    assert plan.whole_step <= plan.budget
    assert plan.clones
    for mine, theirs in zip(variables, trained(None, biased=biased)[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)
