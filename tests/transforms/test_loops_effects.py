"""Loops with side effects: each effect happens once, in order."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.replayed_loops import (
    STEPS,
    WAYS,
    assert_same,
    of_sum,
    ran,
    replayed,
)
from tests.helpers.sampling import one_of
from tests.helpers.support import assert_identical

pytestmark = [pytest.mark.usefixtures("exact"), pytest.mark.sampled]


# --- effects of steps


def happened(start, calls=2, **options):
    """Check that effects leave the same behind, plain and with each way. ``start()`` returns an
    effect and a function that tells what it left."""
    found, ways = {}, one_of(WAYS)
    for way in ("plain", *ways):
        gradients = tf.gradients if way == "plain" else functools.partial(ms.gradients, loops=way)
        effect, tell = start()
        values, plans = ran(of_sum(effect, **options), gradients, calls)
        if way != "plain":
            assert replayed(plans), way
        found[way] = values, tell()
    for way in ways:
        assert_identical(found[way][0], found["plain"][0], way)
        assert found[way][1] == found["plain"][1], way
    return found["plain"][1]


def test_a_counter_counts_each_step_once():
    def start():
        counter = tf.Variable(0)
        return lambda i, h: counter.assign_add(1).op, lambda: int(counter)

    assert happened(start) == 2 * STEPS


def test_steps_read_what_earlier_ones_assigned():
    seen = []

    def start():
        counter, rows = tf.Variable(0), tf.Variable(tf.zeros([STEPS], tf.int32))
        seen.append(rows)

        def effect(i, h):
            with tf.control_dependencies([counter.assign_add(i)]):
                return rows.scatter_nd_add([[i]], [counter.read_value()]).op

        return effect, lambda: rows.numpy().tolist()

    assert happened(start, calls=1) == np.cumsum(range(STEPS)).tolist()


def test_python_functions_are_called_once_and_in_order():
    def start():
        seen = []

        def see(i, h):
            seen.append((int(i), float(tf.reduce_sum(h))))
            return np.int32(0)

        return lambda i, h: tf.py_function(see, [i, h], tf.int32).op, lambda: list(seen)

    assert [i for i, _ in happened(start)] == 2 * list(range(STEPS))


def test_prints_come_once_and_in_order(tmp_path):
    number = iter(range(10))

    def start():
        path = tmp_path / f"printed_{next(number)}.txt"

        def effect(i, h):
            return tf.print("step", i, tf.reduce_sum(h), output_stream=f"file://{path}")

        return effect, path.read_text

    lines = happened(start).splitlines()
    assert [line.split()[1] for line in lines] == [str(i) for i in range(STEPS)] * 2


@pytest.mark.parametrize("body", ["branch", "function", "inner loop"])
def test_effects_deep_inside_of_the_body(body):
    def start():
        counter = tf.Variable(0)

        @tf.function(autograph=False)
        def count():
            return counter.assign_add(1)

        def effect(i, h):
            if body == "function":
                return count().op
            if body == "branch":
                return tf.cond(i % 3 == 0, count, lambda: tf.constant(0)).op
            return tf.while_loop(lambda j: j < 2, lambda j: j + tf.minimum(count(), 1), [0])[0].op

        return effect, lambda: int(counter)

    assert (
        happened(start) == {"branch": 2 * 8, "function": 2 * STEPS, "inner loop": 4 * STEPS}[body]
    )


def test_checks_that_hold():
    def effect(i, h):
        return tf.debugging.assert_less(tf.reduce_max(h), 100.0)

    assert_same(of_sum(effect), 2)


def test_checked_numbers():
    def program(gradients):
        def step(x, w):
            h = tf.while_loop(
                lambda i, _: i < STEPS,
                lambda i, h: (i + 1, tf.debugging.check_numerics(tf.tanh(h @ w), "bad")),
                (0, x),
            )[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)


def test_a_check_that_fails_ends_the_step_as_it_did():
    seen = []

    def effect(i, h):
        with tf.control_dependencies([tf.debugging.assert_less(i, 13, message="thirteen")]):
            return tf.py_function(lambda i: seen.append(int(i)) or np.int32(0), [i], tf.int32).op

    ours = (functools.partial(ms.gradients, loops=way) for way in one_of(WAYS))
    for gradients in (tf.gradients, *ours):
        seen.clear()
        with pytest.raises(tf.errors.InvalidArgumentError, match="thirteen"):
            ran(of_sum(effect), gradients)
        assert seen == list(range(13))


def test_an_effect_whose_value_is_used_happens_once():
    def program(gradients):
        counter = tf.Variable(0.0)

        def step(x, w):
            counter.assign(0.0)

            def body(i, h):
                scale = 1.0 + 0.01 * counter.assign_add(1.0, read_value=True)
                return i + 1, tf.tanh(tf.matmul(h, w) * scale)

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x), parallel_iterations=1)[1]
            return [h, counter.read_value(), *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program, 2)


@pytest.mark.parametrize("where", ["branch", "inner loop"])
def test_drawn_numbers_inside_of_what_must_run_once(where):
    """Such an op must not run again, and is itself differentiated."""

    def program(gradients):
        def step(x, w):
            def noisy(h):
                return tf.tanh(tf.matmul(h, w)) * tf.random.uniform(tf.shape(h), 0.5, 1.5, seed=3)

            def body(i, h):
                if where == "branch":
                    return i + 1, tf.cond(i % 2 == 0, lambda: noisy(h), lambda: tf.sin(h))
                turns = (0, h)
                inner = tf.while_loop(
                    lambda j, _: j < 2,
                    lambda j, g: (j + 1, noisy(g)),
                    turns,
                    parallel_iterations=1,
                )
                return i + 1, inner[1]

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x), parallel_iterations=1)[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    # The intermediate results of the op are in lists and optionals, which cannot be kept. So the
    # loop stays as it is.
    assert_same(program, kept=None)


def test_a_generator_draws_what_it_drew():
    def program(gradients):
        generator = tf.random.Generator.from_seed(5)

        def step(x, w):
            def body(i, h):
                return i + 1, tf.tanh(tf.matmul(h, w)) + 0.1 * generator.normal([4, 8])

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x), parallel_iterations=1)[1]
            return [h, generator.state.read_value(), *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program, 3)


# --- effects of conditions


@pytest.mark.parametrize("kind", ["counter", "python", "random"])
def test_a_condition_with_effects_keeps_the_loop(kind):
    def outcome(gradients):
        asked, counter = [], tf.Variable(0)

        def program(gradients):
            def go_on(i, h):
                more = i < STEPS
                if kind == "counter":
                    with tf.control_dependencies([counter.assign_add(1)]):
                        return tf.identity(more)
                if kind == "python":
                    see = tf.py_function(lambda i: asked.append(int(i)) or True, [i], tf.bool)
                    return tf.logical_and(more, tf.ensure_shape(see, []))
                return tf.logical_and(more, tf.random.uniform([], seed=3) < 2.0)

            def step(x, w):
                body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w)))  # noqa: E731
                h = tf.while_loop(go_on, body, (0, x), parallel_iterations=1)[1]
                return [h, *gradients(tf.reduce_sum(h), [x, w])]

            return step

        values, plans = ran(program, gradients)
        assert not replayed(plans)
        return [values, int(counter), asked]

    plain = outcome(tf.gradients)
    for way in one_of(WAYS):
        assert_identical(outcome(functools.partial(ms.gradients, loops=way)), plain, way)


def test_a_condition_that_reads_a_variable():
    def program(gradients):
        most = tf.Variable(17)

        def step(x, w):
            body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w)))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < most, body, (0, x))[1]
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)
