"""Loops of one layer for the tests of replayed loops, and the check for TensorFlow's own bits."""

from __future__ import annotations

import functools
import warnings

import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import one_of, slow
from tests.helpers.support import assert_identical, numbers

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
    """Check for the same bits with loops replayed; ``kept``: the loop cannot be replayed, ``None``:
    it may stay or be replayed."""
    plain, _ = ran(program, tf.gradients, calls)
    for way in one_of(WAYS):
        found, plans = ran(program, functools.partial(ms.gradients, loops=way), calls)
        assert_identical(found, plain, way)
        assert kept is None or replayed(plans) is not kept


def of_sum(effect, **options):
    """Return a program of gradients of a loop with an effect."""

    def program(gradients):
        def step(x, w):
            h = looped(x, w, effect, **options)
            return [h, *gradients(tf.reduce_sum(h), [x, w])]

        return step

    return program
