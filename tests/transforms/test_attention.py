"""Attention in blocks: the same results and gradients as from its formula, in a fraction of the
memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools.memory.measure import measure_peak
from memsaving_gradients.errors import ArgumentError, HigherOrderError, MemorySavingError
from memsaving_gradients.transforms.attention import additive_attention, dot_product_attention
from memsaving_gradients.transforms.attention.blocks import BlockedAxis, block_sizes
from memsaving_gradients.transforms.attention.grid import Grid, Options
from memsaving_gradients.transforms.attention.pairs import Place
from tests.helpers.attention_cases import (
    additive,
    assert_close,
    compiled,
    dot_product,
    eagerly,
    first_order,
    second_order,
    tensors,
)
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering, examples
from tests.helpers.support import check_error, numbers

MASKS = {
    "none": None,
    "keys": (2, 1, 1, 11),
    "queries": (2, 1, 13, 1),
    "pairs": (13, 11),
    "heads": (2, 3, 13, 11),
}


def mask_of(kind):
    shape = MASKS[kind]
    return None if shape is None else tf.constant(numbers(kind, *shape) > 0.2)


def inputs_of(queries=13, keys=11, dtype=tf.float32):
    return tensors((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 5), dtype=dtype)


def same(options, inputs=None, block=4, plain=None, *, order=1, how=tf.function, tolerance=1e-5):
    """Check that ours and the formula give the same, differentiated once or twice."""
    inputs = inputs_of() if inputs is None else inputs
    names = ["bias"] if len(inputs) > 3 else []

    def with_bias(function, **more):
        def called(query, key, value, *bias):
            return function(query, key, value, **dict(zip(names, bias, strict=True)), **more)

        return called

    differentiate = first_order if order == 1 else second_order
    ours = with_bias(dot_product_attention, block=block, **options)
    formula = with_bias(dot_product, **(options if plain is None else plain))
    found = how(lambda *xs: differentiate(ours, xs), autograph=False)(*inputs)
    assert_close(found, differentiate(formula, inputs), tolerance)


# --- the same results and gradients


@pytest.mark.parametrize(("kind", "causal"), covering([*MASKS], [False, True]))
def test_masks(kind, causal):
    same({"mask": mask_of(kind), "causal": causal})


@pytest.mark.parametrize(
    ("shape", "kind"),
    covering([(2, 3, 13, 11), (3, 1, 11), (13, 1), (1, 1)], ["none", "pairs"]),
)
def test_bias(shape, kind):
    same({"mask": mask_of(kind)}, [*inputs_of(), *tensors(shape)])


@pytest.mark.parametrize("how", [eagerly, compiled], ids=["eager", "xla"])
def test_eager_and_xla(how):
    options = {"mask": mask_of("heads"), "causal": True}
    same(options, [*inputs_of(), *tensors((3, 13, 11))], how=how)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("none", tf.function, marks=pytest.mark.slow),
        ("keys", eagerly),
        ("pairs", tf.function),
        pytest.param("keys", compiled, marks=pytest.mark.slow),
    ],
)
def test_second_order(kind, how):
    options = {"mask": mask_of(kind), "causal": kind != "keys"}
    same(options, [*inputs_of(), *tensors((3, 13, 11))], order=2, how=how)


@settings(max_examples=examples(8), deadline=None)
@given(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    block=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape_mask_and_block(queries, keys, block, causal, data):
    rows, columns = (data.draw(st.sampled_from([1, n])) for n in (queries, keys))
    chance = data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    mask = np.random.default_rng(queries).random((2, 1, rows, columns)) < chance
    same(
        {"mask": tf.constant(mask), "causal": causal}, inputs_of(queries, keys), block, how=eagerly
    )


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 1), (300, 200)])
def test_default_blocks(queries, keys):
    same({"causal": True}, inputs_of(queries, keys), None)


def test_rank_two_and_scale():
    inputs = tensors((9, 4), (7, 4), (7, 3))
    same({"scale": 0.3}, inputs)
    same({"scale": tf.constant(0.3)}, inputs, plain={"scale": 0.3})


def test_unknown_lengths_and_batch():
    specs = [tf.TensorSpec([None, 3, None, 8]) for _ in range(3)] + [
        tf.TensorSpec([None] * 4, tf.bool)
    ]

    @tf.function(input_signature=specs, autograph=False)
    def ours(query, key, value, mask):
        def attention(*xs):
            return dot_product_attention(*xs, mask=mask, causal=True)

        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attention(query, key, value)
            loss = tf.reduce_sum(output * output)
        return [output, *tape.gradient(loss, [query, key, value])]

    for batch, queries, keys, shape in [(2, 13, 11, (2, 1, 13, 11)), (1, 5, 70, (1, 1, 1, 70))]:
        inputs = tensors((batch, 3, queries, 8), (batch, 3, keys, 8), (batch, 3, keys, 8))
        mask = tf.constant(numbers("m", *shape) > 0)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = dot_product(*inputs, mask=mask, causal=True)
            loss = tf.reduce_sum(output * output)
        assert_close(ours(*inputs, mask), [output, *tape.gradient(loss, inputs)])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(tf.function, id="graph"),
        pytest.param(compiled, id="xla", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_dtypes(dtype, how):
    tolerance = {tf.float16: 5e-3, tf.bfloat16: 4e-2, tf.float64: 1e-12}[dtype]
    options = {"mask": mask_of("keys"), "causal": True}
    inputs = inputs_of(dtype=dtype)
    wide = [tf.cast(x, tf.float64) for x in inputs]
    found = how(
        lambda *xs: first_order(
            lambda *ys: dot_product_attention(*ys, block=(4, 3), **options), xs
        ),
        autograph=False,
    )(*inputs)
    assert [x.dtype for x in found] == [dtype] * 4
    assert_close(found, first_order(lambda *ys: dot_product(*ys, **options), wide), tolerance)


def test_large_scores_do_not_overflow():
    query, key, value = inputs_of()
    same({}, [query * 100, key, value], tolerance=1e-3)


def test_a_query_that_sees_nothing_gets_the_mean():
    query, key, value = inputs_of()
    mask = tf.zeros([1, 1, 11], tf.bool)
    expected = tf.broadcast_to(tf.reduce_mean(value, -2, keepdims=True), [2, 3, 13, 5])
    assert_close(dot_product_attention(query, key, value, mask=mask, causal=True), expected)
    same({"mask": mask, "causal": True})


def test_persistent_tapes_and_some_inputs():
    query, key, value = inputs_of()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([query, value])
        loss = tf.reduce_sum(tf.square(dot_product_attention(query, key, value, block=4)))
    with tf.GradientTape() as plain:
        plain.watch([query, value])
        expected = tf.reduce_sum(tf.square(dot_product(query, key, value)))
    wanted = plain.gradient(expected, [query, value])
    for _ in range(2):
        assert_close(tape.gradient(loss, [query, value]), wanted)
    assert tape.gradient(loss, key) is None


def test_one_tensor_for_all_and_variables():
    x = tf.Variable(numbers("x", 2, 13, 8))

    def loss(function, **options):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.square(function(x, x, x, causal=True, **options)))
        return tape.gradient(y, x)

    assert_close(loss(dot_product_attention, block=5), loss(dot_product))


def test_forward_mode():
    inputs = inputs_of()
    directions = tensors(*(x.shape for x in reversed(inputs)))[::-1]

    def slope(function):
        with tf.autodiff.ForwardAccumulator(inputs, directions) as accumulator:
            output = function(*inputs)
        return accumulator.jvp(output)

    ours = slope(lambda *xs: dot_product_attention(*xs, block=4, causal=True))
    assert_close(ours, slope(lambda *xs: dot_product(*xs, causal=True)))


@pytest.mark.parametrize("function", [dot_product_attention, additive_attention])
def test_third_order_is_refused(function):
    @tf.function(autograph=False)
    def thrice(x):
        tapes = [tf.GradientTape() for _ in range(3)]
        with tapes[0], tapes[1], tapes[2]:
            for tape in tapes:
                tape.watch(x)
            y = tf.reduce_sum(tf.square(function(x, x, x)))
            for tape in tapes[:0:-1]:
                y = tf.reduce_sum(tf.square(tape.gradient(y, x)))
        return tapes[0].gradient(y, x)

    with pytest.raises(HigherOrderError, match="differentiated twice") as caught:
        thrice(tf.ones([2, 4, 8]))
    assert isinstance(caught.value, MemorySavingError)


def test_eager_calls_of_other_ranks():
    for shape in ((5, 4), (2, 3, 5, 4), (2, 5, 4)):
        x = numbers("x", *shape)
        assert_close(dot_product_attention(x, x, x, block=2), dot_product(*[tf.constant(x)] * 3))


@pytest.mark.parametrize(
    ("ours", "how"),
    [
        (additive_attention, tf.function),
        pytest.param(additive_attention, eagerly, marks=pytest.mark.slow),
        pytest.param(dot_product_attention, eagerly, marks=pytest.mark.slow),
        pytest.param(dot_product_attention, tf.function, marks=pytest.mark.slow),
    ],
)
def test_jacobians(ours, how):
    (x,) = tensors((2, 6, 4))

    def jacobian(function):
        def called(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(function(x, x, x), [0, 1])
            return tape.jacobian(y, x)

        return how(called, autograph=False)(x)

    plain = dot_product if ours is dot_product_attention else additive
    assert_close(jacobian(lambda *xs: ours(*xs, block=4)), jacobian(plain))


# --- dropout


def kept_by(seed, rate, queries, keys, block):
    """Return which weights are not dropped, put together block by block."""
    grid = Grid(
        Options(dropout=rate),
        BlockedAxis.of(queries, block),
        BlockedAxis.of(keys, block),
        [2, 3],
        tf.float32,
        seed=seed,
    )
    rows, columns = grid.rows, grid.columns
    shape = [2, 3, rows.size, columns.size]
    lines = [
        tf.concat([grid.kept(Place(rows, columns, i, j), shape) for j in range(columns.count)], -1)
        for i in range(rows.count)
    ]
    return tf.concat(lines, -2)[..., :queries, :keys]


@pytest.mark.parametrize(
    ("how", "order"),
    [
        pytest.param(tf.function, 1, marks=pytest.mark.slow),
        (tf.function, 2),
        pytest.param(eagerly, 1, marks=pytest.mark.slow),
        pytest.param(compiled, 1, marks=pytest.mark.slow),
    ],
)
def test_dropout_drops_the_same_in_the_gradient(how, order):
    seed = tf.constant([3, 4], tf.int64)
    kept = kept_by(seed, 0.3, 13, 11, 4)
    same(
        {"dropout": 0.3, "seed": seed, "causal": True},
        plain={"kept": (kept, 0.3), "causal": True},
        order=order,
        how=how,
    )


def test_dropout_drops_as_many_as_it_says():
    kept = kept_by(tf.constant([1, 2], tf.int64), 0.25, 200, 200, 64)
    assert abs(float(tf.reduce_mean(tf.cast(kept, tf.float32))) - 0.75) < 0.01
    ones = tf.ones([2, 3, 200, 8])
    outputs = [
        dot_product_attention(ones, ones, ones, dropout=0.25, seed=[1, n]) for n in (2, 2, 3)
    ]
    assert_close(outputs[0], outputs[1], 0)
    assert float(tf.reduce_max(abs(outputs[0] - outputs[2]))) > 0.01
    assert abs(float(tf.reduce_mean(outputs[0])) - 1) < 0.01


# --- blocks


@pytest.mark.parametrize(
    ("pairs", "length", "width", "sizes"),
    [
        (8, 2048, 64, (512, 256)),
        (8, 8192, 64, (512, 512)),
        (512, 512, 64, (64, 64)),
        (8, 32, 64, (256, 128)),
    ],
)
def test_sizes_of_blocks(pairs, length, width, sizes):
    assert block_sizes(pairs, length, length, width) == sizes
    dynamic = [tf.constant(n) for n in (pairs, length, length)]
    assert tuple(int(n) for n in block_sizes(*dynamic, width)) == sizes


@pytest.mark.parametrize(("length", "largest"), [(1, 5), (10, 5), (11, 5), (1009, 256), (0, 4)])
def test_cuts_are_even_and_are_undone(length, largest):
    cut = BlockedAxis.of(length, largest)
    assert cut.size <= largest and cut.padding >= 0
    assert length == 0 or cut.padding < cut.count
    x = tf.random.stateless_normal([2, length, 3, 4], [1, 2])
    blocks = cut.split(x, -3)
    assert blocks.shape == [cut.count, 2, 3, cut.size, 4]
    assert_close(cut.join(blocks, -3), x, 0)


def test_causal_attention_computes_half_of_the_blocks():
    grid = Grid(
        Options(causal=True), BlockedAxis.of(80, 10), BlockedAxis.of(80, 20), [], tf.float32
    )
    pairs = {(i, j) for i in range(8) for a, b, _ in grid.keys_of(i) for j in range(a, b)}
    assert pairs == {
        (i, j) for j in range(4) for a, b, _ in grid.queries_of(j) for i in range(a, b)
    }
    assert pairs == {(i, j) for i in range(8) for j in range(4) if j * 20 <= i * 10 + 9}
    free = {
        (i, j) for i in range(8) for a, b, edge in grid.keys_of(i) if not edge for j in range(a, b)
    }
    assert free == {(i, j) for i, j in pairs if j * 20 + 19 <= i * 10}


# --- memory


def peaks():
    """Return the peaks of steps, plain and ours, of 2048 positions, and of 256 with additive
    attention (in a fresh process)."""
    functions = {
        "plain": dot_product,
        "ours": dot_product_attention,
        "additive": lambda q, k, v: additive(q, v, k),
        "additive, ours": lambda q, k, v: additive_attention(q, v, k),
    }
    return {kind: _peak(kind, function) for kind, function in functions.items()}


def _peak(kind, function):
    shape = [2, 256, 128] if kind.startswith("additive") else [1, 4, 2048, 32]
    inputs = tensors(*[shape] * 3)

    @tf.function(autograph=False)
    def step(*inputs):
        _, *gradients = first_order(function, inputs)
        return [tf.reduce_sum(tf.square(g)) for g in gradients]

    return measure_peak(lambda: [float(s) for s in step(*inputs)], steps=3).peak


def test_memory():
    found = fresh("tests.transforms.test_attention:peaks")
    assert found["ours"] * 8 <= found["plain"]
    assert found["additive, ours"] * 6 <= found["additive"]


# --- bad input


X = np.zeros([2, 4, 8], np.float32)


@pytest.mark.parametrize(
    ("argument", "options", "value", "way_out"),
    [
        ("query", {"query": np.zeros([2, 4, 8], np.int32)}, "int32", "cast it"),
        ("query", {"query": np.zeros(8, np.float32)}, "(8,)", "add axes"),
        ("query", {"query": tf.ragged.constant([[[1.0]]])}, "Ragged", "to_tensor"),
        ("key", {"key": np.zeros([2, 4, 7], np.float32)}, "(2, 4, 7)", "broadcast or transpose"),
        ("key", {"key": tf.zeros([2, 4, 8], tf.float16)}, "float16", "cast it"),
        (
            "value",
            {"value": np.zeros([2, 5, 8], np.float32)},
            "(2, 5, 8)",
            "broadcast or transpose",
        ),
        ("mask", {"mask": np.ones([2, 4, 4])}, "float64", "tf.cast"),
        ("mask", {"mask": np.ones([2, 4, 5], bool)}, "(2, 4, 5)", "tf.newaxis"),
        ("mask", {"mask": np.ones([1, 2, 4, 4], bool)}, "(1, 2, 4, 4)", "tf.newaxis"),
        ("block", {"block": 0}, "0", "positive"),
        ("block", {"block": (4, -1)}, "-1", "positive"),
        ("block", {"block": 2.5}, "2.5", "None"),
        ("dropout", {"dropout": 1.0, "seed": [1, 2]}, "1.0", "less than 1"),
        ("dropout", {"dropout": -0.1, "seed": [1, 2]}, "-0.1", "at least 0"),
        ("seed", {"dropout": 0.1}, "None", "SeedGenerator"),
        ("seed", {"dropout": 0.1, "seed": [1, 2, 3]}, "[1, 2, 3]", "two integers"),
    ],
)
@pytest.mark.parametrize("function", [dot_product_attention, additive_attention])
def test_bad_arguments(function, argument, options, value, way_out):
    with pytest.raises(ArgumentError) as caught:
        function(**{"query": X, "key": X, "value": X, **options})
    check_error(caught.value, argument, value, way_out)


@pytest.mark.parametrize(
    ("function", "argument", "options", "value", "way_out"),
    [
        (dot_product_attention, "bias", {"bias": np.zeros([3, 4, 4])}, "(3, 4, 4)", "tf.newaxis"),
        (dot_product_attention, "bias", {"bias": tf.zeros([4], tf.int32)}, "int32", "cast it"),
        (dot_product_attention, "bias", {"bias": "a"}, "a", "to a tensor"),
        (dot_product_attention, "causal", {"causal": 1}, "1", "True or False"),
        (dot_product_attention, "scale", {"scale": "x"}, "x", "not a number"),
        (dot_product_attention, "scale", {"scale": [1.0, 2.0]}, "[1.0, 2.0]", "one number"),
        (additive_attention, "scale", {"scale": np.zeros(3)}, "(3,)", "each of 8"),
        (additive_attention, "query", {"query": X[0]}, "(4, 8)", "reshape"),
    ],
)
def test_bad_arguments_of_one(function, argument, options, value, way_out):
    with pytest.raises(ArgumentError) as caught:
        function(**{"query": X, "key": X, "value": X, **options})
    check_error(caught.value, argument, value, way_out)
