"""What products read when grappler has moved their constants, beside the graph that it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.eager import context

from graph_tools import capture
from graph_tools.grappler.constant_folding import folded
from tests.helpers.sampling import examples

#: A factor by the letter that its name begins with, a constant, or a product of two.
TREES = st.recursive(
    st.sampled_from([*"abc", 0.5]), lambda tree: st.tuples(tree, tree), max_leaves=7
)


def multiplied(tree: Any, x: tf.Tensor, number: Iterator[int]) -> tf.Tensor:
    """The product; factors are all different, and equally large."""
    if isinstance(tree, tuple):
        return tf.multiply(*(multiplied(part, x, number) for part in tree), name="mul")
    if isinstance(tree, float):
        return tf.constant(tree)
    return tf.sin(x + float(next(number)), name=f"{tree}{next(number)}")


def constants_alone(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return constants_alone(tree[0]) and constants_alone(tree[1])
    return isinstance(tree, float)


def without_constants_alone(tree: Any) -> Any:
    """Products of constants are folded before anything else happens; they are not what is looked
    at."""
    if not isinstance(tree, tuple):
        return tree
    if constants_alone(tree):
        return 0.5
    return tuple(map(without_constants_alone, tree))


@settings(max_examples=examples(40), deadline=None)
@given(
    TREES.filter(lambda tree: isinstance(tree, tuple) and not constants_alone(tree)), st.booleans()
)
def test_products_read_what_grappler_lets_them_read(tree, known):
    @tf.function(input_signature=[tf.TensorSpec([4 if known else None, 8])], autograph=False)
    def function(x):
        return tf.exp(multiplied(without_constants_alone(tree), x, itertools.count(1)), name="end")

    graph = function.get_concrete_function().graph
    ops = capture(list(graph.outputs))
    moved = folded(ops)
    context.enable_run_metadata()
    function(tf.ones([4, 8]))
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    nodes = {
        node.name: node
        for function_graphs in metadata.function_graphs
        for node in function_graphs.post_optimization_graph.node
    }
    for i, op in enumerate(ops.ops):
        if op.type != "Mul" or op.name not in nodes:
            continue
        node = nodes[op.name]
        assert (node.op == "Const") == (i in moved.gone)
        if node.op == "Mul":
            makers = {int(ops.producer[v]) for v in moved.reads[i] if not ops.constant[v]}
            read = {ops.ops[maker].name for maker in makers - moved.gone}
            assert read == {name for name in node.input if nodes[name].op != "Const"}


def test_thousands_of_constants_become_one():
    """They go down to one factor, one by one, and the next is as large as those before it."""

    @tf.function(input_signature=[tf.TensorSpec([4, 8])], autograph=False)
    def function(x):
        y = tf.sin(x) * tf.cos(x)
        for _ in range(3_000):
            y *= tf.constant([0.5] * 8)
        return y

    moved = folded(capture(list(function.get_concrete_function().graph.outputs)))
    assert len(moved.gone) == 2_999
