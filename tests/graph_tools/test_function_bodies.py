"""The memory of called functions: lists of loops, values alive inside, XLA's buffers on a CPU."""

from __future__ import annotations

import pytest
import tensorflow as tf

from benchmarks.allocation_trace import allocation_events
from graph_tools.costs.estimates import op_seconds
from graph_tools.costs.function_bodies import inside
from graph_tools.ops.trip_counts import steps_of, trip_count
from graph_tools.ops.variant_bytes import variant_bytes
from graph_tools.tf_private import loops
from tests.helpers.fresh import fresh

STEPS, SIZE = 20, 64


@tf.function(autograph=False)
def _looping(x: tf.Tensor) -> tf.Tensor:
    """Return the result of a loop over the rows of ``x``. Their number is an element of a constant
    vector, as in Keras 2."""
    steps = tf.constant([STEPS, SIZE])[0]
    _, y = tf.while_loop(
        lambda i, h: i < steps, lambda i, h: (i + 1, tf.tanh(tf.sin(h))), (0, x[0])
    )
    return y


def test_lists_of_called_loops_have_bytes() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [STEPS, SIZE])
        tf.gradients(_looping(x), x)
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    lists = [
        [variant_bytes(out).fixed for out in op.outputs if out.dtype == tf.variant] for op in calls
    ]
    # The gradients read the sine's argument and the tangent's result of each step. They count as
    # one list: the argument is the tangent of the step before. The backward call returns no list.
    assert sorted(map(sorted, lists)) == [[], [0, 4 * STEPS * SIZE]]


def test_a_state_in_two_lists_is_counted_once() -> None:
    """The gradient of a product reads a step's input, the gradient of a hyperbolic tangent its
    output. The output is the input of the next step."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [SIZE, SIZE])
        _, y = tf.while_loop(
            lambda i, h: i < STEPS, lambda i, h: (i + 1, tf.tanh(tf.sin(h) * h)), (0, x)
        )
        tf.gradients(y, x)
    (loop, _) = (op for op in graph.get_operations() if op.type in loops.LOOPS)
    lists = [out for out in loop.outputs if out.dtype == tf.variant]
    # For each step, the sine and the result. The argument is the result of the step before.
    assert len(lists) == 3
    assert sum(variant_bytes(out).fixed for out in lists) == 2 * STEPS * 4 * SIZE**2


def test_steps_are_known_by_an_element_of_a_constant() -> None:
    called = _looping.get_concrete_function(tf.TensorSpec([STEPS, SIZE])).graph
    (loop,) = (op for op in called.get_operations() if op.type in loops.LOOPS)
    assert trip_count(loop) == STEPS


@pytest.mark.parametrize(
    ("condition", "steps"),
    [
        (lambda i, h: tf.logical_and(i < 7, h[0] < 1.0), 7),
        (lambda i, h: tf.logical_and(tf.logical_and(h[0] < 1.0, i <= 7), i < 20), 8),
        (lambda i, h: tf.logical_or(i < 7, h[0] < 1.0), None),
        (lambda i, h: h[0] < 1.0, None),
    ],
)
def test_a_bound_holds_whatever_else_a_condition_asks(condition, steps) -> None:
    @tf.function(autograph=False)
    def looping(x):
        return tf.while_loop(condition, lambda i, h: (i + 1, tf.sin(h)), (0, x))[1]

    graph = looping.get_concrete_function(tf.TensorSpec([SIZE])).graph
    (loop,) = (op for op in graph.get_operations() if op.type in loops.LOOPS)
    assert trip_count(loop) == steps


@tf.function
def _of_range(x):
    for _ in tf.range(12):
        x = tf.tanh(x)
    return x


@tf.function
def _while_both(x):
    i = tf.constant(0)
    while i < 12 and tf.reduce_sum(x) > 0.1:
        x, i = tf.tanh(x), i + 1
    return x


@tf.function
def _while_either(x):
    i = tf.constant(0)
    while i < 12 or tf.reduce_sum(x) > 0.1:
        x, i = tf.tanh(x), i + 1
    return x


@tf.function(autograph=False)
def _least_of_two(x):
    steps = tf.minimum(tf.cast(x[0], tf.int32), 12)
    return tf.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, tf.tanh(h)), (0, x))[1]


@pytest.mark.parametrize(
    ("looping", "steps"),
    [(_of_range, 12), (_while_both, 12), (_while_either, None), (_least_of_two, 12)],
)
def test_steps_are_known_as_autograph_writes_loops(looping, steps) -> None:
    graph = looping.get_concrete_function(tf.TensorSpec([SIZE])).graph
    (loop,) = (op for op in graph.get_operations() if op.type in loops.LOOPS)
    assert trip_count(loop) == steps


def test_steps_are_known_through_calls() -> None:
    """A persistent tape puts a loop and its gradient into functions. Their arguments tell where the
    loop begins and ends."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.scan(lambda h, e: tf.tanh(h) + e, x)[-1]
        return tape.gradient(y, x)

    graph = step.get_concrete_function(tf.TensorSpec([STEPS, SIZE])).graph
    calls = [op for op in graph.get_operations() if op.type in loops.CALLS]
    called = [op for call in calls for op in loops.bodies(call)[0].get_operations()]
    assert [steps_of(op) for op in called if op.type in loops.LOOPS] == [STEPS - 1] * 2


def test_a_call_takes_what_is_alive_inside() -> None:
    @tf.function(autograph=False)
    def called(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.sort(x) * tf.sort(-x))

    with tf.Graph().as_default() as graph:
        called(tf.compat.v1.placeholder(tf.float32, [SIZE, SIZE]))
    (call,) = (op for op in graph.get_operations() if op.type.endswith("PartitionedCall"))
    found = inside(call, 1, op_seconds)
    # At least two sorted tensors, and no more than the other buffers of a sort.
    assert found is not None
    assert 2 * 4 * SIZE**2 <= found.workspace <= 8 * 4 * SIZE**2


def grouped(channels: int, groups: int, multiplier: int) -> dict[str, int]:
    """Return the simulated bytes of a grouped convolution's gradient in a function of XLA, and its
    largest allocated buffer."""

    @tf.function(jit_compile=True)
    def convolved(x, w):
        return tf.nn.convolution(x, w, padding="SAME")

    @tf.function
    def step(x, w):
        y = convolved(x, w)
        return [tf.reduce_sum(g) for g in tf.gradients(tf.reduce_sum(y * y), [x, w])]

    shapes = [2, 8, 8, channels], [7, 7, channels // groups, channels * multiplier]
    batch = [tf.random.uniform(shape) for shape in shapes]
    for _ in range(2):
        step(*batch)
    graph = step.get_concrete_function(*batch).graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    takes = [found.workspace for op in calls if (found := inside(op, 2, op_seconds)) is not None]
    events = allocation_events(lambda: step(*batch)[0].numpy())
    return {"said": max(takes), "seen": max(event.requested for event in events)}


@pytest.mark.parametrize(
    ("groups", "multiplier", "whole"), [(128, 1, True), (16, 1, False), (128, 2, False)]
)
def test_xla_makes_gradients_of_depthwise_filters_whole(groups, multiplier, whole):
    what = {"channels": 128, "groups": groups, "multiplier": multiplier}
    found = fresh("tests.graph_tools.test_function_bodies:grouped", what)
    twice = 2 * 4 * 7 * 7 * 128**2
    assert (found["seen"] >= twice) == (found["said"] >= twice) == whole
    if whole:
        assert found["said"] == pytest.approx(found["seen"], rel=0.05)


def _branches(update: bool) -> tf.Operation:
    """Return the op of a branch that reads a tensor, may change a variable, and returns nothing."""
    variable = tf.Variable(tf.zeros([SIZE, SIZE]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        y = tf.sin(x)

        def updated() -> None:
            difference = tf.sin(y) - variable
            if update:
                variable.assign_add(difference * tf.cos(y))

        tf.cond(tf.reduce_sum(x) > 0.0, updated, lambda: None)

    graph = step.get_concrete_function(tf.TensorSpec([SIZE, SIZE])).graph
    (found,) = (op for op in graph.get_operations() if op.type in loops.BRANCHES)
    return found


def test_what_branches_do_for_their_effect_counts() -> None:
    branches, tensor = _branches(update=True), 4 * SIZE**2
    number = next(k for k, t in enumerate(branches.inputs) if t.op.type == "Sin")
    alone = inside(branches, 1, op_seconds)
    assert alone is not None
    # The difference and the cosine are alive at once.
    assert alone.workspace == 2 * tensor
    assert alone.seconds > 0
    given = inside(branches, 1, op_seconds, [number])
    assert given is not None
    # The cosine takes over the buffer of its input.
    assert given.workspace == tensor
    nothing = inside(_branches(update=False), 1, op_seconds)
    assert nothing is not None
    assert nothing.workspace == 0
