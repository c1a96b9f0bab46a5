"""Identities that compilers neither remove nor look through: values equal to the last bit, and ops
that are still there afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from graph_tools.editing import opaque
from tests.helpers.sampling import covering

v1 = tf.compat.v1

_DTYPES = [
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint32,
    tf.uint64,
    tf.bool,
    tf.complex64,
    tf.complex128,
]
_TRIGGERS = {
    "zeros": np.zeros(3, np.float32),
    "ones": np.ones(3, np.float32),
    "nan": np.full(3, np.nan, np.float32),
    "inf": np.array([-np.inf, np.inf, 1], np.float32),
}


def _name(value):
    return value.name if isinstance(value, tf.DType) else str(value)


@pytest.mark.parametrize(("dtype", "trigger"), covering(_DTYPES, [*_TRIGGERS]), ids=_name)
def test_no_bit_changes(dtype, trigger):
    values = tf.cast(
        tf.constant([0, 1, 1, 0, 1]) if dtype == tf.bool else tf.constant([0, 1, 5, 100, 7]), dtype
    )

    @tf.function
    def gated(t, v):
        assert opaque.can_pass(v)
        return opaque.behind(v, opaque.never(t))

    out = gated(tf.constant(_TRIGGERS[trigger]), values)
    assert out.dtype == dtype
    assert out.numpy().tobytes() == values.numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape"), covering(_DTYPES, [[], [1], [2, 3], [0, 3]]), ids=_name
)
def test_anything_is_a_trigger(dtype, shape):
    @tf.function
    def never(t):
        return opaque.never(t)

    values = [0.0, 1.0, float("nan"), float("-inf")] if dtype.is_floating else [0, 1]
    for value in values:
        out = never(tf.cast(tf.fill(shape, value), dtype))
        assert out.dtype == tf.bool and out.shape == [] and not out.numpy()


@pytest.mark.parametrize("compiled", [False, True])
def test_special_floats_pass(compiled):
    values = tf.constant([np.nan, np.inf, -np.inf, 1e-37, 3e38, -0.0], tf.float32)

    @tf.function(jit_compile=compiled)
    def passed(t, v):
        return opaque.behind(v, opaque.never(t))

    assert passed(tf.ones([2]), values).numpy().tobytes() == values.numpy().tobytes()


def test_no_square_of_bits_leaves_a_rest_of_two():
    bits = np.concatenate([np.arange(1 << 16), -np.arange(1 << 16), [-(2**31), 2**31 - 1]])
    assert not ((bits.astype(np.int32).astype(np.int64) ** 2 & 3) == 2).any()


@pytest.mark.parametrize("shape", [[None, 3], None, []])
def test_unknown_shapes_pass(shape):
    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32)])
    def passed(v):
        out = opaque.behind(v, opaque.never(v))
        assert out.shape.as_list() == shape if shape is not None else out.shape.rank is None
        return out

    value = tf.constant(2.0) if shape == [] else tf.reshape(tf.range(6.0), [2, 3])
    np.testing.assert_array_equal(passed(value), value)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_pass(compiled):
    @tf.function(jit_compile=compiled)
    def second(v):
        y = tf.reduce_sum(opaque.behind(v, opaque.never(v)) ** 3)
        (first,) = tf.gradients(y, v)
        return tf.gradients(first, v)[0]

    np.testing.assert_allclose(second(tf.constant([1.0, 2.0])), [6.0, 12.0])


def test_in_a_session():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 2])
        y = opaque.behind(x, opaque.never(x))
        with v1.Session() as session:
            np.testing.assert_array_equal(session.run(y, {x: [[1.0, 2.0]]}), [[1.0, 2.0]])


def test_strings_and_resources_do_not_pass():
    with tf.Graph().as_default():
        assert not opaque.can_pass(v1.placeholder(tf.string, []))
        assert not opaque.can_pass(v1.placeholder(tf.resource, []))
        assert not opaque.can_pass(v1.placeholder(tf.variant, []))


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.bool], ids=_name)
def test_a_gated_copy_survives_xla(dtype):
    def costly(v):
        return tf.atan2(tf.cast(v, tf.float32) + 1.5, 2.5)

    def program(gate):
        @tf.function(jit_compile=True)
        def step(v, t):
            first = costly(v)
            again = opaque.behind(v, opaque.never(t)) if gate else v
            return tf.reduce_sum(first), tf.reduce_sum(costly(again) * 3.0)

        return step

    values = tf.cast(tf.reshape(tf.range(64) % 2, [8, 8]), dtype)
    count = {}
    for gate in (False, True):
        step = program(gate)
        hlo = step.experimental_get_compiler_ir(values, tf.ones([4]))(stage="optimized_hlo")
        count[gate] = hlo.count(" atan2(")
        if gate:
            np.testing.assert_allclose(
                step(values, tf.ones([4]))[1], 3 * step(values, tf.ones([4]))[0], rtol=1e-6
            )
    assert count == {False: 1, True: 2}
