"""Loops with side effects, and variables that change around them: each effect happens once, in
order, and steps read the old values."""

from __future__ import annotations

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import covering, one_of, slow
from tests.helpers.support import assert_identical, numbers, session_config

pytestmark = [pytest.mark.usefixtures("exact"), pytest.mark.sampled]

v1 = tf.compat.v1
WAYS = ("segments", "treeverse")
#: Ways for tests that are the same with both of them.
EITHER = [WAYS[0], *slow(WAYS[1])]
STEPS = 24
X, W, OTHER = numbers("x", 4, 8), numbers("w", 8, 8, scale=0.3), numbers("v", 8, 8, scale=0.5)


def looped(x, w, effect=lambda i, h: None, steps=STEPS, **options):
    """Return layers of one weight. Steps run one after the other; in parallel, effects would come
    in another order."""

    def body(i, h):
        with tf.control_dependencies([op for op in [effect(i, h)] if op is not None]):
            return i + 1, tf.tanh(tf.matmul(h, w))

    options = {"parallel_iterations": 1, **options}
    return tf.while_loop(lambda i, _: i < steps, body, (0, x), **options)[1]


def ran(program, gradients, calls=1):
    """Return the results of calls of ``program(gradients)``, a function of x and w, and its
    plans."""
    function = tf.function(program(gradients), autograph=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
        found = [function(tf.constant(X), tf.constant(W)) for _ in range(calls)]
    return tf.nest.map_structure(lambda t: t.numpy(), found), ms.plans(function)


def replayed(plans):
    return bool(plans) and all(plan.replayed for plan in plans)


def assert_same(program, calls=1, kept=False):
    """Check for the same bits with loops replayed; ``kept``: the loop cannot be replayed."""
    plain, _ = ran(program, tf.gradients, calls)
    for way in one_of(WAYS):
        found, plans = ran(program, functools.partial(ms.gradients, loops=way), calls)
        assert_identical(found, plain, way)
        assert replayed(plans) is not kept


def of_sum(effect, **options):
    """Return a program of gradients of a loop with an effect."""

    def program(gradients):
        def step(x, w):
            h = looped(x, w, effect, **options)
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    return program


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

    plain, _ = ran(program, tf.gradients)
    for way in one_of(WAYS):
        # The intermediate results of the op are in lists and optionals, which cannot be kept. So
        # the loop stays as it is.
        found, _ = ran(program, functools.partial(ms.gradients, loops=way))
        assert_identical(found, plain, way)


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

    plain, _ = ran(program, tf.gradients, 2)
    for way in one_of(WAYS):
        found, _ = ran(program, functools.partial(ms.gradients, loops=way), 2)
        assert_identical(found, plain, way)


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


# --- how a loop may be written


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

    plain, _ = ran(program, tf.gradients)
    for way in one_of(WAYS):
        # The number of its bytes is unknown, and a loop is replayed only if that saves bytes.
        found, _ = ran(program, functools.partial(ms.gradients, loops=way))
        assert_identical(found, plain, way)


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
