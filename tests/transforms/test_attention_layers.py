"""Keras layers with attention in blocks: weights, masks, results and gradients are Keras' own."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, NothingSavedWarning
from tests.helpers.attention_cases import assert_close
from tests.helpers.processor import needs_bfloat16
from tests.helpers.sampling import covering
from tests.helpers.support import check_error, numbers
from tests.helpers.versions import KERAS, takes

ours, plain = ms.keras, keras.layers

QUERIES, KEYS = 9, 7


@pytest.fixture(autouse=True)
def _float32_afterwards():
    yield
    keras.config.set_dtype_policy("float32")


def data():
    return numbers("query", 2, QUERIES, 8), numbers("value", 2, KEYS, 8)


def masks():
    """Return masks of queries and of values; the last example has no value to see."""
    queries, values = numbers("mq", 2, QUERIES) > 0, numbers("mv", 2, KEYS) > 0
    values[1] = False
    return queries, values


def pair(name, *args, block=3, **options):
    """Return our layer and Keras' layer with the same weights."""
    layers = (
        getattr(ours, name)(*args, block=block, **options),
        getattr(plain, name)(*args, **options),
    )
    query, value = data()
    for layer in layers:
        if name == "MultiHeadAttention":
            layer.build(query.shape, value.shape)
        else:
            layer.build([query.shape, value.shape])
    layers[0].set_weights(
        [numbers(f"{i}", *w.shape) for i, w in enumerate(layers[0].get_weights())]
    )
    layers[1].set_weights(layers[0].get_weights())
    return layers


def trained(layer, call):
    """Return the output, and the gradients for inputs and weights."""
    inputs = [tf.constant(x) for x in data()]

    @tf.function(autograph=False)
    def step(inputs):
        weights = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = call(layer, *inputs)
            loss = tf.reduce_sum(tf.cast(output, tf.float32) * numbers("loss", *output.shape))
        gradients = tape.gradient(loss, [*inputs, *weights], unconnected_gradients="zero")
        return [output, *gradients]

    return step(inputs)


def same(layers, call, tolerance=1e-5):
    found, expected = (trained(layer, call) for layer in layers)
    # The bias of keys shifts all scores of a query alike. Its gradient is zero, except for the
    # rounding of larger terms.
    least = max(float(tf.reduce_max(abs(tf.cast(x, tf.float32)))) for x in expected)
    assert_close(found, expected, tolerance, least=least)
    assert [x.dtype for x in found] == [x.dtype for x in expected]


# --- multi-head attention


HEADS = [
    {},
    {"value_dim": 5, "use_bias": False, "output_shape": 6},
    {"use_gate": True, "sliding_window": 3},
    {"dropout": 0.4},
]
# Older versions of Keras take fewer options.
HEADS = [options for options in HEADS if all(takes(plain.MultiHeadAttention, o) for o in options)]


@pytest.mark.parametrize(("options", "causal"), covering(HEADS, [False, True]))
def test_heads(options, causal):
    layers = pair("MultiHeadAttention", 2, 4, **options)
    same(layers, lambda layer, q, v: layer(q, v, use_causal_mask=causal))


@pytest.mark.parametrize(
    ("shape", "dropout"),
    covering(
        [(QUERIES, KEYS), (2, QUERIES, KEYS), (2, 1, KEYS), (2, 2, QUERIES, KEYS)], [0.0, 0.4]
    ),
)
def test_heads_with_attention_mask(shape, dropout):
    mask = (numbers("mask", *shape) > 0.8).astype("int32")
    if KERAS < (3, 13):
        # Older versions add the mask to scores. If it leaves no key, the rounding of scores decides
        # what a query gets.
        mask[..., 0] = 1
    layers = pair("MultiHeadAttention", 2, 4, dropout=dropout)
    same(layers, lambda layer, q, v: layer(q, v, attention_mask=mask))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_with_masks_that_layers_hand_on(causal):
    query, value = data()
    queries, values = masks()
    query[~queries] = 0
    value[~values] = 0

    def model(layer):
        inputs = [keras.Input([n, 8]) for n in (QUERIES, KEYS)]
        hidden = [plain.Masking()(x) for x in inputs]
        return keras.Model(inputs, layer(*hidden, use_causal_mask=causal))

    found, expected = (model(layer)([query, value]) for layer in pair("MultiHeadAttention", 2, 4))
    assert_close(found, expected)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("mixed_bfloat16", marks=[needs_bfloat16, pytest.mark.slow]),
        "mixed_float16",
    ],
)
@pytest.mark.parametrize("name", ["MultiHeadAttention", "Attention", "AdditiveAttention"])
def test_mixed_precision(name, policy):
    heads = name == "MultiHeadAttention"
    args, options = ((2, 4), {}) if heads else ((), {"use_scale": True})

    def call(layer, q, v):
        return layer(*((q, v) if heads else ([q, v],)), use_causal_mask=True)

    exact = trained(pair(name, *args, **options)[1], call)
    keras.config.set_dtype_policy(policy)
    found, expected = (trained(layer, call) for layer in pair(name, *args, **options))
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    scale = max(float(tf.reduce_max(abs(x))) for x in exact)
    for a, b, c in zip(found, expected, exact, strict=True):
        ours, theirs = (float(tf.reduce_max(abs(tf.cast(x, tf.float32) - c))) for x in (a, b))
        assert ours <= 2 * theirs + 0.01 * scale


@pytest.mark.parametrize("name", ["MultiHeadAttention", "Attention"])
def test_dropout_is_drawn_once_for_a_call(name):
    args = (2, 4) if name == "MultiHeadAttention" else ()
    seed = {"seed": 3} if takes(getattr(plain, name), "seed") else {}
    x, _ = data()

    def call(layer, training):
        both = name == "MultiHeadAttention"
        return layer(x, x, training=training) if both else layer([x, x], training=training)

    def made():
        if not seed:
            # Layers without a seed draw from this one.
            keras.utils.set_random_seed(3)
        layer = getattr(ours, name)(*args, dropout=0.5, block=3, **seed)
        call(layer, False)
        return layer

    layer, other = made(), made()
    other.set_weights(layer.get_weights())
    first, second = call(layer, True), call(layer, True)
    assert_close(first, call(other, True), 0)
    assert float(tf.reduce_max(abs(first - second))) > 0.01
    generator = (layer._dropout_layer if name == "MultiHeadAttention" else layer).seed_generator
    assert generator.state.numpy().tolist()[1] == 2
    assert_close(call(layer, False), call(layer, False), 0)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "Attention", "AdditiveAttention"])
def test_scores_are_those_of_keras(name):
    if name == "MultiHeadAttention":
        layers = pair(name, 2, 4)
        found, expected = (
            layer(*data(), return_attention_scores=True, use_causal_mask=True) for layer in layers
        )
    else:
        layers = pair(name)
        found, expected = (layer(list(data()), return_attention_scores=True) for layer in layers)
    assert_close(found, expected)


def test_attention_over_several_axes_is_left_to_keras():
    x = numbers("image", 2, 3, 4, 8)
    layers = [
        kind(2, 4, attention_axes=(1, 2))
        for kind in (ours.MultiHeadAttention, plain.MultiHeadAttention)
    ]
    with pytest.warns(NothingSavedWarning, match="several|axes"):
        found = layers[0](x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingSavedWarning)
        layers[0](x, x)  # the warning comes once
    layers[1].build(x.shape, x.shape)
    layers[1].set_weights(layers[0].get_weights())
    assert_close(found, layers[1](x, x))


# --- one head


def as_keras_takes_it(values):
    """Return a mask of values as Keras takes it. Its layers before 3.15, unless they are causal,
    need an axis for queries in it."""
    return values[:, tf.newaxis] if KERAS < (3, 15) else values


@pytest.mark.parametrize(
    ("layer", "masked", "causal"),
    covering(
        [
            ("Attention", {}),
            ("Attention", {"use_scale": True}),
            ("Attention", {"use_scale": True, "score_mode": "concat"}),
            ("AdditiveAttention", {}),
            ("AdditiveAttention", {"use_scale": False}),
        ],
        ["both", "values", "nothing"],
        [False, True],
        pairs=False,
    ),
)
def test_one_head(layer, masked, causal):
    name, options = layer
    queries, values = masks()
    # If a query sees no key, Keras passes a gradient to scores that rounding made equal.
    values[1, 0] = True
    mask = {"nothing": None, "values": [None, values], "both": [queries, values]}[masked]
    mask = mask and [None if m is None else tf.constant(m) for m in mask]
    if mask and KERAS < (3, 4):
        # There, a mask must be a list of tensors.
        mask = [tf.fill([2, QUERIES], True) if mask[0] is None else mask[0], mask[1]]
    if mask and not causal:
        mask[1] = as_keras_takes_it(mask[1])
    same(
        pair(name, **options), lambda layer, q, v: layer([q, v], mask=mask, use_causal_mask=causal)
    )


@pytest.mark.parametrize("name", ["Attention", "AdditiveAttention"])
def test_one_head_where_nothing_is_seen(name):
    queries, values = (tf.constant(m) for m in masks())
    mask = [queries, as_keras_takes_it(values)]
    found, expected = (layer(list(data()), mask=mask) for layer in pair(name))
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["Attention", "AdditiveAttention"])
def test_other_key_and_dropout_of_nothing(name):
    query, value = data()
    key = numbers("key", *value.shape)
    found, expected = (layer([query, value, key], training=True) for layer in pair(name))
    assert_close(found, expected)


def test_batches_that_are_broadcast_are_left_to_keras():
    query, value = data()
    layer = ours.Attention()
    with pytest.warns(NothingSavedWarning, match="batches of"):
        found = layer([query[:1], value])
    assert_close(found, plain.Attention()([query[:1], value]))


# --- as layers


@pytest.mark.parametrize(
    ("name", "args"), [("MultiHeadAttention", (2, 4)), ("Attention", ()), ("AdditiveAttention", ())]
)
def test_saved_and_loaded(name, args, tmp_path):
    layer = getattr(ours, name)(*args, block=(4, 3), dropout=0.1, name="attention")
    inputs = [keras.Input([None, 8]) for _ in range(2)]
    output = layer(*inputs) if args else layer(inputs)
    model = keras.Model(inputs, output)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found = loaded.get_layer("attention")
    assert type(found) is type(layer)
    assert found.get_config()["dropout"] == 0.1 and tuple(found.get_config()["block"]) == (4, 3)
    assert_close(loaded(list(data())), model(list(data())))


def test_a_model_is_trained_alike():
    def fitted(kind):
        keras.utils.set_random_seed(1)
        words = keras.Input([None], dtype="int32")
        hidden = plain.Embedding(20, 16, mask_zero=True)(words)
        hidden = hidden + kind(2, 8)(hidden, hidden, use_causal_mask=True)
        hidden = plain.GlobalAveragePooling1D()(hidden)
        model = keras.Model(words, plain.Dense(1)(hidden))
        model.compile("adam", "mse", jit_compile=False)
        x = np.random.default_rng(0).integers(0, 20, [24, 12])
        return model.fit(x, numbers("y", 24, 1), 8, epochs=2, shuffle=False, verbose=0).history[
            "loss"
        ]

    np.testing.assert_allclose(
        fitted(ours.MultiHeadAttention), fitted(plain.MultiHeadAttention), rtol=1e-5
    )


def fitted_blocks(layers, *callbacks, jit=False):
    """Return the weights after training."""
    keras.utils.set_random_seed(1)
    inputs = hidden = keras.Input([64, 16])
    for _ in range(layers):
        hidden = hidden + ours.MultiHeadAttention(2, 8, block=32)(hidden, hidden)
        hidden = hidden + plain.Dense(16, "gelu")(hidden)
    model = keras.Model(inputs, hidden)
    model.compile("sgd", "mse", jit_compile=jit)
    x = numbers("x", 32, 64, 16)
    model.fit(x, x, 16, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_xla(layers):
    assert_close(fitted_blocks(layers, jit=True), fitted_blocks(layers), 1e-4)


def test_with_memory_saving_gradients():
    saving = ours.MemorySavingGradients()
    assert_close(fitted_blocks(2, saving), fitted_blocks(2), 1e-5)
    assert saving.plans


def test_bad_block():
    for name, args in (
        ("MultiHeadAttention", (2, 4)),
        ("Attention", ()),
        ("AdditiveAttention", ()),
    ):
        with pytest.raises(ArgumentError) as caught:
            getattr(ours, name)(*args, block=0)
        check_error(caught.value, "block", "0", "positive")
