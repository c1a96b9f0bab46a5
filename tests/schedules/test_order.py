"""Backward ops that would hold memory long before their result is needed run late, unless the graph
says when they run."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from graph_tools import capture
from memsaving_gradients.capture.early_reductions import early_reductions
from memsaving_gradients.schedules.order import deferrable
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.sampling import one_of
from tests.helpers.support import KINDS, Inputs, Net, assert_same_gradients, in_session, numbers

LAYERS = 10
BYTES = 64 * 64 * 4


def decayed(p):
    h, penalty = p["x"], 0.0
    for i in range(LAYERS):
        w = p.weight(f"w{i}", 64, 64)
        h = tf.tanh(tf.matmul(h, w))
        penalty += tf.reduce_sum(tf.square(tf.convert_to_tensor(w)))
    return Net(tf.reduce_sum(h) + 1e-3 * penalty)


def scaled(p):
    """Return a penalty weighted by the data: its gradients are ready when the forward pass ends."""
    net = decayed(p)
    return Net(net.ys * tf.reduce_mean(tf.abs(p["x"])))


def normalized(p):
    """Return a network of `tf.nn.moments`, whose gradients have control edges between them."""
    h = p["x"]
    for i in range(LAYERS):
        h = tf.matmul(h, p.weight(f"w{i}", 64, 64))
        mean, variance = tf.nn.moments(h, 0)
        h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3))
    return Net(tf.reduce_sum(h))


def watched(p):
    """Return a network with a loss on every hidden value; its gradient is ready for backward."""
    h, losses = p["x"], []
    for i in range(LAYERS):
        narrow = tf.nn.gelu(tf.matmul(h, p.weight(f"a{i}", 64, 64)), approximate=False)
        h = h + tf.matmul(narrow, p.weight(f"b{i}", 64, 64))
        losses.append(tf.reduce_mean(tf.square(h)))
    return Net(tf.reduce_sum(h) + 1e-3 * tf.add_n(losses))


def watched_through_views(p):
    """Return the same with losses on another view of the hidden values, and with cheap ops."""
    h, losses = p["x"], []
    for i in range(LAYERS):
        h = h + tf.tanh(tf.matmul(h, p.weight(f"a{i}", 64, 64)))
        seen = tf.reshape(h, [-1, 8, 8])
        losses.append(tf.reduce_mean(tf.abs(seen) + tf.square(seen)))
    return Net(tf.reduce_sum(h) + 1e-3 * tf.add_n(losses))


def watched_from_behind(p, which):
    """Return a network with losses on one of three hidden values in each layer, built after all
    layers."""
    h, watched = p["x"], []
    for i in range(2 * LAYERS):
        product = tf.matmul(h, p.weight(f"a{i}", 64, 64))
        shifted = tf.nn.bias_add(product, p.weight(f"b{i}", 64))
        h = tf.nn.relu(shifted)
        watched.append({"product": product, "shifted": shifted, "h": h}[which])
    losses = sum(tf.reduce_mean(tf.square(seen)) for seen in watched)
    return Net(tf.reduce_sum(h) + 1e-3 * losses)


FROM_BEHIND = [
    pytest.param(functools.partial(watched_from_behind, which=which), id=which)
    for which in ("product", "shifted", "h")
]


@pytest.mark.sampled
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "build", [decayed, scaled, normalized, watched, watched_through_views, *FROM_BEHIND]
)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_gradients_are_the_same(build):
    inputs = Inputs({"x": numbers("x", 32, 64)})
    modes = one_of(("memory", "speed", None))
    assert_same_gradients(build, inputs, modes=modes, kinds=one_of(KINDS))


def by_memory(build, rows):
    """Return the default plan for ``rows`` rows of data."""

    def program(p, gradients):
        net = build(p)
        return gradients(net.ys, list(p.weights.values()))

    return in_session(program, Inputs({"x": numbers("x", rows, 64)}), "memory").plans[-1]


@pytest.mark.parametrize("build", [decayed, scaled])
def test_gradients_of_penalties_are_made_one_by_one(build):
    plan = by_memory(build, 8)
    assert plan.peak_plain > LAYERS * BYTES / 2
    # Two threads compute one or two ahead of their turn.
    assert plan.peak < plan.peak_plain / 2


@pytest.mark.parametrize("build", [watched, watched_through_views, *FROM_BEHIND])
def test_gradients_of_losses_on_hidden_values_are_made_one_by_one(build):
    plan = by_memory(build, 512)
    assert plan.peak < 0.4 * plan.peak_plain


def test_what_is_read_by_nobody_else_is_not_held_longer():
    """If an early op alone reads much, running it late would hold its inputs, not its result."""

    def first_late(*others_at):
        # Backward begins with op 2, which reads the forward value 0. The last op needs the result
        # of op 2.
        between = [(0,) if op in others_at else (1,) for op in range(3, 39)]
        reads = [(), (0,), (0,), *between, (2,)]
        count = len(reads)
        graph = TrainingGraph(
            first_backward=2,
            reads=reads,
            writes=[(op,) for op in range(count)],
            producer=np.arange(count),
            storage=np.arange(count),
            size=np.full(count, 1 << 20),
            source=np.zeros(count, bool),
            clonable=np.arange(count) > 0,
            joins=np.zeros(count, bool),
            forwards=np.zeros(count, bool),
            fuses=np.zeros(count, bool),
            seconds=np.ones(count),
            expensive=np.zeros(count, bool),
        )
        return 2 in deferrable(graph)

    assert first_late(38)
    assert first_late(22)
    assert not first_late(10)
    assert not first_late()


def test_forward_reductions_written_behind_the_network_stand_behind_what_they_read():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1024, 64])
        first = tf.tanh(x)
        h = first
        for _ in range(40):
            h = tf.tanh(h)
        square = tf.square(first)
        penalty = tf.reduce_sum(square)
        used_later = tf.reduce_sum(tf.square(x))
        wide = tf.reduce_sum(tf.square(first), axis=1)
        # Values that branches have read are held until the gradients of the branches.
        second = tf.sin(x)
        branch = tf.cond(x[0, 0] > 0.0, lambda: tf.reduce_sum(second), lambda: 0.0)
        ops = capture([tf.reduce_sum(h) + penalty + used_later + tf.reduce_sum(wide) + branch])
    sizes = ops.value_bytes(1)
    early = {ops.ops[i] for i in early_reductions(ops, len(ops.ops), sizes)}
    assert {square.op, penalty.op, wide.op} <= early
    # The graph's inputs are always alive, and the end of the network is no reduction of an early
    # value.
    assert early.isdisjoint({used_later.op, h.op, first.op, branch.op, branch.op.inputs[0].op})
    with graph.as_default():
        again = capture([penalty + tf.reduce_sum(h)], late=0, early=early)
    order = [op for op in again.ops if op.type in ("Tanh", "Square")]
    assert order.index(square.op) == 1


def test_what_stands_beside_puts_the_end_of_a_network_no_farther_away():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [1024, 64])
        h = x
        for _ in range(40):
            h = tf.tanh(h)
        loss = tf.reduce_sum(h)
        packed = [h]
        for _ in range(20):
            packed.append(tf.sign(packed[-1]))
    beside = [tensor.op for tensor in packed[1:]]
    ops = capture([loss, packed[-1]], late=0, early=beside)
    sizes = ops.value_bytes(1)
    assert ops.position[loss.op.name] > ops.position[beside[-1].name]
    assert loss.op in {ops.ops[i] for i in early_reductions(ops, len(ops.ops), sizes)}
    assert not early_reductions(ops, len(ops.ops), sizes, beside)


def test_the_graph_has_no_cycle():
    import memsaving_gradients as ms

    with tf.Graph().as_default() as graph:
        p = Inputs({"x": numbers("x", 32, 64)})
        p.restart({"x": tf.compat.v1.placeholder(tf.float32, [None, 64])})
        net = normalized(p)
        ms.gradients(net.ys, p.all, checkpoints="memory", batch_size=512)
        capture([op for op in graph.get_operations() if op.outputs or op.control_inputs])
