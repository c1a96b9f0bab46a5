"""Marking tensors by hand: where marks live, and what may be marked."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.engine.marks import marked

v1 = tf.compat.v1


def test_eager_is_identity() -> None:
    x = tf.constant([1.0])
    assert ms.checkpoint(x, name="here") is x


def test_eager_constant_in_a_function_is_identity() -> None:
    outside = tf.constant([1.0])

    @tf.function
    def f() -> tf.Tensor:
        assert ms.checkpoint(outside) is outside
        return tf.constant(0)

    f()


def test_unnamed_mark_adds_no_op() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.tanh(v1.placeholder(tf.float32, [4]))
        before = len(graph.get_operations())
        assert ms.checkpoint(x) is x
        assert len(graph.get_operations()) == before
        assert marked(graph) == [x]


def test_named_mark_is_found_by_name() -> None:
    with tf.Graph().as_default() as graph:
        x = ms.checkpoint(tf.tanh(v1.placeholder(tf.float32, [4])), name="middle")
        assert marked(graph) == [x]
        assert x.name == "middle:0"


def test_gradient_passes_a_named_mark() -> None:
    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        return tf.gradients(ms.checkpoint(x * x, name="middle"), x)[0]

    assert f(tf.constant(3.0)).numpy() == 6.0


def test_each_mark_once() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.tanh(v1.placeholder(tf.float32, [4]))
        ms.checkpoint(ms.checkpoint(x))
        v1.add_to_collection("checkpoints", x)
        assert marked(graph) == [x]


def test_v1_collection_may_hold_operations() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.tanh(v1.placeholder(tf.float32, [4]))
        v1.add_to_collection("checkpoints", x.op)
        assert marked(graph) == [x]


def test_marks_of_an_enclosing_graph_are_not_the_inner_ones() -> None:
    inner: list[list[tf.Tensor]] = []

    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        y = ms.checkpoint(tf.tanh(x))

        def branch() -> tf.Tensor:
            z = ms.checkpoint(tf.sin(y))
            inner.append([marked(z.graph), [z]])
            return z

        return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: y)

    f(tf.ones([4]))
    for found, expected in inner:
        assert [t.ref() for t in found] == [t.ref() for t in expected]


def test_marks_die_with_their_graph() -> None:
    with tf.Graph().as_default() as graph:
        ms.checkpoint(tf.tanh(v1.placeholder(tf.float32, [4])), name="middle")
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("value", [3.0, None, "name", np.zeros(3)])
def test_only_tensors(value: object) -> None:
    with pytest.raises(ms.errors.ArgumentError, match="only tensors can be marked"):
        ms.checkpoint(value)


def test_composite_tensor() -> None:
    with pytest.raises(ms.errors.ArgumentError, match="mark the values"):
        ms.checkpoint(tf.ragged.constant([[1.0], [2.0, 3.0]]))


def test_variable() -> None:
    with pytest.raises(ms.errors.ArgumentError, match="never recomputed"):
        ms.checkpoint(tf.Variable(1.0))


def test_integer_tensor_in_a_graph() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.int32, [4], name="ids")
        with pytest.raises(ms.errors.ArgumentError, match=r"tensor='ids:0'.*int32.*no gradient"):
            ms.checkpoint(x)


def test_name_must_be_a_string() -> None:
    with pytest.raises(ms.errors.ArgumentError, match=r"name=3: give a string"):
        ms.checkpoint(tf.constant(1.0), name=3)  # type: ignore[arg-type]


def test_auto_uses_marks_between_xs_and_ys() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [1000])
        for k in range(16):
            y = tf.tanh(y)
            if k == 7:
                y = ms.checkpoint(y, name="middle")
        ms.gradients(y, x)
        (plan,) = ms.plans(graph)
    assert plan.checkpoints == ("Tanh_7:0",) or plan.checkpoints == ("middle:0",)


def test_auto_ignores_marks_of_other_gradients() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [1000])
        ms.checkpoint(tf.sin(v1.placeholder(tf.float32, [1000])))
        for _ in range(16):
            y = tf.tanh(y)
        ms.gradients(y, x)
        (plan,) = ms.plans(graph)
    assert plan.mode == "memory"


MODES = {
    "memory": ms.gradients_memory,
    "speed": ms.gradients_speed,
    "collection": ms.gradients_collection,
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_a_function(mode: str) -> None:
    def plan_of(gradients: Callable[..., list[Any]], **options: str) -> ms.Plan:
        with tf.Graph().as_default() as graph:
            x = y = v1.placeholder(tf.float32, [8, 8])
            for _ in range(8):
                y = ms.checkpoint(tf.matmul(tf.tanh(y), y))
            (gradient,) = gradients(y, [x], [tf.ones([8, 8])], name="backward", **options)
            assert gradient.shape == [8, 8]
        (plan,) = ms.plans(graph)
        return plan

    plan = plan_of(MODES[mode])
    assert plan.mode == mode
    assert plan == plan_of(ms.gradients, checkpoints=mode)


def test_collection_without_marks() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000])
        y = tf.tanh(tf.sin(x))
        with pytest.raises(ms.errors.ArgumentError, match=r"checkpoints='collection'.*is marked"):
            ms.gradients_collection(y, x)
