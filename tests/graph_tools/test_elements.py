"""Elements of tensors whose shapes are unknown: the batch, or rows that are chosen at run time."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from graph_tools.ops.elements import Count, elements, most_chosen, rows
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.ops.slices import slice_length
from tests.helpers.fresh import fresh

v1 = tf.compat.v1

CHOICES = {
    "mask": (lambda x: tf.boolean_mask(x, x[:, 0] > 0), Count(100 * 4, 0)),
    "mask of every element": (lambda x: tf.boolean_mask(x, x > 0), Count(400, 0)),
    "places": (lambda x: tf.where(x > 0), Count(2 * 400, 0)),
    "unique": (lambda x: tf.unique(x[:, 0])[0], Count(100, 0)),
    "parts": (lambda x: tf.dynamic_partition(x, tf.cast(x[:, 0], tf.int32), 2)[1], Count(400, 0)),
    "slice": (lambda x: x[: tf.cast(x[0, 0], tf.int32)], Count(400, 0)),
    "computed": (
        lambda x: tf.tanh(tf.boolean_mask(x, x[:, 0] > 0)) @ tf.zeros([4, 8]),
        Count(800, 0),
    ),
    "reshaped": (
        lambda x: tf.reshape(tf.boolean_mask(x, x[:, 0] > 0), [-1, 2]),
        Count(400, 0),
    ),
    "joined": (
        lambda x: tf.concat([tf.boolean_mask(x, x[:, 0] > 0)] * 3, 0),
        Count(1200, 0),
    ),
    "mean spread out": (
        lambda x: tf.broadcast_to(1.0, tf.shape(tf.boolean_mask(x, x[:, 0] > 0))),
        Count(400, 0),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_no_more_rows_are_chosen_than_there_are(name: str) -> None:
    choose, wanted = CHOICES[name]
    with tf.Graph().as_default() as graph:
        found = choose(v1.placeholder(tf.float32, [100, 4]))
    assert not found.shape.is_fully_defined()
    assert elements(found) == wanted
    assert tensor_bytes(found).fixed == wanted.fixed * found.dtype.size
    assert most_chosen(graph.get_operations(), 1) in (100, 400)


def test_rows_of_a_batch_are_those_of_the_batch() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4])
        chosen = tf.boolean_mask(tf.tanh(x), x[:, 0] > 0)
        two = v1.placeholder(tf.float32, [None, None, 4])
    assert elements(x) == elements(chosen) == Count(0, 4)
    assert elements(two) == Count(0, 4 * 64)
    assert most_chosen(graph.get_operations(), 1) is None


def test_a_stacked_list_has_as_many_rows_as_its_loop_has_steps() -> None:
    with tf.Graph().as_default():
        n = v1.placeholder(tf.int32, [])
        x = v1.placeholder(tf.float32, [8])
        states = tf.scan(lambda h, _: tf.tanh(h), tf.range(n), x)
    assert elements(states) == Count(256 * 8, 0)


def test_a_loop_of_tensorflow_1_ends() -> None:
    with tf.Graph().as_default():
        v1.disable_control_flow_v2()
        try:
            x = v1.placeholder(tf.float32, [None, 4])
            _, y = v1.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(h)), (0, x))
        finally:
            v1.enable_control_flow_v2()
    assert elements(y) == Count(0, 4)


def step(**options: Any) -> Any:
    """Return a step on the rows that a mask chooses: all but a few."""
    weights = [tf.eye(64) for _ in range(8)]

    @tf.function(autograph=False)
    def of(x: tf.Tensor) -> Any:
        h = tf.boolean_mask(x, x[:, 0] > -3.0)
        for w in weights:
            h = tf.nn.gelu(h @ w)
        return ms.gradients(tf.reduce_mean(h**2), x, **options)

    return of


SPEC = tf.TensorSpec([4096, 64])


def test_what_was_assumed_is_said_and_a_budget_may_be_in_bytes() -> None:
    ours = step(budget="20 MB")
    ours.get_concrete_function(SPEC)
    plan = ms.plans(ours)[-1]
    assert plan.assumed_rows == 4096 and plan.assumed_batch is None
    assert "; for 4,096 rows, the most that the run may choose" in str(plan)
    assert plan.peak_plain > 8 * 3 * 4 * 4096 * 64


def measured() -> tuple[int, int]:
    """Return the measured and the simulated bytes of a step (in a fresh process)."""
    ours = step(budget=0.5)
    x = tf.random.stateless_normal(SPEC.shape, [1, 2])
    return measure_peak(lambda: ours(x), warmup=2, steps=3).peak, ms.plans(ours)[-1].peak


def test_what_is_simulated_is_what_a_step_takes() -> None:
    took, simulated = fresh(f"{__name__}:measured")
    assert 0.85 * simulated < took < 1.05 * simulated


@pytest.mark.parametrize(
    ("part", "length"),
    [
        (lambda x, k: x[16 * k : 16 * k + 16], 16),
        (lambda x, k: x[k * 16 : (k + 1) * 16], 16),
        (lambda x, k: x[:, k : k + 2], 2),
        (lambda x, k: x[3, k - 1 : k + 1], 2),
        (lambda x, k: x[k : 2 * k + 1 - k], 1),
        (lambda x, k: x[k : 2 * k], None),
        (lambda x, k: x[k:], None),
        (lambda x, k: x[k + 8 : k], None),
        (lambda x, k: x[k : k + 8 : 2], None),
    ],
)
def test_the_ends_of_a_slice_say_its_length(part, length):
    step = tf.function(part).get_concrete_function(
        tf.TensorSpec([64, 8]), tf.TensorSpec([], tf.int32)
    )
    (slice_,) = (op for op in step.graph.get_operations() if op.type == "StridedSlice")
    assert slice_length(slice_) == length
    if length is not None:
        assert rows(slice_.outputs[0]) == (length, 0)
        assert most_chosen([slice_], 32) is None
        for k in range(1, 4):
            assert length in part(tf.zeros([64, 8]), k).shape
