"""Properties of ops (clonable, stateful, their kind), and edits of graphs."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from graph_tools import capture
from graph_tools.editing.rewiring import CLONE_SUFFIX, Rewiring, clone
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

v1 = tf.compat.v1


# --- Properties of ops


def test_draws_with_state_are_never_clonable(graph):
    for op in (
        tf.random.uniform([4]).op,
        tf.random.normal([4], seed=3).op,
        tf.raw_ops.RandomGamma(shape=[2], alpha=[1.0]).op,
        tf.raw_ops.Multinomial(logits=[[1.0, 2.0]], num_samples=3).op,
    ):
        stateful = next(o for o in capture([op]).ops if op_types.is_random(o))
        assert op_types.is_stateful(stateful), stateful.type
        assert not op_types.is_clonable(stateful), stateful.type


def test_stateless_draws_are_clonable(graph):
    for op in (
        tf.random.stateless_uniform([4], seed=[1, 2]).op,
        tf.random.stateless_normal([4], seed=[1, 2]).op,
    ):
        draws = [
            o
            for o in capture([op]).ops
            if op_types.is_random(o) and "Key" not in o.type and "Alg" not in o.type
        ]
        assert draws
        for draw in draws:
            assert op_types.is_clonable(draw) and not op_types.is_stateful(draw), draw.type


def test_ordinary_ops_are_clonable_and_not_stateful(graph):
    x = v1.placeholder(tf.float32, [4, 4])
    for tensor in (
        tf.tanh(x),
        tf.matmul(x, x),
        tf.concat([x, x], 0),
        tf.split(x, 2)[0],
        tf.reduce_sum(x),
        tf.cast(x, tf.float16),
        tf.reshape(x, [16]),
        tf.nn.softmax(x),
    ):
        assert op_types.is_clonable(tensor.op), tensor.op.type
        assert not op_types.is_stateful(tensor.op) and not op_types.is_random(tensor.op)


def test_names_decide_nothing(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x, name="RandomUniform/Dropout/ReadVariableOp")
    assert op_types.is_clonable(y.op) and not op_types.is_random(y.op)


def test_what_touches_state_or_the_world_is_not_clonable(graph):
    x = v1.placeholder(tf.float32, [4])
    resource = v1.get_variable("v", initializer=tf.zeros([4]), use_resource=True)
    reference = v1.get_variable("r", initializer=tf.zeros([4]), use_resource=False)
    called = tf.py_function(lambda t: t, [x], tf.float32)
    plain_call = tf.numpy_function(lambda t: t, [x], tf.float32)
    lists = tf.raw_ops.TensorListReserve(
        element_shape=[4], num_elements=3, element_dtype=tf.float32
    )
    item = tf.raw_ops.TensorListGetItem(
        input_handle=lists, index=0, element_shape=[4], element_dtype=tf.float32
    )
    bad = [
        resource.assign_add(x).op,
        reference.assign_add(x).op,
        (
            resource.read_value().op
            if resource.read_value().op.type == "ReadVariableOp"
            else resource.value().op
        ),
        v1.assign(reference, x).op,
        called.op,
        plain_call.op,
        v1.Print(x, [x]).op,
        tf.raw_ops.Assert(condition=True, data=[x]),
        lists.op,
        item.op,
        x.op,
        tf.constant(1.0).op,
        tf.no_op(),
        reference.value().op,
    ]
    for op in bad:
        assert not op_types.is_clonable(op), op.type


def test_calls_with_state_inside_are_not_clonable():
    state = tf.Variable(0.0)

    @tf.function(autograph=False)
    def counts(x):
        state.assign_add(1.0)
        return x * 2.0

    @tf.function(autograph=False)
    def pure(x):
        return tf.sin(x)

    @tf.function(autograph=False)
    def outer(x):
        return counts(x) + pure(x)

    ops = outer.get_concrete_function(tf.TensorSpec([4])).graph.get_operations()
    (call,) = [op for op in ops if op.type == "StatefulPartitionedCall"]
    assert not op_types.is_clonable(call)
    (other,) = [op for op in ops if op.type == "PartitionedCall"]
    assert op_types.is_clonable(other)


def test_ops_in_tf1_frames_are_not_clonable():
    was = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [])
            inside = []

            def branch():
                inside.append(tf.sin(x))
                return inside[0]

            v1.cond(x > 0, branch, lambda: tf.cos(x))
            assert not op_types.is_clonable(inside[0].op)
    finally:
        if was:
            v1.enable_control_flow_v2()


def test_sets_of_types_are_of_types_that_exist():
    from tensorflow.python.framework import op_def_registry

    unknown = {
        kind
        for kinds in (
            op_types.VIEWS,
            op_types.SHAPE_READERS,
            op_types.CONCATENATIONS,
            op_types.MERGED_AT_RUN_TIME,
            op_types.MERGES_AT_RUN_TIME,
        )
        for kind in kinds
        if op_def_registry.get(kind) is None
    }
    assert unknown == set()


# --- Edits


def test_clones_compute_the_same(graph):
    x = v1.placeholder(tf.float32, [4, 6])
    outs = [
        tf.tanh(x),
        tf.split(x, [1, 5], axis=1)[1],
        tf.strided_slice(x, [0, 1], [4, 6], [2, 1]),
        tf.reduce_sum(x, 1, keepdims=True),
        tf.cast(x, tf.float16),
        tf.transpose(x),
        tf.nn.conv2d(tf.reshape(x, [1, 4, 6, 1]), tf.ones([2, 2, 1, 3]), 1, "SAME"),
        tf.random.stateless_normal([4], [1, 2]),
    ]
    copies = []
    with graphs.outside_scopes(graph):
        for out in outs:
            copy = clone(out.op, list(out.op.inputs))
            assert copy.type == out.op.type and copy is not out.op
            assert copy.name.endswith(CLONE_SUFFIX)
            assert copy.node_def.attr == out.op.node_def.attr
            assert [t.shape for t in copy.outputs] == [t.shape for t in out.op.outputs]
            assert [t.dtype for t in copy.outputs] == [t.dtype for t in out.op.outputs]
            copies.append(copy.outputs[out.value_index])
    feed = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    with v1.Session() as session:
        for a, b in zip(*session.run([outs, copies], {x: feed}), strict=True):
            assert a.tobytes() == b.tobytes()


def test_clones_inherit_no_scope_and_wait_for_what_is_given(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x)
    with tf.device("/cpu:0"):
        z = tf.sin(x)
    trigger = tf.exp(x)
    with (
        tf.control_dependencies([tf.cos(x)]),
        tf.device("/gpu:0"),
        tf.name_scope("elsewhere"),
        graphs.outside_scopes(graph),
    ):
        copy = clone(y.op, [x], [trigger.op])
        placed = clone(z.op, [x])
    assert list(copy.control_inputs) == [trigger.op]
    assert copy.device == y.op.device == ""
    assert placed.device == z.op.device != ""
    assert not placed.control_inputs


def test_two_clones_have_two_names(graph):
    y = tf.tanh(v1.placeholder(tf.float32, [4]), name="y")
    with graphs.outside_scopes(graph):
        names = {clone(y.op, list(y.op.inputs)).name for _ in range(3)}
    assert len(names) == 3


def test_rewiring_is_undone_and_made_again(graph):
    x = v1.placeholder(tf.float32, [4])
    a, b, c = tf.sin(x), tf.cos(x), tf.tan(x)
    y = a * b
    rewiring = Rewiring()
    rewiring.point(y.op, 0, b)
    rewiring.point(y.op, 1, c)
    rewiring.point(y.op, 0, c)  # the same edge twice
    assert [t.ref() for t in y.op.inputs] == [c.ref(), c.ref()]
    assert y.op not in a.consumers() and y.op not in b.consumers()
    for _ in range(2):
        rewiring.undo()
        assert [t.ref() for t in y.op.inputs] == [a.ref(), b.ref()]
        assert y.op in a.consumers() and y.op not in c.consumers()
        rewiring.redo()
        assert [t.ref() for t in y.op.inputs] == [c.ref(), c.ref()]
    feed = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    with v1.Session() as session:
        np.testing.assert_allclose(session.run(y, {x: feed}), np.tan(feed) ** 2, rtol=1e-5)
