"""Graphs as they are captured: values, storages, sources, order; and their bytes."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import random

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

from graph_tools import Bytes, GraphError, GraphToolsError, OpGraph, capture, tensor_bytes
from graph_tools.tf_private import graphs

v1 = tf.compat.v1


def types(captured) -> list[str]:
    return [op.type for op in captured.ops]


# --- Capture


def test_capture_numbers_values_consecutively(graph):
    x = v1.placeholder(tf.float32, [4, 6])
    a, b = tf.split(tf.tanh(x), 2, axis=1)
    found = capture([a + b])
    assert isinstance(found, OpGraph)
    assert (
        found.first_value.tolist()
        == np.cumsum([0, *(len(op.outputs) for op in found.ops[:-1])]).tolist()
    )
    for i, op in enumerate(found.ops):
        for k, out in enumerate(op.outputs):
            value = found.value(out)
            assert value == found.first_value[i] + k
            assert found.producer[value] == i
            assert found.tensor(value) is out
        assert [found.value(t) for t in op.inputs] == list(found.inputs[i])
        assert found.position[op.name] == i
    assert found.value(b) == found.value(a) + 1


def test_capture_takes_only_what_is_needed(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x)
    tf.exp(y, name="unused")
    assert types(capture([y])) == ["Placeholder", "Tanh"]
    with pytest.raises(KeyError):
        capture([x]).value(y)


def test_capture_takes_operations_and_tensors(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x)
    assert types(capture([y.op])) == types(capture([y])) == types(capture([y, y.op, x]))


def test_views_share_storage_and_cost_nothing(graph):
    x = v1.placeholder(tf.float32, [4, 6])
    y = tf.tanh(x)
    views = [
        tf.reshape(y, [24]),
        tf.identity(y),
        tf.expand_dims(y, 0),
        tf.stop_gradient(y),
        tf.squeeze(tf.expand_dims(y, 0)),
        tf.ensure_shape(y, [4, 6]),
        tf.bitcast(y, tf.int32),
        y + 0.0,
        *tf.identity_n([y, tf.sin(y)])[:1],
    ]
    other = tf.identity_n([tf.exp(y), y])[1]
    copies = [tf.transpose(y), tf.cast(y, tf.float64), y + 1.0]
    found = capture([*views, other, *copies])
    root = found.value(y)
    for view in (*views, other):
        assert found.storage[found.value(view)] == root, view.op.type
        assert found.value_bytes(1)[found.value(view)] == 0
    for copy in copies:
        assert found.storage[found.value(copy)] == found.value(copy), copy.op.type
    assert found.value_bytes(1)[root] == 96


def test_second_output_of_identity_n_looks_at_the_second_input(graph):
    x = v1.placeholder(tf.float32, [4])
    a, b = tf.sin(x), tf.cos(x)
    c, d = tf.identity_n([a, b])
    found = capture([c, d])
    assert found.storage[found.value(c)] == found.value(a)
    assert found.storage[found.value(d)] == found.value(b)


def test_sources_and_folding(graph):
    x = v1.placeholder(tf.float32, [4], name="x")
    fed = v1.placeholder_with_default(tf.ones([4]), [4])
    folded = tf.sin(tf.constant([1.0, 2.0, 3.0, 4.0])) * 2.0
    seed = v1.placeholder(tf.int32, [2])
    drawn = tf.random.stateless_normal([4], seed=seed)
    constant = tf.random.stateless_normal([4], seed=[1, 2])
    huge = tf.reduce_sum(tf.random.stateless_normal([4, 2**20], seed=[1, 2]), 1)
    stateful = tf.random.uniform([4])
    view = tf.reshape(x, [2, 2])
    y = tf.reshape(view, [4]) + fed + folded + drawn + constant + huge + stateful
    found = capture([y])
    source = {
        t.name: bool(found.source[found.value(t)])
        for t in (x, fed, folded, view, drawn, constant, huge, stateful, y)
    }
    assert source == {
        x.name: True,
        fed.name: True,
        folded.name: True,
        view.name: True,
        drawn.name: False,
        constant.name: True,
        huge.name: False,
        stateful.name: False,
        y.name: False,
    }
    sizes = found.value_bytes(3)
    assert all(sizes[found.value(t)] == 0 for t in (x, fed, folded, view))
    roots = [found.storage[found.value(t)] for t in (drawn, huge, stateful, y)]
    assert all(sizes[root] == 16 for root in roots)


def test_variables_are_sources():
    variable = tf.Variable(tf.ones([4, 4]))

    @tf.function
    def step(x):
        y = tf.matmul(x, variable) + tf.reduce_sum(variable)
        found = capture([y])
        reads = [i for i, op in enumerate(found.ops) if op.type == "ReadVariableOp"]
        assert reads
        for i in reads:
            assert found.source[found.first_value[i]] and not found.clonable[i]
        return y

    step.get_concrete_function(tf.TensorSpec([2, 4]))


def test_control_inputs_are_captured_and_kept_apart(graph):
    x = v1.placeholder(tf.float32, [4])
    with tf.control_dependencies([tf.exp(x, name="first")]):
        y = tf.tanh(x)
    found = capture([y])
    i, first = found.position[y.op.name], found.position["first"]
    assert found.controls[i] == (first,)
    assert found.inputs[i] == (found.value(x),)
    assert found.dag.edges[first, i]["control"] is True
    assert found.dag.edges[found.position[x.op.name], i]["control"] is False
    assert nx.is_directed_acyclic_graph(found.dag)


def test_what_may_never_be_asked_for_is_optional(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x)
    z = tf.sin(y)
    found = capture([y], unfetched=[z])
    assert types(found) == ["Placeholder", "Tanh", "Sin"]
    assert found.optional.tolist() == [False, False, True]
    assert found.readers == [[1], [], []]
    assert not capture([z], unfetched=[y]).optional.any()


def test_a_reduction_of_unknown_shape_is_no_larger_than_what_it_reduces(graph):
    x = v1.placeholder(tf.float32, [None, 12, 16])
    axes = v1.placeholder(tf.int32, [1])
    total = tf.reduce_sum(tf.tanh(x), axes, keepdims=True)
    assert total.shape.as_list() == [None, None, None]
    doubled = tf.exp(total)
    found = capture([doubled])
    for tensor in (total, doubled):
        assert found.bytes_per_example[found.value(tensor)] == 12 * 16 * 4


def test_stop_ends_the_capture(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(tf.exp(x))
    z = tf.sin(y)
    found = capture([z], stop=[y])
    assert types(found) == ["Tanh", "Sin"]
    assert found.inputs[0] == ()
    assert not found.clonable[0]


def test_stopping_at_the_target_leaves_it_alone(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x)
    assert types(capture([y], stop=[y])) == ["Tanh"]


def test_no_targets_give_an_empty_graph():
    found = capture([])
    assert found.ops == () and len(found.producer) == 0
    assert found.dag.number_of_nodes() == 0


def test_targets_of_different_graphs_are_refused():
    with tf.Graph().as_default():
        a = tf.constant(1.0)
    with tf.Graph().as_default():
        b = tf.constant(1.0)
    with pytest.raises(GraphError, match="2 different graphs") as caught:
        capture([a, b])
    assert isinstance(caught.value, GraphToolsError) and isinstance(caught.value, ValueError)


def test_cycles_are_refused(graph):
    x = v1.placeholder(tf.float32, [4])
    a = tf.sin(x)
    b = tf.cos(a)
    graphs.update_input(a.op, 0, b)
    with pytest.raises(GraphError, match="cycle"):
        capture([b])


def test_tf1_while_loops_are_refused():
    was = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [4])
            _, y = v1.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, tf.sin(t)), [0, x])
            with pytest.raises(GraphError, match="cycle"):
                capture([y])
    finally:
        if was:
            v1.enable_control_flow_v2()


def test_edited_graphs_are_put_in_order(graph):
    x = v1.placeholder(tf.float32, [4], name="x")
    y = tf.sin(x, name="y")
    late = tf.exp(x, name="late")
    graphs.update_input(y.op, 0, late)
    found = capture([y])
    assert [op.name for op in found.ops] == ["x", "late", "y"]
    graphs.update_input(y.op, 0, x)
    graphs.add_control_inputs(y.op, [late.op])
    assert [op.name for op in capture([y]).ops] == ["x", "late", "y"]


@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_topological_and_by_creation(seed):
    draw = random.Random(seed)
    with tf.Graph().as_default():
        values = [v1.placeholder(tf.float32, [4])]
        for _ in range(30):
            values.append(tf.add(draw.choice(values), draw.choice(values)))
        # Edges against the order of creation. They lead to ops that depend on the input alone, so
        # they close no cycle.
        for k in range(5):
            side = tf.sin(values[0], name=f"side{k}")
            graphs.update_input(draw.choice(values[1:]).op, draw.randint(0, 1), side)
        found = capture([values[-1]])
        for i in range(len(found.ops)):
            assert all(found.producer[v] < i for v in found.inputs[i])
        assert [op.name for op in capture([values[-1]]).ops] == [op.name for op in found.ops]


def test_deep_graphs_hit_no_recursion_limit(graph):
    y = v1.placeholder(tf.float32, [4])
    for _ in range(3000):
        y = tf.sin(y)
    assert len(capture([y]).ops) == 3001
    assert nx.is_directed_acyclic_graph(capture([y]).dag)


# --- Sizes


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (tf.float32, [8, 16], (512, 0)),
        (tf.float16, [8, 16], (256, 0)),
        (tf.bfloat16, [3], (6, 0)),
        (tf.complex128, [3], (48, 0)),
        (tf.bool, [5], (5, 0)),
        (tf.float32, [], (4, 0)),
        (tf.float32, [0, 7], (0, 0)),
        (tf.float32, [None, 16], (0, 64)),
        (tf.float32, [16, None], (0, 64)),
        (tf.float32, [None, None, 2], (0, 4 * 64 * 2)),
        (tf.float32, None, (0, 4 * 64)),
        (tf.string, [9], (0, 0)),
        (tf.resource, [], (0, 0)),
        (tf.variant, [], (0, 0)),
    ],
)
def test_tensor_bytes(graph, dtype, shape, expected):
    assert tensor_bytes(v1.placeholder(dtype, shape)) == Bytes(*expected)


def test_bytes_follow_the_batch(graph):
    x = v1.placeholder(tf.float32, [None, 16])
    y = tf.tanh(x)
    w = tf.random.uniform([16, 2])
    found = capture([tf.matmul(y, w)])
    for batch in (1, 7, 32):
        sizes = found.value_bytes(batch)
        assert sizes[found.value(y)] == 64 * batch == tensor_bytes(y).at(batch)
        assert sizes[found.value(w)] == 128
