"""Attention in Keras' stock layers, found and computed in blocks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from tests.helpers.attention_cases import assert_close
from tests.helpers.found_attention import (
    LONG,
    blocks_in,
    found_by,
    in_blocks,
    loss_of,
    one,
    pairs_in,
    same,
    stepped,
)
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering
from tests.helpers.support import numbers

pytestmark = pytest.mark.usefixtures("small_blocks")


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
    found = fresh("tests.transforms.test_attention_stock:peaks")
    assert found["blocks"] * 8 <= found["plain"]
