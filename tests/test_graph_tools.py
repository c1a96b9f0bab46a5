"""The ground floor: capture, sizes, separators, liveness, op knowledge, edits, gates."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import random

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

from graph_tools import (
    Bytes,
    GraphError,
    GraphToolsError,
    _tf,
    articulation_points,
    capture,
    edit,
    frontier,
    frontier_bytes,
    optypes,
    tensor_bytes,
    timeline,
)

v1 = tf.compat.v1


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def types(captured) -> list[str]:
    return [op.type for op in captured.ops]


# Capture -------------------------------------------------------------------------------------------------------


def test_capture_numbers_values_consecutively(graph):
    x = v1.placeholder(tf.float32, [4, 6])
    a, b = tf.split(tf.tanh(x), 2, axis=1)
    found = capture([a + b])
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
    found = capture([y], besides=[z])
    assert types(found) == ["Placeholder", "Tanh", "Sin"]
    assert found.optional.tolist() == [False, False, True]
    assert found.readers == [[1], [], []]
    assert not capture([z], besides=[y]).optional.any()


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
    _tf.update_input(a.op, 0, b)
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
    _tf.update_input(y.op, 0, late)
    found = capture([y])
    assert [op.name for op in found.ops] == ["x", "late", "y"]
    _tf.update_input(y.op, 0, x)
    _tf.add_control_inputs(y.op, [late.op])
    assert [op.name for op in capture([y]).ops] == ["x", "late", "y"]


@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_topological_and_by_creation(seed):
    draw = random.Random(seed)
    with tf.Graph().as_default():
        values = [v1.placeholder(tf.float32, [4])]
        for _ in range(30):
            values.append(tf.add(draw.choice(values), draw.choice(values)))
        # Edges against the order of creation that close no cycle: to ops that depend on nothing but the input.
        for k in range(5):
            side = tf.sin(values[0], name=f"side{k}")
            _tf.update_input(draw.choice(values[1:]).op, draw.randint(0, 1), side)
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


# Sizes -----------------------------------------------------------------------------------------------------------


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


# Separators --------------------------------------------------------------------------------------------------------


def random_dag(seed: int, n: int) -> nx.DiGraph:
    draw = random.Random(seed)
    dag = nx.DiGraph()
    dag.add_nodes_from(range(n))
    reach = draw.choice([1, 2, 3, n])
    density = draw.choice([0.1, 0.3, 0.6])
    for b in range(1, n):
        for a in range(max(0, b - reach), b):
            if draw.random() < density:
                dag.add_edge(a, b)
        if draw.random() < 0.6:
            dag.add_edge(b - 1, b)
    return dag


def cuts_by_removal(dag: nx.DiGraph, first: list[int], last: list[int]) -> list[int]:
    def connected(without: set[int]) -> bool:
        left = dag.subgraph(set(dag) - without)
        return any(a in left and b in left and nx.has_path(left, a, b) for a in first for b in last)

    return [node for node in dag if connected(set()) and not connected({node})]


@pytest.mark.parametrize("seed", range(200))
def test_articulation_points_are_the_nodes_whose_removal_cuts_every_path(seed):
    draw = random.Random(seed)
    dag = random_dag(seed, draw.randint(2, 14))
    first = draw.sample(sorted(dag), draw.randint(1, 2))
    last = draw.sample(sorted(dag), draw.randint(1, 2))
    assert sorted(articulation_points(dag, first, last)) == cuts_by_removal(dag, first, last)


def test_articulation_points_come_in_topological_order():
    dag = nx.DiGraph([(5, 3), (3, 9), (9, 1), (5, 9), (1, 0), (9, 0)])
    assert articulation_points(dag, [5], [0]) == [5, 9, 0]


def test_side_inputs_hide_no_cut():
    dag = nx.DiGraph([(0, 1), (1, 2), (2, 3), *((100, k) for k in range(4))])
    assert articulation_points(dag, [0], [3]) == [0, 1, 2, 3]


def test_no_path_no_cut():
    assert articulation_points(nx.DiGraph([(0, 1), (2, 3)]), [0], [3]) == []


def test_a_node_that_is_first_and_last_is_the_cut():
    assert articulation_points(nx.DiGraph([(0, 1)]), [1], [1]) == [1]


@pytest.mark.parametrize("seed", range(50))
def test_frontiers_are_what_is_made_before_and_read_after(seed):
    draw = np.random.default_rng(seed)
    length, count = int(draw.integers(1, 20)), int(draw.integers(0, 30))
    born = draw.integers(0, length, count)
    last = draw.integers(0, length, count)  # some are never read after their birth
    size = draw.integers(0, 100, count)
    expected = [[v for v in range(count) if born[v] <= p < last[v]] for p in range(length)]
    assert frontier_bytes(born, last, size, length).tolist() == [
        sum(int(size[v]) for v in members) for members in expected
    ]
    assert frontier_bytes(born, last, np.ones_like(size), length).tolist() == list(
        map(len, expected)
    )
    for p in range(length):
        assert frontier(born, last, p).tolist() == expected[p]


# Liveness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_timeline_sums_what_is_alive(seed):
    draw = np.random.default_rng(seed)
    steps, count = int(draw.integers(1, 20)), int(draw.integers(0, 30))
    born = draw.integers(0, steps, count)
    dies = np.array([draw.integers(b, steps) for b in born], np.int64)
    size = draw.integers(0, 1 << 40, count)
    expected = [
        sum(int(s) for b, d, s in zip(born, dies, size, strict=True) if b <= now <= d)
        for now in range(steps)
    ]
    assert timeline(born, dies, size, steps).tolist() == expected


# What an op is ---------------------------------------------------------------------------------------------------


def test_draws_with_state_are_never_clonable(graph):
    for op in (
        tf.random.uniform([4]).op,
        tf.random.normal([4], seed=3).op,
        tf.raw_ops.RandomGamma(shape=[2], alpha=[1.0]).op,
        tf.raw_ops.Multinomial(logits=[[1.0, 2.0]], num_samples=3).op,
    ):
        stateful = next(o for o in capture([op]).ops if optypes.is_random(o))
        assert optypes.is_stateful(stateful), stateful.type
        assert not optypes.is_clonable(stateful), stateful.type


def test_stateless_draws_are_clonable(graph):
    for op in (
        tf.random.stateless_uniform([4], seed=[1, 2]).op,
        tf.random.stateless_normal([4], seed=[1, 2]).op,
    ):
        draws = [
            o
            for o in capture([op]).ops
            if optypes.is_random(o) and "Key" not in o.type and "Alg" not in o.type
        ]
        assert draws
        for draw in draws:
            assert optypes.is_clonable(draw) and not optypes.is_stateful(draw), draw.type


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
        assert optypes.is_clonable(tensor.op), tensor.op.type
        assert not optypes.is_stateful(tensor.op) and not optypes.is_random(tensor.op)


def test_names_decide_nothing(graph):
    x = v1.placeholder(tf.float32, [4])
    y = tf.tanh(x, name="RandomUniform/Dropout/ReadVariableOp")
    assert optypes.is_clonable(y.op) and not optypes.is_random(y.op)


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
        resource.read_value().op
        if resource.read_value().op.type == "ReadVariableOp"
        else resource.value().op,
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
        assert not optypes.is_clonable(op), op.type


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
    assert not optypes.is_clonable(call)
    (other,) = [op for op in ops if op.type == "PartitionedCall"]
    assert optypes.is_clonable(other)


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
            assert not optypes.is_clonable(inside[0].op)
    finally:
        if was:
            v1.enable_control_flow_v2()


def test_sets_of_types_are_of_types_that_exist():
    from tensorflow.python.framework import op_def_registry

    unknown = {
        kind
        for kinds in (
            optypes.VIEWS,
            optypes.SHAPE_READERS,
            optypes.CONCATENATIONS,
            optypes.MERGED_AT_RUN_TIME,
            optypes.MERGES_AT_RUN_TIME,
        )
        for kind in kinds
        if op_def_registry.get(kind) is None
    }
    assert unknown == set()


# Edits ------------------------------------------------------------------------------------------------------------


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
    with _tf.outside_scopes(graph):
        for out in outs:
            copy = edit.clone(out.op, list(out.op.inputs))
            assert copy.type == out.op.type and copy is not out.op
            assert copy.name.endswith(edit.CLONE_SUFFIX)
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
        _tf.outside_scopes(graph),
    ):
        copy = edit.clone(y.op, [x], [trigger.op])
        placed = edit.clone(z.op, [x])
    assert list(copy.control_inputs) == [trigger.op]
    assert copy.device == y.op.device == ""
    assert placed.device == z.op.device != ""
    assert not placed.control_inputs


def test_two_clones_have_two_names(graph):
    y = tf.tanh(v1.placeholder(tf.float32, [4]), name="y")
    with _tf.outside_scopes(graph):
        names = {edit.clone(y.op, list(y.op.inputs)).name for _ in range(3)}
    assert len(names) == 3


def test_rewiring_is_undone_and_made_again(graph):
    x = v1.placeholder(tf.float32, [4])
    a, b, c = tf.sin(x), tf.cos(x), tf.tan(x)
    y = a * b
    rewiring = edit.Rewiring()
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
