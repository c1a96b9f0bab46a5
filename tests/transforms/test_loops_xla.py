"""Replayed loops under ``jit_compile=True``: the same gradients to rounding, replays that XLA
keeps, and less measured memory."""

from __future__ import annotations

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering
from tests.helpers.support import numbers

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

WAYS = ("segments", "treeverse")
STEPS, WIDTH = 32, 8


def weight(width=WIDTH):
    return tf.constant(numbers("w", width, width, scale=0.9 * width**-0.5))


def counted(x, w, steps=STEPS, **options):
    return tf.while_loop(
        lambda i, _: i < steps, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, x), **options
    )[1]


def bounded(x, w):
    return counted(x, w, 1000, maximum_iterations=STEPS)


def value_dependent(x, w):
    return tf.while_loop(
        lambda _, h: tf.reduce_sum(tf.square(h)) > 1e-3,
        lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))),
        (0, x),
        maximum_iterations=STEPS,
    )[1]


def scanned(x, w):
    each = tf.stack([x * (0.1 * k) for k in range(STEPS)])
    return tf.scan(lambda h, e: tf.tanh(tf.matmul(h, w) + e), each, initializer=x)


def mapped(x, w):
    each = tf.stack([x * (0.1 * k) for k in range(STEPS)])
    return tf.map_fn(lambda e: tf.tanh(tf.matmul(tf.sin(tf.matmul(e, w)), w)), each)


def nested(x, w):
    return tf.while_loop(
        lambda i, _: i < STEPS,
        lambda i, h: (i + 1, counted(h, w, 3, maximum_iterations=3)),
        (0, x),
        maximum_iterations=STEPS,
    )[1]


def branching(x, w):
    def body(i, h):
        return i + 1, tf.cond(i % 3 == 0, lambda: tf.sin(h), lambda: tf.tanh(tf.matmul(h, w)))

    return tf.while_loop(lambda i, _: i < STEPS, body, (0, x), maximum_iterations=STEPS)[1]


def drawing(x, w):
    def body(i, h):
        h = tf.tanh(tf.matmul(h, w))
        return i + 1, tf.nn.experimental.stateless_dropout(h, 0.3, seed=tf.stack([i, 7]))

    return tf.while_loop(lambda i, _: i < STEPS, body, (0, x), maximum_iterations=STEPS)[1]


def two_states(x, w):
    def body(i, a, b):
        return i + 1, tf.tanh(tf.matmul(b, w)), 0.5 * b + tf.sin(a)

    start = (0, x, tf.cos(x))
    return tf.while_loop(lambda i, *_: i < STEPS, body, start, maximum_iterations=STEPS)[1:]


LOOPS = {
    "maximum_iterations": bounded,
    "value-dependent": value_dependent,
    "scan": scanned,
    "nested": nested,
    "branch": branching,
    "two states": two_states,
    "stateless dropout": drawing,
    "map_fn": mapped,
}


def compiled(differentiate, forward):
    @tf.function(jit_compile=True, autograph=False)
    def step(x, w):
        total = sum(tf.reduce_sum(tf.square(y)) for y in tf.nest.flatten(forward(x, w)))
        return differentiate(total, [x, w])

    return step


def saving(way):
    return functools.partial(ms.gradients, loops=way)


def assert_near(found, expected):
    """Check that gradients are within 1e-6 of plain XLA's, relative to the largest gradient."""
    far = 1e-6 * max(np.abs(b).max() for b in expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=far)


def whiles(step, *args):
    """Return the number of loops that XLA runs."""
    text = step.experimental_get_compiler_ir(*args)(stage="optimized_hlo")
    return len(re.findall(r" while\(", text))


def replayed(step):
    plan = ms.plans(step)[-1]
    assert plan.gating == "data"
    return plan.replayed


def several(cases, fast=None):
    """Return cases for each way; only ``fast`` in segments are fast, as levels compile slowly."""
    both = [(*case, way) for way in WAYS for case in cases]
    count = len(cases) if fast is None else fast
    return both[:count] + [pytest.param(*case, marks=pytest.mark.slow) for case in both[count:]]


@pytest.mark.parametrize(("name", "way"), several([(name,) for name in LOOPS], fast=5))
def test_gradients(name, way):
    x, w = tf.constant(numbers("x", 4, WIDTH)), weight()
    plain = compiled(tf.gradients, LOOPS[name])
    ours = compiled(saving(way), LOOPS[name])
    assert_near([g.numpy() for g in ours(x, w)], [g.numpy() for g in plain(x, w)])
    assert replayed(ours)
    assert whiles(ours, x, w) > whiles(plain, x, w)


def test_gradients_in_several_levels():
    test_gradients("maximum_iterations", "treeverse")


@pytest.mark.parametrize(
    ("steps", "way"), [(5, "segments"), (31, "segments"), *several([(4,), (7,), (9,), (30,)])[4:]]
)
def test_numbers_of_steps(steps, way):
    x, w = tf.constant(numbers("x", 4, WIDTH)), weight()
    forward = functools.partial(counted, steps=steps, maximum_iterations=steps)
    plain, ours = compiled(tf.gradients, forward), compiled(saving(way), forward)
    assert_near([g.numpy() for g in ours(x, w)], [g.numpy() for g in plain(x, w)])


def test_a_variable_that_is_assigned_before_gradients_are_asked_for():
    def step(differentiate):
        v = tf.Variable(weight())

        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            total = tf.reduce_sum(counted(x, v, maximum_iterations=STEPS))
            v.assign(2.0 * tf.ones_like(v))
            return differentiate(total, [x, v])

        return step

    x = tf.constant(numbers("x", 4, WIDTH))
    expected = [g.numpy() for g in step(tf.gradients)(x)]
    for way in WAYS:
        assert_near([g.numpy() for g in step(saving(way))(x)], expected)


@pytest.mark.parametrize("way", ["segments"])
@pytest.mark.parametrize("kind", ["counted", "value-dependent", "run-time maximum"])
def test_loops_without_a_bound_that_is_known_are_what_they_are_plain(kind, way):
    """XLA refuses gradients of some of these loops; ours must refuse no others."""

    def forward(x, w):
        if kind == "counted":
            return counted(x, w)
        if kind == "value-dependent":
            return tf.while_loop(
                lambda _, h: tf.reduce_sum(tf.square(h)) > 1e-3,
                lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))),
                (0, x),
            )[1]
        most = tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32)
        return counted(x, w, 1000, maximum_iterations=most)

    x, w = tf.constant(numbers("x", 4, WIDTH)), weight()

    def outcome(differentiate):
        try:
            return [g.numpy() for g in compiled(differentiate, forward)(x, w)]
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, ValueError) as error:
            return error

    expected, found = outcome(tf.gradients), outcome(saving(way))
    if not isinstance(expected, Exception):
        assert not isinstance(found, Exception), found
        assert_near(found, expected)


@pytest.mark.parametrize("way", ["segments"])
def test_a_maximum_known_at_run_time(way):
    def step(differentiate):
        @tf.function(jit_compile=True, autograph=False)
        def step(x, w, most):
            y = counted(x, w, 1000, maximum_iterations=most)
            return differentiate(tf.reduce_sum(tf.square(y)), [x, w])

        return step

    x, w = tf.constant(numbers("x", 4, WIDTH)), weight()
    plain, ours = step(tf.gradients), step(saving(way))
    # For XLA, the maximum is a number in each call. For 0 steps, it cannot make the lists of plain
    # gradients either.
    for most in (1, 5, 24):
        expected = [g.numpy() for g in plain(x, w, tf.constant(most))]
        assert_near([g.numpy() for g in ours(x, w, tf.constant(most))], expected)


# --- layers of Keras


def recurrent(sequences, kind="LSTM"):
    keras.utils.set_random_seed(1)
    layer = getattr(keras.layers, kind)(WIDTH, return_sequences=sequences, use_cudnn=False)
    layer.build((4, STEPS, 5))
    return layer


def taped(layer, patched):
    weights = [v.value for v in layer.trainable_variables]

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.square(layer(x, training=True)))
        return tape.gradient(total, [x, *weights])

    x = tf.constant(numbers("sequences", 4, STEPS, 5))
    with patched:
        return step, [g.numpy() for g in step(x)], whiles(step, x)


@pytest.mark.parametrize(
    ("kind", "sequences", "way"), several([("LSTM", True), ("LSTM", False), ("GRU", True)], fast=1)
)
def test_recurrent_layers(kind, sequences, way):
    layer = recurrent(sequences, kind)
    _, expected, before = taped(layer, contextlib.nullcontext())
    ours, found, after = taped(layer, ms.patched(loops=way))
    assert_near(found, expected)
    assert replayed(ours)
    assert after > before


@pytest.mark.parametrize("way", ["segments"])
def test_fit(way):
    def trained(callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((STEPS, 5)),
                keras.layers.LSTM(WIDTH, use_cudnn=False),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
        x, y = numbers("many", 16, STEPS, 5), numbers("labels", 16, 1)
        model.fit(x, y, 4, 2, verbose=0, shuffle=False, callbacks=callbacks)
        return model.get_weights()

    callback = ms.keras.MemorySavingGradients(loops=way)
    assert_near(trained([callback]), trained([]))
    assert callback.plans[-1].replayed and callback.plans[-1].gating == "data"


# --- memory, measured in processes of their own

LONG, ROWS, UNITS = 256, 64, 64


def probe(kind, xla):
    """Return the peaks of a step in bytes: plain, and with each way."""
    keras.utils.set_random_seed(0)
    if kind == "while_loop":
        v = tf.Variable(weight(UNITS))
        x = tf.constant(numbers("x", ROWS, UNITS))
        xs = [v]

        def forward(x):
            return counted(x, v, LONG, maximum_iterations=LONG)
    else:
        layer = keras.layers.LSTM(UNITS, use_cudnn=False)
        layer.build((ROWS, LONG, 4))
        x = tf.constant(numbers("x", ROWS, LONG, 4))
        xs = [v.value for v in layer.trainable_variables]
        forward = functools.partial(layer, training=True)

    def peak(patched):
        @tf.function(jit_compile=xla, autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.square(forward(x)))
            return tape.gradient(total, xs)

        with patched:
            step(x)
        return measure_peak(lambda: [g.numpy() for g in step(x)], steps=3).peak

    found = {way: peak(ms.patched(loops=way)) for way in WAYS}
    return {"plain": peak(contextlib.nullcontext())} | found


@pytest.mark.parametrize(("xla", "kind"), covering([True, False], ["while_loop", "LSTM"]))
def test_measured_memory(xla, kind):
    arguments = {"kind": kind, "xla": xla}
    peaks = fresh("tests.transforms.test_loops_xla:probe", arguments)
    for way in WAYS:
        share = peaks[way] / peaks["plain"]
        assert share <= (1 / 3 if xla else 1 / 2), f"{way}: {share:.2f}"
