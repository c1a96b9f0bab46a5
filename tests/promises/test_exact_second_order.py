"""Gradients of gradients are TensorFlow's own: by further calls, under nested tapes, in
Jacobians."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import slow
from tests.helpers.support import (
    SHORT,
    Inputs,
    assert_identical,
    assert_same,
    data,
    in_function,
    numbers,
    tall,
)

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
]


def test_gradients_of_gradients():
    def program(p, gradients):
        _, y = tall(p)
        first = gradients(tf.reduce_sum(y), p["x"])[0]
        penalty = tf.reduce_sum(tf.square(first))
        return [first, gradients(penalty, p.all)]

    assert_same(program, data(), modes=("memory", "speed", None))


def test_plain_gradients_of_gradients():
    def program(p, gradients):
        _, y = tall(p)
        first = gradients(tf.reduce_sum(y), p.all)
        penalty = tf.add_n([tf.reduce_sum(tf.square(g)) for g in first])
        return [first, tf.gradients(penalty, p.all)]

    assert_same(program, data())


@pytest.mark.parametrize("second_plain", [True, False])
def test_gradients_of_gradients_with_respect_to_what_was_recomputed(second_plain):
    def program(p, gradients):
        h, places = p["x"], []
        for i in range(8):
            h = tf.tanh(tf.matmul(h, p.weight(f"w{i}", 32, 32)))
            places.append(h)
            h = p.mark(h) if i == 4 else h
        first = gradients(tf.reduce_sum(h), p["x"])[0]
        penalty = tf.reduce_sum(tf.square(first)) + tf.reduce_sum(h)
        return [first, (tf.gradients if second_plain else gradients)(penalty, [*places, *p.all])]

    assert_same(program, data(), modes=("memory", None) if not second_plain else SHORT)


def test_third_order():
    def program(p, gradients):
        y = p["x"]
        for _ in range(8):
            y = tf.sin(y) * 1.1
        found = [y]
        for _ in range(3):
            found.append(gradients(found[-1], p["x"])[0])
        return found

    assert_same(program, data(), modes=("memory", None), kinds=("session",))


def taped_both_ways(program, inputs, mode="memory", **kwargs):
    plain = in_function(lambda p, _: program(p), inputs, **kwargs)
    with ms.patched(checkpoints=mode):
        ours = in_function(lambda p, _: program(p), inputs, **kwargs)
    assert_identical(ours.results, plain.results, f"tape, {mode!r}")
    return ours


@pytest.mark.parametrize("mode", ["memory", *slow("speed", None)])
def test_nested_tapes(mode):
    def program(p):
        with tf.GradientTape() as outer:
            outer.watch(p["x"])
            with tf.GradientTape() as tape:
                tape.watch(p["x"])
                y = tf.reduce_sum(tall(p)[1])
            first = tape.gradient(y, p["x"])
            penalty = tf.reduce_sum(tf.square(first))
        return [first, outer.gradient(penalty, p.all)]

    taped_both_ways(program, data(), mode)


@pytest.mark.parametrize("mode", [None, *slow("memory")])
def test_nested_tapes_with_respect_to_what_was_recomputed(mode):
    def program(p):
        with tf.GradientTape() as outer:
            outer.watch(p["x"])
            with tf.GradientTape() as tape:
                tape.watch(p["x"])
                h, y = tall(p)
            first = tape.gradient(y, p["x"])
            penalty = tf.reduce_sum(tf.square(first)) + tf.reduce_sum(y)
        return [first, outer.gradient(penalty, [h, *p.all])]

    taped_both_ways(program, data(), mode)


@pytest.mark.parametrize("mode", ["memory", *slow(None)])
def test_a_shared_weight_under_nested_tapes(mode):
    def program(p):
        w = p.weight("w", 32, 32)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                h = p["x"]
                for _ in range(12):
                    h = tf.tanh(tf.matmul(h, w))
                y = tf.reduce_sum(h)
            first = tape.gradient(y, w)
            penalty = tf.reduce_sum(tf.square(first))
        return [first, outer.gradient(penalty, w)]

    taped_both_ways(program, data(), mode)


def test_a_persistent_tape_asked_twice():
    def program(p):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(p["x"])
            h, y = tall(p)
            z = tf.reduce_sum(tf.sin(y))
        return [tape.gradient(y, p.all), tape.gradient(z, p.all), tape.gradient(z, h)]

    found = taped_both_ways(program, data())
    assert len(found.plans) >= 2


@pytest.mark.parametrize("batch", [False, True])
def test_jacobian(batch):
    def program(p):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(p["x"])
            y = p["x"]
            for _ in range(6):
                y = tf.sin(y)
            y = y[:, :4]
        jacobian = (tape.batch_jacobian if batch else tape.jacobian)(y, p["x"])
        return [jacobian, tape.gradient(y, p["x"])]

    taped_both_ways(program, Inputs({"x": numbers("x", 3, 8)}))
