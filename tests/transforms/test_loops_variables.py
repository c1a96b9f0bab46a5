"""Variables that change around loops, in training steps and sessions too: replayed steps read the
old values."""

from __future__ import annotations

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.replayed_loops import (
    EITHER,
    OTHER,
    STEPS,
    WAYS,
    W,
    X,
    assert_same,
    looped,
    ran,
    replayed,
)
from tests.helpers.sampling import covering, one_of, slow
from tests.helpers.support import assert_identical, session_config

pytestmark = [pytest.mark.usefixtures("exact"), pytest.mark.sampled]

v1 = tf.compat.v1


# --- variables that change around the loop


def taped(read, change):
    """Return a program of a tape's gradients of a loop. The loop reads a variable that changes
    before they are asked for."""

    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                h = looped(x, read(weight))
            change(weight)
            return [h, *tape.gradient(h, [x, weight], unconnected_gradients="zero")]

        return step

    return program


def asked(read, change):
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            h = looped(x, read(weight))
            change(weight)
            return [h, *gradients(tf.reduce_sum(h), [x, weight])]

        return step

    return program


CHANGES = {
    "assigned": lambda v: v.assign(OTHER),
    "added to": lambda v: v.assign_add(OTHER),
    "one row": lambda v: v.scatter_nd_update([[0]], OTHER[:1]),
}


@pytest.mark.parametrize("change", ["assigned", "added to", *slow("one row")])
def test_a_variable_assigned_before_gradients_are_asked_for(change):
    assert_same(asked(lambda v: v, CHANGES[change]))


@pytest.mark.parametrize("change", ["one row", *slow("assigned", "added to")])
def test_a_variable_assigned_between_a_tape_and_its_gradients(change):
    program = taped(lambda v: v, CHANGES[change])
    plain, _ = ran(program, tf.gradients)
    for way in one_of(WAYS):
        with ms.patched(loops=way):
            found, _ = ran(program, tf.gradients)
        assert_identical(found, plain, way)


def test_a_variable_read_before_the_loop_and_assigned_after_it():
    assert_same(asked(lambda v: v.read_value(), CHANGES["assigned"]))


def test_a_variable_assigned_in_another_function_before_gradients_are_asked_for():
    @tf.function(autograph=False)
    def change(v):
        v.assign(OTHER)

    assert_same(asked(lambda v: v, change))


@pytest.mark.parametrize("how", ["gradients", "tape"])
def test_a_loop_in_a_function_reads_a_variable_that_its_caller_assigns(how):
    def program(gradients):
        weight = tf.Variable(W)

        @tf.function(autograph=False)
        def inner(x):
            return looped(x, weight)

        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(inner(x))
            weight.assign(OTHER)
            if how == "tape":
                return tape.gradient(total, [x, weight])
            return gradients(total, [x, weight])

        return step

    plain, _ = ran(program, tf.gradients)
    for way in one_of(WAYS):
        if how == "tape":
            with ms.patched(loops=way):
                found, _ = ran(program, tf.gradients)
        else:
            found, _ = ran(program, functools.partial(ms.gradients, loops=way))
        assert_identical(found, plain, way)


def test_a_variable_assigned_by_python_before_gradients_are_asked_for():
    """Nothing in the graph says that the variable changes."""

    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            h = looped(x, weight)
            with tf.control_dependencies([h]):
                done = tf.py_function(lambda: weight.assign(OTHER) is not None, [], tf.bool)
            with tf.control_dependencies([done]):
                seed = tf.where(tf.ensure_shape(done, []), tf.ones_like(h), tf.zeros_like(h))
            return gradients(h, [x, weight], grad_ys=[seed])

        return step

    assert_same(program)


def test_a_variable_assigned_between_two_calls_for_gradients():
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            h = looped(x, weight)
            first = gradients(tf.reduce_sum(h), [x, weight])
            weight.assign(OTHER)
            return [*first, *gradients(tf.reduce_sum(tf.square(h)), [x, weight])]

        return step

    assert_same(program)


def test_a_variable_assigned_after_gradients_were_asked_for():
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            h = looped(x, weight)
            grads = gradients(tf.reduce_sum(h), [x, weight])
            weight.assign(OTHER)
            return [h, *grads, weight.read_value()]

        return step

    assert_same(program, 2)


def test_a_variable_that_a_later_loop_assigns():
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            h = looped(x, weight)

            def body(i):
                with tf.control_dependencies([weight.assign_add(OTHER)]):
                    return i + 1

            tf.while_loop(lambda i: i < 3, body, [0])
            return [h, *gradients(tf.reduce_sum(h), [x, weight])]

        return step

    assert_same(program)


def test_a_variable_that_the_body_reads_and_assigns():
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            def body(i, h):
                h = tf.tanh(tf.matmul(h, weight))
                with tf.control_dependencies([weight.assign(0.9 * weight)]):
                    return i + 1, tf.identity(h)

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x), parallel_iterations=1)[1]
            return [h, weight.read_value(), *gradients(tf.reduce_sum(h), [x, weight])]

        return step

    assert_same(program, 2, kept=None)


def test_an_inner_loop_reads_a_variable_that_is_assigned_before_gradients_are_asked_for():
    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            inner = lambda i, h: (i + 1, looped(h, weight, steps=4))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < STEPS, inner, (0, x))[1]
            weight.assign(OTHER)
            return [h, *gradients(tf.reduce_sum(h), [x, weight])]

        return step

    # Tensors that the inner loop reads would have to be kept inside of it.
    assert_same(program, kept=True)


def test_a_gathered_variable_that_is_assigned_before_gradients_are_asked_for():
    def program(gradients):
        table = tf.Variable(W)

        def step(x, w):
            def body(i, h):
                return i + 1, tf.tanh(tf.matmul(h, w) + tf.gather(table, [i % 8, 0, 1, 2]))

            h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
            table.assign(OTHER)
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    assert_same(program)


# --- training steps


def trained(optimizer, patched, calls=5):
    weight, scale = tf.Variable(W), tf.Variable(np.float32(0.9))
    optimizer = optimizer()
    optimizer.build([weight, scale])

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            h = tf.while_loop(
                lambda i, _: i < STEPS,
                lambda i, h: (i + 1, scale * tf.tanh(tf.matmul(h, weight))),
                (0, x),
            )[1]
            loss = tf.reduce_sum(tf.square(h - 0.1))
        variables = [weight, scale]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    with patched:
        losses = [step(tf.constant(X)).numpy() for _ in range(calls)]
    return [losses, weight.numpy(), scale.numpy()], ms.plans(step)


@pytest.mark.parametrize(("name", "way"), covering(["SGD", "Adam"], WAYS))
def test_five_steps_with_an_optimizer(name, way):
    optimizer = functools.partial(getattr(keras.optimizers, name), 0.1)
    plain, _ = trained(optimizer, contextlib.nullcontext())
    found, plans = trained(optimizer, ms.patched(loops=way))
    assert_identical(found, plain, way)
    assert replayed(plans)


def test_two_steps_in_one_function():
    """The second loop reads the variable that the first loop's gradients changed."""

    def program(gradients):
        weight = tf.Variable(W)

        def step(x, w):
            found = []
            for _ in range(2):
                h = looped(x, weight)
                grads = gradients(tf.reduce_sum(tf.square(h)), [x, weight])
                weight.assign_sub(0.1 * grads[1])
                found += [h, *grads]
            return [*found, weight.read_value()]

        return step

    assert_same(program, 2)


# --- sessions of TF1


def in_graph(build, gradients, calls=5, **options):
    """Return the results of ``calls`` runs of ``build(gradients, x, w)`` in a session, and the
    graph's plans."""
    with tf.Graph().as_default() as graph, warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
        x = v1.placeholder(tf.float32, [4, 8])
        w = v1.get_variable("w", initializer=W, **options)
        fetches = build(gradients, x, w)
        with v1.Session(config=session_config()) as session:
            session.run(v1.global_variables_initializer())
            values = [session.run(fetches, {x: X}) for _ in range(calls)]
            values.append(session.run(w))
        return values, ms.plans(graph)


@pytest.mark.usefixtures("control_flow_v2")
@pytest.mark.parametrize(("use_resource", "way"), covering([True, False], WAYS))
def test_gradient_descent_in_a_session(way, use_resource):
    def build(_, x, w):
        loss = tf.reduce_sum(tf.square(looped(x, w)))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([train]):
            return tf.identity(loss)

    plain, _ = in_graph(build, None, use_resource=use_resource)
    with ms.patched(loops=way):
        found, plans = in_graph(build, None, use_resource=use_resource)
    assert_identical(found, plain, way)
    assert replayed(plans)


@pytest.mark.usefixtures("control_flow_v2")
@pytest.mark.parametrize("way", EITHER)
def test_an_assignment_that_waits_for_the_loop_but_not_for_its_gradients(way):
    """In sessions, ops do not run in the program's order by themselves."""

    def build(gradients, x, w):
        v = v1.get_variable("v", initializer=OTHER, use_resource=True)

        def body(i, h):
            return i + 1, tf.tanh(tf.matmul(h, w + 0.1 * tf.stop_gradient(v.read_value())))

        h = tf.while_loop(lambda i, _: i < 200, body, (0, x))[1]
        (grad,) = gradients(tf.reduce_sum(tf.square(h)), [w])
        with tf.control_dependencies([h]):
            changed = v.assign(-tf.ones_like(v))
        with tf.control_dependencies([changed]):
            return [h, grad, tf.constant(1.0)]

    plain, _ = in_graph(build, tf.gradients, calls=1, use_resource=True)
    ours = functools.partial(ms.gradients, loops=way)
    found, plans = in_graph(build, ours, calls=1, use_resource=True)
    assert_identical(found, plain, way)
    assert replayed(plans)


@pytest.mark.usefixtures("control_flow_v2")
@pytest.mark.parametrize("way", EITHER)
def test_an_assignment_that_waits_for_the_loop_before_its_gradients(way):
    def build(gradients, x, w):
        h = looped(x, w)
        with tf.control_dependencies([h]):
            changed = w.assign(OTHER)
        with tf.control_dependencies([changed]):
            seed = tf.ones([4, 8])
        return [h, *gradients(h, [x, w], grad_ys=[seed])]

    plain, _ = in_graph(build, tf.gradients, calls=1, use_resource=True)
    found, _ = in_graph(
        build, functools.partial(ms.gradients, loops=way), calls=1, use_resource=True
    )
    assert_identical(found, plain, way)


@pytest.mark.parametrize("way", EITHER)
def test_loops_of_tf1_stay_what_they_are(way):
    was_on = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:

        def build(gradients, x, w):
            h = looped(x, w)
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        plain, _ = in_graph(build, tf.gradients, calls=2)
        found, plans = in_graph(build, functools.partial(ms.gradients, loops=way), calls=2)
    finally:
        if was_on:
            v1.enable_control_flow_v2()
    assert_identical(found, plain, way)
    assert not replayed(plans)
