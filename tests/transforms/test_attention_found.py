"""Attention in handwritten code: what is found and computed in blocks; what is kept, and why."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.transforms.attention.pattern.causality import is_causal
from memsaving_gradients.transforms.attention.pattern.elementwise import Unclear, elementwise
from memsaving_gradients.transforms.attention.pattern.matching import found_in
from memsaving_gradients.transforms.attention.pattern.products import Product
from tests.helpers.attention_cases import assert_close, dot_product
from tests.helpers.found_attention import (
    LONG,
    blocks_in,
    by_hand,
    dropped,
    found_by,
    in_blocks,
    loss_of,
    one,
    pairs_in,
    same,
    stepped,
    tensors,
)
from tests.helpers.sampling import covering, examples, slow
from tests.helpers.support import numbers

pytestmark = pytest.mark.usefixtures("small_blocks")


# --- handwritten


def by_einsum(query, key, value):
    scores = tf.einsum("bqhd,bkhd->bhqk", query, key) * 0.25
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), value)


def heads_behind(query, key, value):
    scores = tf.einsum("aecd,abcd->acbe", key, query)
    return tf.einsum("acbe,aecd->abcd", tf.nn.softmax(scores), value)


def dots(query, key, value):
    scores = tf.einsum("...qd,...kd->...qk", query, key)
    return tf.einsum("...qk,...kd->...qd", tf.nn.softmax(scores), value)


def transposed(query, key, value):
    scores = tf.matmul(query, tf.transpose(key, [0, 1, 3, 2])) * 0.3
    return tf.matmul(tf.nn.softmax(tf.identity(scores)), value)


def turned_around(query, key, value):
    """Multiply keys by queries; the last product reads the weights transposed."""
    scores = tf.einsum("bhkd,bhqd->bhqk", key, query)
    return tf.einsum("bhkd,bhqk->bhdq", value, tf.nn.softmax(scores))


def capped(query, key, value):
    scores = 5.0 * tf.tanh(tf.matmul(query, key, transpose_b=True) / 20.0)
    return tf.matmul(tf.nn.softmax(scores), value)


@pytest.mark.parametrize(
    "function",
    [by_einsum, heads_behind, transposed, turned_around, capped, *slow(by_hand, dots)],
    ids=lambda f: f.__name__,
)
def test_products(function):
    if function in (by_einsum, heads_behind):
        inputs = tensors((2, LONG, 3, 8), (2, 70, 3, 8), (2, 70, 3, 8))
    else:
        inputs = tensors((2, 3, LONG, 8), (2, 3, 70, 8), (2, 3, 70, 5))
    same(function, *inputs)


def test_rank_two_and_one_tensor_for_all():
    same(by_hand, *tensors((LONG, 8), (70, 8), (70, 4)))
    same(lambda x: by_hand(x, x, x), one(LONG, 8))
    same(lambda x: by_einsum(x, x, x), one(2, LONG, 2, 8))


@pytest.mark.parametrize("among", [(0,), (2,), *slow((1,), (0, 2))])
def test_some_gradients(among):
    def function(*inputs):
        stopped = [x if i in among else tf.stop_gradient(x) for i, x in enumerate(inputs)]
        return by_hand(*stopped)

    same(function, *tensors((2, LONG, 8), (2, 70, 8), (2, 70, 5)))


def test_no_gradient_at_all():
    same(
        lambda q, k, v: tf.stop_gradient(by_hand(q, k, v)) * q,
        *tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8)),
    )


MASKS = {
    "keys": (2, 1, 1, 70),
    "queries": (2, 1, LONG, 1),
    "pairs": (LONG, 70),
    "batch": (2, 1, LONG, 70),
    "heads": (2, 3, LONG, 70),
}


@pytest.mark.parametrize(
    ("kind", "way"), covering([*MASKS], ["select", "add", "multiply", "subtract"])
)
def test_masks(kind, way):
    mask = tf.constant(numbers(kind, *MASKS[kind]) > 0.2)
    if kind == "pairs":
        # These queries see no key: their plain softmax is over equal numbers, or over ones that
        # rounding made equal to -1e9.
        mask = tf.concat([tf.zeros([3, 70], tf.bool), mask[3:]], 0)

    def function(query, key, value, mask):
        scores = tf.matmul(query, key, transpose_b=True)
        if way == "select":
            scores = tf.where(mask, scores, tf.constant(-1e9))
        elif way == "add":
            scores += (1.0 - tf.cast(mask, tf.float32)) * -1e9
        elif way == "multiply":
            scores = scores * tf.cast(mask, tf.float32) - 1e5 * (1 - tf.cast(mask, tf.float32))
        else:
            scores = tf.where(tf.logical_not(mask), scores - 1e9, scores)
        return tf.matmul(tf.nn.softmax(scores), value)

    same(function, *tensors((2, 3, LONG, 8), (2, 3, 70, 8), (2, 3, 70, 5)), mask)


def test_positions():
    def function(query, key, value):
        scores = tf.matmul(query, key, transpose_b=True)
        band = tf.linalg.band_part(tf.ones([LONG, LONG]), -1, 0)
        near = tf.abs(tf.range(LONG)[:, tf.newaxis] - tf.range(LONG)) < 40
        seen = tf.logical_and(band > 0, near)
        seen = tf.logical_and(seen, tf.ones_like(scores, tf.bool))
        weights = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
        return tf.matmul(weights, value)

    step = same(function, *tensors(*[(2, 3, LONG, 8)] * 3))
    graph = step.get_concrete_function(*tensors(*[(2, 3, LONG, 8)] * 3)).graph
    assert not pairs_in(graph, LONG)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_dtypes(dtype, compiled):
    tolerance = {tf.float16: 1e-2, tf.bfloat16: 6e-2, tf.float64: 1e-12}[dtype]
    inputs = tensors((2, 3, LONG, 8), (2, 3, 70, 8), (2, 3, 70, 5), dtype=dtype)
    same(by_hand, *inputs, tolerance=tolerance, compiled=compiled)


def test_softmax_in_float32():
    def function(query, key, value):
        scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32) * 0.3
        weights = tf.cast(tf.nn.softmax(scores), query.dtype)
        return tf.matmul(weights, value)

    inputs = tensors((2, 3, LONG, 8), (2, 3, 70, 8), (2, 3, 70, 5), dtype=tf.float16)
    same(function, *inputs, tolerance=1e-2)


def test_infinite_masks():
    mask = tf.constant(numbers("mask", LONG, 70) > 0)

    def function(query, key, value):
        scores = tf.matmul(query, key, transpose_b=True)
        return tf.matmul(tf.nn.softmax(tf.where(mask, scores, -np.inf)), value)

    same(function, *tensors((2, LONG, 8), (2, 70, 8), (2, 70, 5)))


def masked(query, key, value, mask):
    return dot_product(query, key, value, mask=mask, causal=True)


@functools.cache
def of_any_length(differentiate):
    """Return a function that is traced once for all lengths."""
    signature = [tf.TensorSpec([None, 3, None, 8]) for _ in range(3)]
    signature.append(tf.TensorSpec([None] * 4, tf.bool))
    return stepped(masked, differentiate=differentiate, signature=signature)


@pytest.mark.parametrize("lengths", [(5, 5), (LONG, 70), (1, 9)])
def test_unknown_lengths(lengths):
    queries, keys = lengths
    plain, ours = of_any_length(tf.gradients), of_any_length(in_blocks)
    inputs = tensors((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8))
    for shape in [(2, 1, 1, keys), (1, 1, queries, keys)]:
        mask = tf.constant(numbers("mask", *shape) > 0)
        assert_close(ours(*inputs, mask), plain(*inputs, mask))
        assert blocks_in(ours, *inputs, mask) == 1


@pytest.mark.parametrize("function", [by_hand, by_einsum])
def test_unknown_batch(function):
    signature = [tf.TensorSpec([None, LONG, 3, 8]) for _ in range(3)]
    same(function, *tensors(*[(2, LONG, 3, 8)] * 3), signature=signature, finds=1)


def test_broadcast_queries():
    signature = [tf.TensorSpec([1, 4, 8]), *[tf.TensorSpec([None, LONG, 8])] * 2]
    same(by_hand, *tensors((1, 4, 8), (2, LONG, 8), (2, LONG, 8)), signature=signature)
    same(by_hand, *tensors((1, 4, 8), (2, LONG, 8), (2, LONG, 8)))


@pytest.mark.parametrize("function", [by_hand, pytest.param(capped, marks=pytest.mark.slow)])
def test_compiled_by_xla(function):
    same(function, *tensors((2, 3, LONG, 8), (2, 3, 70, 8), (2, 3, 70, 5)), compiled=True)


@settings(max_examples=examples(10), deadline=None)
@given(
    queries=st.integers(2, 140),
    keys=st.integers(2, 140),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    kind=st.sampled_from(["none", "row", "column", "pairs"]),
    chance=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_any_length_and_mask(queries, keys, scale, kind, chance):
    shape = {"row": (1, keys), "column": (queries, 1), "pairs": (queries, keys)}.get(kind, (1, 1))
    mask = tf.constant(np.random.default_rng(queries).random(shape) < chance)

    def function(query, key, value, mask):
        scores = tf.matmul(query, key, transpose_b=True) * scale
        scores = scores if kind == "none" else tf.where(mask, scores, -1e9)
        return tf.matmul(tf.nn.softmax(scores), value)

    inputs = tensors((2, queries, 4), (2, keys, 4), (2, keys, 3))
    same(function, *inputs, mask, tolerance=1e-5 * max(1.0, scale))


# --- causal masks


def causal_masks():
    ones = tf.ones([LONG, LONG])
    rows, columns = (tf.cumsum(tf.ones([1, LONG, LONG], tf.int32), axis) for axis in (-2, -1))
    return {
        "count": rows >= columns,
        "count, turned": columns <= rows,
        "not behind": tf.logical_not(rows < columns),
        "band": tf.linalg.band_part(ones, -1, 0) > 0,
        "cast": tf.cast(tf.linalg.band_part(ones, -1, 0), tf.bool)[tf.newaxis],
        "and all": tf.logical_and(tf.ones([LONG, LONG], tf.bool), rows >= columns),
        "behind": rows <= columns,
        "strictly": rows > columns,
        "near": tf.linalg.band_part(ones, 3, 0) > 0,
        "and more": tf.logical_and(rows >= columns, tf.range(LONG) > 3),
    }


@pytest.mark.parametrize(
    ("kind", "low"), covering(["count", "band", "strictly", "near", "and more"], [True, False])
)
def test_blocks_behind_a_query(kind, low):
    def function(query, key, value):
        scores = tf.matmul(query, key, transpose_b=True)
        mask = causal_masks()[kind]
        scores = tf.where(mask, scores, -1e9 if low else -1.0)
        return tf.matmul(tf.nn.softmax(scores), value)

    same(function, *tensors(*[(2, LONG, 8)] * 3))


def test_what_is_causal(graph):
    q, k = (tf.compat.v1.placeholder(tf.float32, [2, LONG, 8]) for _ in range(2))
    scores = tf.matmul(q, k, transpose_b=True)
    found = {
        kind: is_causal(elementwise(tf.where(mask, scores, -1e9)))
        for kind, mask in causal_masks().items()
    }
    assert [kind for kind, causal in found.items() if not causal] == [
        "behind",
        "strictly",
        "near",
        "and more",
    ]
    mask = causal_masks()["count"]
    assert is_causal(elementwise(tf.where(tf.logical_not(mask), scores - 1e9, scores)))
    assert not is_causal(elementwise(tf.where(mask, scores - 1e9, scores)))
    assert not is_causal(elementwise(tf.where(mask, scores, -1.0)))
    assert not is_causal(elementwise(scores * 2.0))


# --- attention that is kept, and why


def biased(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True)
    bias = tf.reduce_sum(query, -1, keepdims=True) * tf.linalg.matrix_transpose(key[..., :1])
    return tf.matmul(tf.nn.softmax(scores + bias), value)


def deeply_biased(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True)
    return tf.matmul(tf.nn.softmax(scores + tf.reduce_sum(key, -1)[:, tf.newaxis]), value)


def scaled(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True) * tf.reduce_mean(value)
    return tf.matmul(tf.nn.softmax(scores), value)


def watched(query, key, value):
    weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
    return tf.matmul(weights, value) + tf.reduce_max(weights)


def two_products(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True)
    scores += tf.matmul(query, key[:, ::-1], transpose_b=True)
    return tf.matmul(tf.nn.softmax(scores), value)


def one_query(query, key, value):
    return by_hand(query[:, :1], key, value)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (dropped, "changed before they multiply the values"),
        (biased, "a bias or scale that is trained"),
        (scaled, "a bias or scale that is trained"),
        (deeply_biased, "a bias or scale that is trained"),
        (watched, "also reads 'Softmax:0'"),
        (two_products, "more than one product"),
        (one_query, "one query"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.usefixtures("exact")
def test_kept(function, reason):
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))

    def named(way):
        def differentiate(ys, xs):
            return ms.gradients(ys, xs, checkpoints="speed", attention=way)

        return stepped(lambda *xs: function(*map(tf.tanh, xs)), differentiate=differentiate)

    plain, ours = named("keep"), named("blocks")
    for a, b in zip(plain(*inputs), ours(*inputs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert blocks_in(ours, *inputs) == 0
    count, kept = found_by(ours)
    assert not count
    assert reason in kept["Softmax"]


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_classes_are_no_attention():
    def function(x, weights):
        output = tf.nn.softmax(tf.matmul(tf.tanh(x), weights))
        for _ in range(4):
            output = tf.sin(tf.tanh(output))
        return output

    step = stepped(function, differentiate=lambda *a: in_blocks(*a, checkpoints="speed"))
    step(*tensors((200, 8), (8, 100)))
    assert ms.plans(step) and found_by(step) == (0, {})


def test_scores_that_are_asked_for(graph):
    q, k, v = (tf.compat.v1.placeholder(tf.float32, [2, LONG, 8]) for _ in range(3))
    scores = tf.matmul(tf.tanh(q), tf.tanh(k), transpose_b=True)
    output = tf.matmul(tf.nn.softmax(scores), v)
    in_blocks(loss_of(output), [q, scores], checkpoints="speed")
    assert "in addition to those of queries" in dict(ms.plans(graph)[-1].attention_kept)["Softmax"]
    in_blocks(loss_of(output), [q], checkpoints=[scores])
    assert "asked for" in dict(ms.plans(graph)[-1].attention_kept)["Softmax"]


def test_named_output(graph):
    q, k, v = (tf.compat.v1.placeholder(tf.float32, [2, LONG, 8]) for _ in range(3))
    output = by_hand(tf.tanh(q), k, v)
    in_blocks(loss_of(tf.tanh(tf.tanh(output))), [q, k], checkpoints=[output])
    assert ms.plans(graph)[-1].attention == ("Softmax",)


def test_unclear_without_products(graph):
    with pytest.raises(Unclear):
        found_in(tf.nn.softmax(tf.ones([3, 3])).op)


def test_axes_of_products(graph):
    a, b = (tf.compat.v1.placeholder(tf.float32, [3, 3, 3]) for _ in range(2))

    def axes(equation):
        product = Product.of(tf.einsum(equation, a, b).op)
        return None if product is None else (product.operands, product.result)

    assert axes("bij,bjk->bik") == ((("b", "i", "j"), ("b", "j", "k")), ("b", "i", "k"))
    assert axes("...ij,...jk->...ik")[1][1:] == ("i", "k")
    assert axes("bij,bjk->bi") is None
    turned = Product.of(tf.matmul(a, b, transpose_a=True).op)
    assert turned.operands == ((0, "sum", "row"), (0, "sum", "column"))
    assert Product.of((a * b).op) is None
