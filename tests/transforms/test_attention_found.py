"""Attention in stock layers and handwritten code, found and computed in blocks."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.errors import ArgumentError, BudgetError
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.transforms.attention import blocks
from memsaving_gradients.transforms.attention.pattern.causality import is_causal
from memsaving_gradients.transforms.attention.pattern.elementwise import Unclear, elementwise
from memsaving_gradients.transforms.attention.pattern.matching import found_in
from memsaving_gradients.transforms.attention.pattern.products import Product
from tests.helpers.attention_cases import assert_close, dot_product
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering, examples, slow
from tests.helpers.support import check_error, numbers

#: Longer than one block of the least size.
LONG = 150


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4)


def tensors(*shapes, dtype=tf.float32):
    return [tf.cast(numbers(f"found {i}", *shape), dtype) for i, shape in enumerate(shapes)]


def one(*shape):
    return tensors(shape)[0]


def loss_of(output):
    count = tf.cast(tf.range(tf.size(output)), tf.float32)
    weights = tf.reshape(tf.sin(count), tf.shape(output))
    return tf.reduce_sum(tf.tanh(output * tf.cast(weights, output.dtype)))


def stepped(function, variables=(), *, differentiate=None, compiled=False, signature=None):
    """Return a function of the output and the gradients of a loss; plain without
    ``differentiate``."""

    @tf.function(autograph=False, jit_compile=compiled, input_signature=signature)
    def step(*inputs):
        output = tf.identity(function(*inputs))
        xs = [x for x in inputs if x.dtype.is_floating] + [v.value for v in variables]
        grads = (differentiate or tf.gradients)(loss_of(output), xs)
        return [output, *(g for g in grads if g is not None)]

    return step


def in_blocks(*args, **options):
    return ms.gradients(*args, attention="blocks", **options)


def found_by(step):
    """Return how many attentions the last plan has in blocks, and why others are not."""
    plan = ms.plans(step)[-1]
    return len(plan.attention), dict(plan.attention_kept)


def same(function, *inputs, tolerance=1e-5, finds=1, compiled=False, signature=None, **options):
    """Check that plain and in blocks the results are the same; return the function in blocks."""
    plain = stepped(function, compiled=compiled, signature=signature)
    ours = stepped(
        function,
        differentiate=lambda y, xs: in_blocks(y, xs, **options),
        compiled=compiled,
        signature=signature,
    )
    assert_close(ours(*inputs), plain(*inputs), tolerance)
    assert blocks_in(ours, *inputs) == finds
    return ours


def blocks_in(step, *inputs):
    """Return how many softmax ops of the traced function no live op reads."""
    graph = step.get_concrete_function(*inputs).graph
    softmaxes = [op for op in graph.get_operations() if op.type == "Softmax"]
    live = ancestors(graph.outputs)
    return sum(op not in live for op in softmaxes)


def ancestors(tensors):
    seen = {t.op for t in tensors}
    stack = list(seen)
    while stack:
        op = stack.pop()
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return seen


# --- handwritten


def by_hand(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True) / 4.0
    return tf.matmul(tf.nn.softmax(scores), value)


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


def pairs_in(graph, length):
    """Return the names of live tensors with two long axes."""
    return [
        t.name
        for op in ancestors(graph.outputs)
        for t in op.outputs
        if t.shape.rank is not None and t.shape.as_list().count(length) > 1
    ]


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


# --- Keras


def stock(kind, **options):
    """Return a built stock layer, and a function that calls it with one tensor."""
    keras.utils.set_random_seed(1)
    if kind == "multi":
        layer = keras.layers.MultiHeadAttention(3, 8, **options)
        return layer, lambda x, **more: layer(x, x, **more)
    layer = keras.layers.Attention(**options)
    return layer, lambda x, **more: layer([x, x * 0.5], **more)


def kept_mask(shape):
    return tf.constant(numbers("mask", *shape) > 0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "causal", "masked"), covering(["multi", "single"], [False, True], [False, True])
)
def test_stock_layers(kind, causal, masked, compiled):
    layer, call = stock(kind)
    x = one(2, LONG, 12)
    if masked and kind == "multi":
        more = {"attention_mask": kept_mask((2, 1, LONG))}
    else:
        more = {"mask": [None, kept_mask((2, LONG))]} if masked else {}

    def function(x):
        return call(x, use_causal_mask=causal, **more)

    function(x)
    weights = layer.trainable_variables
    plain = stepped(function, weights, compiled=compiled)
    ours = stepped(function, weights, differentiate=in_blocks, compiled=compiled)
    assert_close(ours(x), plain(x))
    assert blocks_in(ours, x) == 1
    assert not pairs_in(ours.get_concrete_function(x).graph, LONG)


@pytest.mark.parametrize("batch", [2, None])
def test_masked_queries_and_keys(batch):
    """Queries of padding see no key at all."""
    layer, call = stock("multi")
    spec = [tf.TensorSpec([batch, LONG, 12]), tf.TensorSpec([batch, LONG], tf.bool)]

    def function(x, mask):
        return call(x, query_mask=mask, value_mask=mask, use_causal_mask=True)

    inputs = one(2, LONG, 12), tf.sequence_mask([LONG, 40], LONG)
    function(*inputs)
    assert layer.built
    same(function, *inputs, signature=spec)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    layer, call = stock("multi", dtype=policy)
    x = one(2, LONG, 12)
    call(x)
    plain = stepped(call, layer.trainable_variables)
    ours = stepped(call, layer.trainable_variables, differentiate=in_blocks)
    assert_close(ours(x), plain(x), 1e-2 if policy == "mixed_float16" else 8e-2)
    assert blocks_in(ours, x) == 1


def test_tape():
    layer, call = stock("multi")
    x = one(2, LONG, 12)
    call(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(call(call(x), use_causal_mask=True))
        return [loss, *tape.gradient(loss, [x, *layer.trainable_variables])]

    plain = tf.function(step)(x)
    ours = tf.function(step)
    with ms.patched(attention="blocks"):
        found = ours(x)
    assert_close(found, plain)
    assert found_by(ours) == (2, {})


def transformer(layers):
    keras.utils.set_random_seed(3)
    words = keras.Input([LONG], dtype="int32")
    x = keras.layers.Embedding(20, 16, mask_zero=True)(words)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
        x = keras.layers.Add()([x, y])
    y = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, keras.layers.Dense(1)(y))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fit(compiled):
    data = np.random.default_rng(0).integers(1, 20, [8, LONG])
    data[:, 120:] = 0
    wanted = numbers("wanted", 8, 1)
    weights = []
    for callbacks in ([], [ms.keras.MemorySavingGradients(attention="blocks")]):
        model = transformer(1 if compiled else 2)
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=compiled)
        model.fit(data, wanted, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
        weights.append([np.array(w) for w in model.trainable_variables])
    assert_close(weights[1], weights[0])
    (plan,) = callbacks[0].plans
    assert len(plan.attention) == (1 if compiled else 2)
    assert not plan.attention_kept


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


def dropped(query, key, value):
    weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
    return tf.matmul(tf.nn.experimental.stateless_dropout(weights, 0.5, seed=[1, 2]), value)


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


# --- later differentiation


def twice(function, inputs, differentiate):
    grads = differentiate(loss_of(function(*inputs)), list(inputs))
    return differentiate(tf.add_n([tf.reduce_sum(tf.sin(g)) for g in grads]), list(inputs))


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_values_of_first_gradients(graph):
    """The differentiated loss and an earlier gradient read the weights; both lead to the same
    products."""
    shape = [2, LONG, 8]
    q, k, v, up = (tf.compat.v1.placeholder(tf.float32, shape) for _ in range(4))
    output = by_hand(q, k, v)
    (of_values,) = in_blocks(output, v, grad_ys=up, checkpoints="speed")
    loss = tf.reduce_sum(tf.sin(output)) + tf.reduce_sum(tf.cos(of_values))
    plain, ours = tf.gradients(loss, [q, k, v]), in_blocks(loss, [q, k, v])
    fed = [numbers(f"{i}", *shape) for i in range(4)]
    with tf.compat.v1.Session() as session:
        found = session.run([ours, plain], {q: fed[0], k: fed[1], v: fed[2], up: fed[3]})
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


# The outer gradients differentiate plain attention, where nothing can be saved.
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_second_order():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))
    found, plain = (
        tf.function(lambda *xs, d=d: twice(by_hand, xs, d), autograph=False)(*inputs)
        for d in (in_blocks, tf.gradients)
    )
    assert_close(found, plain)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_second_order_of_tapes():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))

    def step(*inputs):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                loss = loss_of(by_hand(*inputs))
            grads = tape.gradient(loss, inputs)
            total = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in grads])
        return [*grads, *outer.gradient(total, inputs)]

    plain = tf.function(step, autograph=False)(*inputs)
    with ms.patched(attention="blocks"):
        assert_close(tf.function(step, autograph=False)(*inputs), plain)


def test_two_calls():
    def step(differentiate):
        def both(*inputs):
            output = by_hand(*inputs)
            losses = loss_of(output), tf.reduce_sum(tf.square(output))
            return [g for loss in losses for g in differentiate(loss, list(inputs))]

        return tf.function(both, autograph=False)

    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))
    plain, ours = step(tf.gradients), step(in_blocks)
    assert_close(ours(*inputs), plain(*inputs))
    assert blocks_in(ours, *inputs) == 1


# --- with other features


def deep(*inputs):
    x = inputs[0]
    for _ in range(2):
        y = tf.tanh(x)
        x = x + by_hand(y, y, tf.tanh(y))
    return x


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.9},
        {"planner": "chain"},
        *slow({"checkpoints": "speed"}, {"loops": "segments"}, {"checkpoints": None}),
    ],
    ids=str,
)
def test_plans(options):
    same(deep, one(2, LONG, 16), finds=2, **options)


def test_a_budget_that_cannot_be_kept(graph):
    """The graph stays as it was, and can be differentiated in another way."""
    x = tf.compat.v1.placeholder(tf.float32, [2, LONG, 16])
    loss = loss_of(deep(x))
    before = [(op, list(op.inputs)) for op in graph.get_operations()]
    with pytest.raises(BudgetError):
        in_blocks(loss, x, budget=1000, batch_size=1)
    assert all(a is b for op, read in before for a, b in zip(op.inputs, read, strict=True))
    in_blocks(loss, x)
    assert len(ms.plans(graph)[-1].attention) == 2


def test_with_loops():
    def function(x):
        x = tf.while_loop(
            lambda i, _: i < 40,
            lambda i, x: (i + 1, tf.sin(x) * 1.1),
            [0, x],
            maximum_iterations=40,
        )[1]
        return by_hand(x, x, x)

    step = same(function, one(2, LONG, 16), loops="segments")
    assert ms.plans(step)[-1].replayed


def test_saved_plan(tmp_path):
    x = one(2, LONG, 16)
    step = stepped(deep, differentiate=in_blocks)
    first = step(x)
    plan = ms.plans(step)[-1]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.attention == plan.attention == ("Softmax", "Softmax_1")
    # A saved plan knows that attention was in blocks.
    again = stepped(deep, differentiate=lambda *a: ms.gradients(*a, plan=tmp_path / "plan.json"))
    assert_close(again(x), first, 0)
    assert ms.plans(again)[-1].schedule == plan.schedule


def test_a_plan_that_only_has_attention():
    """The figures of plain training count the attention that TensorFlow built."""
    step = stepped(by_hand, differentiate=in_blocks)
    inputs = tensors(*[(2, 4, 600, 8)] * 3)
    step(*inputs)
    plan = ms.plans(step)[-1]
    assert plan.attention == ("Softmax",)
    assert plan.peak * 4 < plan.peak_plain


def test_text():
    def function(x):
        return dropped(*[deep(x)] * 3)

    step = stepped(function, differentiate=in_blocks)
    step(one(2, LONG, 16))
    text = str(ms.plans(step)[-1])
    assert "attention in blocks (2): Softmax, Softmax_1" in text
    assert "attention kept: Softmax_2: its weights are changed" in text


def test_wrong_way():
    with pytest.raises(ArgumentError) as caught:
        ms.patch(attention="block")
    check_error(caught.value, "attention", "block", "did you mean 'blocks'")


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


# --- memory


def peaks():
    """Return the peaks of a step of Keras' layer, plain and in blocks (in a fresh process)."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.MultiHeadAttention(8, 16)
    x = one(1, 1024, 64)
    layer(x, x)
    found = {}
    for way, differentiate in (("plain", tf.gradients), ("blocks", in_blocks)):
        step = stepped(
            lambda x: layer(x, x, use_causal_mask=True),
            layer.trainable_variables,
            differentiate=differentiate,
        )
        found[way] = measure_peak(lambda step=step: step(x), steps=3).peak
    return found


def test_memory():
    found = fresh("tests.transforms.test_attention_found:peaks")
    assert found["blocks"] * 8 <= found["plain"]


def test_no_keys():
    spec = [tf.TensorSpec([None, None, 8])] * 3

    def step(*inputs):
        return in_blocks(loss_of(by_hand(*inputs)), list(inputs))

    function = tf.function(step, input_signature=spec, autograph=False)
    for grad in function(*tensors((2, 5, 8), (2, 0, 8), (2, 0, 8))):
        assert not np.any(np.asarray(grad))


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_a_vectorized_map_stays_plain():
    (x,) = tensors((3, 6, 8))

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(by_hand(x, x, x))
        return tape.gradient(loss, x)

    plain = tf.vectorized_map(slope, x)
    with ms.patched(attention="blocks"):
        found = tf.function(lambda x: tf.vectorized_map(slope, x), autograph=False)(x)
    assert_close(found, plain)


def test_an_output_that_is_returned_is_said_to_be_plain_as_well():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))

    def step(*inputs):
        output = by_hand(*inputs)
        return output, in_blocks(loss_of(output), list(inputs))

    with pytest.warns(ms.errors.NothingSavedWarning, match="plainly as well"):
        tf.function(step, autograph=False)(*inputs)
