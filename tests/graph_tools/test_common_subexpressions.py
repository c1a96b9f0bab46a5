"""Ops that become one when the graph runs, compared with what grappler leaves of random graphs."""

from __future__ import annotations

from collections import Counter

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools import capture
from graph_tools.grappler.common_subexpressions import equal_ops
from graph_tools.memory.executor import simulate_execution
from graph_tools.memory.measure import measure_peak
from graph_tools.tf_private import graphs
from tests.helpers.fresh import fresh
from tests.helpers.sampling import examples

v1 = tf.compat.v1
UNIT = 4 * 2**14
#: Kinds that grappler's rules of arithmetic leave alone; `Maximum` is commutative.
KINDS = (tf.sin, tf.cos, tf.matmul, tf.atan2, tf.maximum)


def fed() -> tf.Tensor:
    return v1.placeholder(tf.float32, [4, 4])


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(-3, 5)), max_size=20)
)
def test_as_many_ops_are_left_as_grappler_leaves(network):
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        made = [fed(), fed()]
        for kind, i, j in network:
            # Constants of two values.
            second = made[j % len(made)] if j >= 0 else tf.constant(j % 2 + 0.5, shape=[4, 4])
            reads = [made[i % len(made)], second]
            made.append(kind(*reads[: 1 if kind in (tf.sin, tf.cos) else 2]))
        result = tf.raw_ops.Pack(values=made)
        ops = capture([result])
        metadata = v1.RunMetadata()
        session.run(
            result,
            {tensor: [[0.5] * 4] * 4 for tensor in made[:2]},
            options=v1.RunOptions(output_partition_graphs=True),
            run_metadata=metadata,
        )
    kinds = {"Sin", "Cos", "MatMul", "Atan2", "Maximum"}
    nodes = [
        node.op.removeprefix("_Mkl") for part in metadata.partition_graphs for node in part.node
    ]
    same = equal_ops(ops)
    expected = Counter(op.type for i, op in enumerate(ops.ops) if i not in same)
    assert {kind: nodes.count(kind) for kind in kinds} == {kind: expected[kind] for kind in kinds}


def test_ops_that_differ_in_anything_stay(graph):
    x = fed()
    with tf.control_dependencies([tf.sin(x)]):
        waiting = tf.cos(x)
    transposed = tf.matmul(x, x, transpose_a=True)
    protected = tf.tanh(x)
    graphs.protect(protected.op)
    drawn = [tf.random.uniform([4]), tf.random.uniform([4])]
    with tf.device("CPU:0"):
        placed = tf.cos(x)
    mine = [waiting, tf.cos(x), placed, transposed, tf.matmul(x, x), tf.tanh(x), protected, *drawn]
    assert not equal_ops(capture(mine))


def test_constants_are_equal_by_what_they_hold(graph):
    x = fed()
    padded = [tf.pad(x, [[1, 0], [0, k // 2]]) for k in range(4)]
    filled = [tf.fill([2, 2], 1.0), tf.fill([2, 2], 1.0)]
    ops = capture([*padded, *filled])
    # Ops that read only constants are folded; they take no place anyway.
    assert [ops.ops[i] for i in equal_ops(ops)] == [padded[1].op, padded[3].op]


def test_equal_results_are_held_once(graph):
    x = tf.transpose(v1.placeholder(tf.float32, [128, 128]))
    # A product keeps its inputs alive, and each of its inputs has a rectifier of its own.
    products = [tf.matmul(tf.nn.relu(x), tf.nn.relu(x), transpose_a=bool(k)) for k in range(2)]
    peak = simulate_execution(capture([tf.add_n(products)]), batch=1)[0].peak
    # One rectified tensor, which takes the place of x, and two products.
    assert peak == 3 * UNIT


def branches() -> list[int]:
    """Return the simulated and the measured peak of branches that each begin with a rectifier."""

    @tf.function
    def step(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        y = tf.matmul(x, w)
        made = [tf.matmul(tf.nn.relu(y), w + float(k)) for k in range(4)]
        loss = tf.reduce_sum(tf.tanh(tf.add_n(made)))
        return tf.reduce_sum(tf.gradients(loss, [w])[0])

    x, w = tf.random.uniform([4096, 256]), tf.random.uniform([256, 256])
    ops = capture(step.get_concrete_function(x, w).graph.outputs)
    measured = measure_peak(lambda: step(x, w).numpy()).peak
    return [simulate_execution(ops, batch=1)[0].peak, measured]


def test_the_runtime_agrees():
    simulated, measured = fresh("tests.graph_tools.test_common_subexpressions:branches")
    assert abs(simulated - measured) <= 0.1 * measured
