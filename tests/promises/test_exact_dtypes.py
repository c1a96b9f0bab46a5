"""Gradients have the same bits in every number type that TensorFlow can differentiate."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.helpers.support import Inputs, Net, assert_same_gradients, numbers

KINDS = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_products_with_constants(kind):
    """Grappler makes one product of two constants that follow each other; no copy may separate
    them."""

    def build(p):
        h = tf.cast(p["x"], kind)
        for _ in range(3):
            h = tf.tanh(h * 0.1) * 0.7
        return Net(tf.reduce_sum(tf.cast(tf.abs(h), "float32")))

    inputs = Inputs({"x": numbers("x", 64, 1024)})
    assert_same_gradients(build, inputs, modes=("memory", None), kinds=("session", "function"))
