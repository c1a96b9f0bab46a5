"""The inputs of products after grappler has moved constants, compared with its optimized graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools import capture
from graph_tools.grappler.constant_folding import PRODUCTS, folded
from tests.helpers.optimized import optimized_nodes
from tests.helpers.sampling import examples


def trees(leaves: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw trees of products of two factors, with ``leaves`` as their innermost factors."""
    return st.recursive(st.sampled_from(leaves), lambda tree: st.tuples(tree, tree), max_leaves=7)


#: A factor by the letter that its name begins with, a constant, or a product of two; or a product
#: that is divided by a constant.
TREES = trees([*"abc", 0.5]) | st.tuples(trees("abc"))


def multiplied(tree: Any, x: tf.Tensor, number: Iterator[int]) -> tf.Tensor:
    """Build the product of the tree; its factors are all different, and equally large."""
    if isinstance(tree, tuple) and len(tree) == 1:
        return tf.divide(multiplied(*tree, x, number), 3.0, name="div")
    if isinstance(tree, tuple):
        return tf.multiply(*(multiplied(part, x, number) for part in tree), name="mul")
    if isinstance(tree, float):
        return tf.constant(tree)
    return tf.sin(x + float(next(number)), name=f"{tree}{next(number)}")


def constants_alone(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return all(map(constants_alone, tree))
    return isinstance(tree, float)


def without_constants_alone(tree: Any) -> Any:
    """Replace each product of constants alone by a constant. Grappler folds these first; they are
    not tested here."""
    if not isinstance(tree, tuple):
        return tree
    if constants_alone(tree):
        return 0.5
    return tuple(map(without_constants_alone, tree))


def check(function: Any, columns: int) -> None:
    """Check that `folded` predicts the inputs of the products of a ``tf.function``."""
    graph = function.get_concrete_function().graph
    ops = capture(list(graph.outputs))
    moved = folded(ops)
    nodes = {node.name: node for node in optimized_nodes(lambda: function(tf.ones([4, columns])))}
    for i, op in enumerate(ops.ops):
        if op.type not in PRODUCTS or op.name not in nodes:
            continue
        node = nodes[op.name]
        assert (node.op == "Const") == (i in moved.gone)
        if node.op == "Mul":
            makers = {int(ops.producer[v]) for v in moved.reads[i] if not ops.constant[v]}
            read = {ops.ops[maker].name for maker in makers - moved.gone}
            assert read == {name for name in node.input if nodes[name].op != "Const"}


@settings(max_examples=examples(40), deadline=None)
@given(
    TREES.filter(lambda tree: isinstance(tree, tuple) and not constants_alone(tree)),
    st.booleans(),
    st.sampled_from([8, 8192]),
)
def test_products_read_what_grappler_lets_them_read(tree, known, columns):
    """Include products of more than 100 KiB, which grappler does not fold."""

    @tf.function(input_signature=[tf.TensorSpec([4 if known else None, columns])], autograph=False)
    def function(x):
        return tf.exp(multiplied(without_constants_alone(tree), x, itertools.count(1)), name="end")

    check(function, columns)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from(
        [
            (0.5, ("a", "b")),
            (("a", "b"), 0.5),
            (0.5, (("a", "b"), "c")),
            (0.5, ("a", ("b", "c"))),
            (("a", (0.5, ("b", "c"))), "d"),
        ]
    ),
    st.booleans(),
    st.integers(0, 3),
)
def test_constants_move_past_products_that_others_wait_for(tree, known, which):
    @tf.function(input_signature=[tf.TensorSpec([4 if known else None, 8])], autograph=False)
    def function(x):
        product = multiplied(tree, x, itertools.count(1))
        products = [op for op in product.graph.get_operations() if op.type == "Mul"]
        with tf.control_dependencies([products[which % len(products)]]):
            after = tf.identity(tf.cos(x))
        return tf.exp(product, name="end") + tf.exp(after)

    check(function, 8)


def test_the_gradient_of_a_mean_begins_with_a_quotient_of_constants():
    """The quotient is a constant itself, and no product."""

    @tf.function(input_signature=[tf.TensorSpec([64, 1024])], autograph=False)
    def function(x):
        y = tf.tanh(x) - 1.0
        return tf.gradients(tf.reduce_mean(y**2), x)[0]

    graph = function.get_concrete_function().graph
    ops = capture(list(graph.outputs))
    quotients = [i for i, op in enumerate(ops.ops) if op.type == "RealDiv"]
    assert quotients
    assert all(ops.constant[ops.first_value[i]] for i in quotients)
    assert not folded(ops).gone.intersection(quotients)


def test_thousands_of_constants_become_one():
    """The constants move down to one factor, one after the other; all of them are equally large."""

    @tf.function(input_signature=[tf.TensorSpec([4, 8])], autograph=False)
    def function(x):
        y = tf.sin(x) * tf.cos(x)
        for _ in range(3_000):
            y *= tf.constant([0.5] * 8)
        return y

    moved = folded(capture(list(function.get_concrete_function().graph.outputs)))
    assert len(moved.gone) == 2_999
