"""A loop that is differentiated more than once: twice, through its gradient, from tapes, before and
after its replay."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.transforms.loops import gradient_hook
from tests.helpers.sampling import one_of
from tests.helpers.support import assert_identical, numbers

pytestmark = [pytest.mark.usefixtures("exact"), pytest.mark.sampled]

STEPS = 24
X, W = numbers("x", 4, 8), numbers("w", 8, 8, scale=0.3)


def looped(x, w, steps=STEPS):
    return tf.while_loop(
        lambda i, _: i < steps, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, x)
    )[1]


def results(program):
    function = tf.function(program, autograph=False)
    found = function(tf.constant(X), tf.constant(W))
    return tf.nest.map_structure(lambda t: t.numpy(), found), function


def loops_of(function):
    """Return the loops of a function's graph that are replayed."""
    (concrete,) = function._list_all_concrete_functions()
    return [op for op in concrete.graph.get_operations() if gradient_hook.replay_of(op)]


def assert_same(program, replayed=1):
    """Check that ``program(gradients, x, w)`` gives the same bits with our gradients, and that
    ``replayed`` loops are replayed at the end."""
    plain, _ = results(functools.partial(program, tf.gradients))
    for way in one_of(("segments", "treeverse")):
        found, function = results(
            functools.partial(program, functools.partial(ms.gradients, loops=way))
        )
        assert_identical(found, plain, way)
        assert len(loops_of(function)) == replayed


def test_two_calls_for_one_loop():
    def program(gradients, x, w):
        h = looped(x, w)
        return [gradients(tf.reduce_sum(h), [x, w]), gradients(tf.reduce_sum(tf.square(h)), [w])]

    assert_same(program)


def test_a_second_call_that_needs_more_of_the_loop():
    def program(gradients, x, w):
        def body(i, a, b):
            return i + 1, tf.sin(a), tf.tanh(tf.matmul(b, w)) * a

        _, a, b = tf.while_loop(lambda i, *_: i < STEPS, body, (0, x, tf.cos(x)))
        return [gradients(tf.reduce_sum(a), x), gradients(tf.reduce_sum(b), [x, w])]

    assert_same(program)


def test_plain_gradients_after_ours():
    def program(gradients, x, w):
        h = looped(x, w)
        return [gradients(tf.reduce_sum(h), [x, w]), tf.gradients(tf.reduce_sum(tf.square(h)), w)]

    assert_same(program)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_ours_after_plain_gradients():
    def program(gradients, x, w):
        first_call(gradients, x)
        h = looped(x, w)
        return [tf.gradients(tf.reduce_sum(h), [x, w]), gradients(tf.reduce_sum(tf.square(h)), w)]

    assert_same(program)


def in_a_function(x, w):
    return tf.function(looped, autograph=False)(x, w)


def in_a_loop_in_a_function(x, w):
    def twice(x, w):
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, looped(h, w)), (0, x))[1]

    return tf.function(twice, autograph=False)(x, w)


def first_call(gradients, x):
    """Make the library's first call: from then on, it notes the gradients of loops."""
    return gradients(tf.reduce_sum(tf.square(x)), x)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
@pytest.mark.parametrize("where", [in_a_function, in_a_loop_in_a_function])
def test_ours_after_plain_gradients_that_have_become_functions(where):
    def program(gradients, x, w):
        first_call(gradients, x)
        h = where(x, w)
        return [tf.gradients(tf.reduce_sum(h), [x, w]), gradients(tf.reduce_sum(tf.square(h)), w)]

    assert_same(program, replayed=0)


def in_calls_in_a_loop(x, w):
    f = tf.function(in_a_function, autograph=False)
    return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, f(h, w)), (0, x))[1]


@pytest.mark.parametrize("where", [in_a_function, in_a_loop_in_a_function, in_calls_in_a_loop])
@pytest.mark.parametrize("second", [None, tf.gradients])
def test_two_calls_for_a_loop_in_a_function(where, second):
    def program(gradients, x, w):
        h = where(x, w)
        first = gradients(tf.reduce_sum(h), [x, w])
        return [first, (second or gradients)(tf.reduce_sum(tf.square(h)), [w])]

    plain, _ = results(functools.partial(program, tf.gradients))
    found, _ = results(
        functools.partial(program, functools.partial(ms.gradients, loops="segments"))
    )
    assert_identical(found, plain, "a second call")


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_ours_after_plain_gradients_of_what_every_step_left():
    def program(gradients, x, w):
        first_call(gradients, x)
        h = looped(x, w)
        # In the second call, TensorFlow takes zeros as gradients of the first call's lists.
        plain = [tf.gradients(tf.reduce_sum(f(h)), [x, w]) for f in (tf.sin, tf.cos)]
        return [plain, gradients(tf.reduce_sum(tf.square(h)), w)]

    assert_same(program, replayed=0)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_ours_after_a_plain_jacobian():
    def program(gradients, x, w):
        first_call(gradients, x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = looped(x, w, 9)
            y = tf.reduce_sum(h, 1)
        return [tape.jacobian(y, x), gradients(tf.reduce_sum(tf.square(h)), [x, w])]

    assert_same(program, replayed=0)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_gradients_of_gradients():
    def program(gradients, x, w):
        h = looped(x, w, 9)
        (first,) = gradients(tf.reduce_sum(tf.square(h)), [x])
        return [first, gradients(tf.reduce_sum(tf.sin(first)), [x, w])]

    plain, _ = results(functools.partial(program, tf.gradients))
    found, _ = results(
        functools.partial(program, functools.partial(ms.gradients, loops="segments"))
    )
    assert_identical(found, plain, "second order")


def test_gradients_of_gradients_say_that_the_loop_is_kept():
    def program(x, w):
        (first,) = ms.gradients(tf.reduce_sum(tf.square(looped(x, w))), [x], loops="segments")
        return tf.gradients(tf.reduce_sum(tf.sin(first)), [x])

    with pytest.warns(ms.errors.NothingSavedWarning, match="keeps all of its steps"):
        results(program)


CONSTANTS = {
    # The loop draws numbers, so other ops wait for it. It appends the inner product to a list that
    # no op reads, and the constant does not pass the product.
    "product": lambda i, drawn, h: h * tf.cast(i % 5 + 1, tf.float32) * 0.3 * drawn,
    # No op waits for the loop: the list is removed, and the constant passes the product.
    "product, alone": lambda i, drawn, h: h * tf.cast(i % 5 + 1, tf.float32) * 0.3,
    # No other op reads the inner sum: the constant joins the summand whose name comes first.
    "sum": lambda i, drawn, h: (drawn + tf.cos(h)) + 0.3,
    "stopped": lambda i, drawn, h: h + tf.stop_gradient(drawn * tf.cos(h) * 0.3),
    "sum, named otherwise": lambda i, drawn, h: (tf.cos(h, name="zero") + drawn) + 0.3,
}


@pytest.mark.parametrize("kind", sorted(CONSTANTS))
def test_constants_are_folded_as_in_plain_training(kind):
    def program(gradients, x, w):
        def body(i, h):
            drawn = None
            if kind != "product, alone":
                # The numbers are kept, and read from a list when steps are recomputed.
                drawn = tf.raw_ops.RandomUniform(shape=X.shape, dtype=tf.float32, seed=1, seed2=1)
            return i + 1, tf.tanh(CONSTANTS[kind](i, drawn, tf.matmul(h, w)))

        _, h = tf.while_loop(lambda i, _: i < STEPS, body, (0, x), parallel_iterations=1)
        return gradients(tf.reduce_sum(tf.square(h)), [x, w])

    assert_same(program)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_a_persistent_tape():
    def program(x, w):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            h = looped(x, w)
            one, other = tf.reduce_sum(h), tf.reduce_sum(tf.square(h))
        return [tape.gradient(one, [x, w]), tape.gradient(other, [x, w])]

    plain, _ = results(program)
    with ms.patched(loops="segments"):
        found, _ = results(program)
    assert_identical(found, plain, "persistent tape")


@pytest.mark.parametrize("before", [0, 1])
def test_gradients_of_gradients_of_loops_in_functions_are_refused(before):
    @tf.function(autograph=False)
    def inner(x, w):
        return looped(x, w, 9)

    def program(loops, x, w):
        h = inner(x, w)
        for _ in range(1 + before):
            (first,) = ms.gradients(tf.reduce_sum(tf.square(h)), [x], loops=loops)
        return tf.gradients(tf.reduce_sum(tf.sin(first)), [x])

    with pytest.raises(ms.errors.HigherOrderError, match="loops='keep'"):
        results(functools.partial(program, "segments"))


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_tapes_of_tapes():
    def program(x, w):
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = tf.reduce_sum(tf.square(looped(x, w, 9)))
            first = tape.gradient(y, x)
            z = tf.reduce_sum(tf.sin(first))
        return [first, outer.gradient(z, [x, w])]

    plain, _ = results(program)
    with ms.patched(loops="segments"):
        found, _ = results(program)
    assert_identical(found, plain, "tape of a tape")


def test_a_jacobian():
    def program(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(looped(x, w, 9), 1)
        return tape.jacobian(y, x)

    plain, _ = results(program)
    with ms.patched(loops="segments"):
        found, _ = results(program)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


def test_values_in_gradients_of_stopped_states():
    def program(gradients, x, w):
        h = looped(x, w)
        return gradients(tf.reduce_sum(h), [w], stop_gradients=[x])

    assert_same(program)


def test_incoming_gradients_and_unconnected_ones():
    def program(gradients, x, w):
        h = looped(x, w)
        away = tf.sin(x)
        return gradients(
            [h],
            [x, w, away],
            grad_ys=[tf.cos(h)],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    assert_same(program)
