"""Sparse weights: the gradients of a dense layer with the same zeros, in fewer bytes, through
training, saving and moving."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.rewiring import rewired, shared_out
from memsaving_gradients.training.sparsity.slots import slots_of
from tests.helpers.sampling import covering, examples

BAR = 0.40

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")


def network(kind: str = "conv") -> keras.Model:
    keras.utils.set_random_seed(1)
    if kind == "dense":
        layers = [keras.layers.Dense(48, activation="gelu", name=f"dense_{k}") for k in range(4)]
        return keras.Sequential([keras.Input([24]), *layers, keras.layers.Dense(5, name="logits")])
    x = inputs = keras.Input([12, 12, 3])
    for k, width in enumerate((16, 32, 32)):
        x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv_{k}")(x)
        x = keras.layers.ReLU()(keras.layers.GroupNormalization(4)(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="logits", dtype="float32")(x))


def batch(kind: str = "conv", rows: int = 32) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    shape = (24,) if kind == "dense" else (12, 12, 3)
    x, y = draw.standard_normal((rows, *shape)), draw.integers(0, 5, rows)
    # The labels can be learned from these features; the random numbers hide them in part.
    x[..., 0] += y.reshape(-1, *[1] * (len(shape) - 1)) - 2
    return x.astype(np.float32), y


def compiled(model: Any, optimizer: Any = "adam") -> Any:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def as_dense(sparse: ms.keras.SparseModel, plain: keras.Model) -> None:
    """Give ``plain`` the weights of ``sparse``, zeros included."""
    numbers = iter(
        np.split(sparse.store.values.numpy(), np.cumsum(sparse.store.counts.numpy())[:-1])
    )
    masks = iter(zip(sparse.store.masks(), sparse.store.shapes, strict=True))
    by_name = {layer.name: layer for layer in plain._flatten_layers()}
    for layer in sparse.inner._flatten_layers():
        if hasattr(layer, "_kernel") and not hasattr(layer._kernel, "assign"):
            mask, shape = next(masks)
            kernel = np.zeros(math.prod(shape), np.float32)
            kernel[mask] = next(numbers)
            by_name[layer.name]._kernel.assign(kernel.reshape(shape))


def gradients(model: Any, x: Any, y: Any, how: Any = None) -> tuple[Any, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = (how or (lambda f: f))(lambda x, y: loss(y, model(x, training=True)))(x, y)
        return value, tape.gradient(value, [w.value for w in model.trainable_weights])

    value, grads = step(tf.constant(x), tf.constant(y))
    return float(value), {w.path: g for w, g in zip(model.trainable_weights, grads, strict=True)}


@pytest.mark.parametrize(("sparsity", "kind"), covering([0.7, 0, 0.99], ["conv", "dense"]))
def test_gradients_are_those_of_a_dense_network_with_the_same_zeros(
    sparsity: float, kind: str
) -> None:
    plain = network(kind)
    sparse = ms.keras.sparsify(plain, sparsity)
    as_dense(sparse, plain)
    x, y = batch(kind)
    value, found = gradients(sparse, x, y)
    wanted_value, wanted = gradients(plain, x, y)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    kernels = [
        wanted[layer._kernel.path].numpy().reshape(-1)
        for layer in plain._flatten_layers()
        if any(
            layer.name == one.name and type(one) is not type(layer)
            for one in sparse.inner._flatten_layers()
        )
    ]
    picked = [kernel[mask] for kernel, mask in zip(kernels, sparse.store.masks(), strict=True)]
    np.testing.assert_allclose(found[sparse.store.values.path], np.concatenate(picked), atol=2e-6)


def test_one_split_reads_the_values_and_its_gradient_is_one_concatenation() -> None:
    sparse = ms.keras.sparsify(network(), 0.7)
    x, y = batch()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        value = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, sparse(x), True))
        return tf.gradients(value, [w.value for w in sparse.trainable_weights])

    ops = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph.get_operations()
    total = sparse.store.total
    assert [op.type for op in ops].count("SplitV") == 1
    whole = [op.type for op in ops for t in op.outputs if t.shape == [total] or op.type == "Pad"]
    assert "Pad" not in whole
    assert "AddN" not in whole


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    covering(
        [lambda: keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam],
        ["dense", "conv"],
    ),
)
def test_bytes_held_at_70_percent(optimizer: Any, kind: str) -> None:
    model = network(kind)
    wide = keras.models.clone_model(
        model, clone_function=lambda one: type(one).from_config({**one.get_config(), **_wider(one)})
    )
    sparse = compiled(ms.keras.sparsify(wide, 0.7), optimizer())
    sparse.optimizer.build(sparse.trainable_variables)
    held = ms.keras.sparse_bytes(sparse)
    assert held.share <= BAR
    variables = {id(v): v for v in [*sparse.variables, *sparse.optimizer.variables]}.values()
    assert (
        sum(v.numpy().nbytes for v in variables) == held.values + held.bits + held.slots + held.rest
    )
    plain = compiled(keras.models.clone_model(wide), optimizer())
    plain.optimizer.build(plain.trainable_variables)
    dense = sum(v.numpy().nbytes for v in [*plain.variables, *plain.optimizer.variables])
    np.testing.assert_allclose(held.dense, dense, rtol=0.01)


def _wider(layer: Any) -> dict[str, Any]:
    """Return options of a wider layer, so that biases and normalizations take little memory."""
    return {k: 8 * getattr(layer, k) for k in ("units", "filters") if hasattr(layer, k)}


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_fit_moves_weights_and_learns(kind: str) -> None:
    sparse = compiled(ms.keras.sparsify(network(kind), 0.8), keras.optimizers.Adam(1e-2))
    before, total = sparse.store.masks(), sparse.store.total
    moving = ms.keras.Reparameterize([(0, 4)], moved=0.05, threshold=0.01)
    x, y = batch(kind, 64)
    history = sparse.fit(x, y, 16, 15, verbose=0, callbacks=[moving])
    assert history.history["loss"][-1] < 0.8 * history.history["loss"][0]
    after = sparse.store.masks()
    assert moving.rewirings == 14
    assert sum(int(mask.sum()) for mask in after) == total == int(sum(sparse.store.counts.numpy()))
    assert any((a != b).any() for a, b in zip(before, after, strict=True))


def test_slots_move_with_their_weights() -> None:
    sparse = compiled(ms.keras.sparsify(network("dense"), 0.5))
    x, y = batch("dense")
    sparse.fit(x, y, verbose=0)
    store = sparse.store
    slots = slots_of(sparse.optimizer, store.values)
    assert len(slots) == 2
    # The slots' values show which weights they belong to; the slots of new weights are zero.
    for slot in slots:
        slot.assign(3 * store.values)
    moving = ms.keras.Reparameterize(moved=0.1, threshold=0.05)
    moving.set_model(sparse)
    old = store.values.numpy()
    moving.rewire()
    new = store.values.numpy()
    assert (new == 0).sum() > 10
    assert set(new[new != 0]) <= set(old)
    for slot in slots:
        np.testing.assert_array_equal(slot.numpy(), 3 * new)


def test_models_are_saved_with_their_places(tmp_path: Any) -> None:
    sparse = compiled(ms.keras.sparsify(network(), 0.7))
    x, y = batch()
    sparse.fit(x, y, verbose=0)
    sparse.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), sparse.predict(x, verbose=0))
    for a, b in zip(loaded.store.masks(), sparse.store.masks(), strict=True):
        np.testing.assert_array_equal(a, b)
    for one in (sparse, loaded):
        one.fit(x, y, verbose=0, shuffle=False)
    np.testing.assert_allclose(loaded.store.values, sparse.store.values, atol=1e-6)
    other = ms.keras.sparsify(network(), 0.7, seed=5)
    other.save_weights(tmp_path / "model.weights.h5")
    another = ms.keras.sparsify(network(), 0.7)
    another.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(another.predict(x, verbose=0), other.predict(x, verbose=0))


def test_the_rest_keeps_its_weights() -> None:
    plain = network()
    plain.get_layer("logits").bias.assign(np.arange(5.0))
    sparse = ms.keras.sparsify(plain, 0.5)
    np.testing.assert_array_equal(sparse.inner.get_layer("logits").bias, np.arange(5.0))
    np.testing.assert_array_equal(
        sparse.inner.get_layer("logits").kernel, plain.get_layer("logits").kernel
    )


def test_memory_saving_and_microbatches() -> None:
    x, y = batch(rows=64)
    sparse = ms.keras.sparsify(network(), 0.7)
    value, wanted = gradients(sparse, x, y)
    with ms.patched(checkpoints="memory"):
        found = gradients(sparse, x, y)
    cut = gradients(sparse, x, y, lambda loss: ms.microbatch(loss, 16, checkpoints="memory"))
    for other, grads in (found, cut):
        np.testing.assert_allclose(other, value, rtol=1e-6)
        for path, grad in wanted.items():
            np.testing.assert_allclose(grads[path], grad, atol=2e-6)


def test_all_techniques_in_fit() -> None:
    keras.config.set_dtype_policy("bfloat16")
    try:
        sparse = ms.keras.sparsify(network(), 0.7)
    finally:
        keras.config.set_dtype_policy("float32")
    assert sparse.store.values.dtype == "bfloat16"
    compiled(sparse, ms.keras.low_precision(keras.optimizers.SGD(0.1, momentum=0.9)))
    x, y = batch(rows=64)
    callbacks = [
        ms.keras.MemorySavingGradients(microbatch=8, batch_norm="error"),
        ms.keras.Reparameterize([(0, 5)], moved=0.02, threshold=0.01),
    ]
    history = sparse.fit(x, y, 32, 12, verbose=0, callbacks=callbacks)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert callbacks[1].rewirings == 4


def test_penalties_of_kernels_count_the_weights_there_are() -> None:
    penalty = keras.regularizers.L2(0.01)
    layer = keras.layers.Dense(20, kernel_regularizer=penalty, use_bias=False)
    sparse = ms.keras.sparsify(keras.Sequential([keras.Input([10]), layer]), 0.5)
    sparse(np.ones([2, 10], np.float32))
    wanted = 0.01 * float(tf.reduce_sum(sparse.store.values.value**2))
    np.testing.assert_allclose(float(sum(sparse.losses)), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"sparsity": 1}, "sparsity=1: give a share"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"sparsity": "0.7"}, "sparsity='0.7'"),
        (
            {"layers": ["group_normalization"]},
            "no layer of that name can be sparse; layers that can be: 'conv_0'",
        ),
        ({"layers": "conv_0"}, "give a list of names"),
        ({"dense": ["nothing"]}, "dense='nothing'"),
        ({"dense": ["conv_0", "conv_1", "conv_2"]}, "has no layer to make sparse"),
        ({"model": 3}, "model=3: is not a functional or sequential"),
    ],
)
def test_bad_input(arguments: dict[str, Any], problem: str) -> None:
    given = {"model": network(), "sparsity": 0.7, **arguments}
    with pytest.raises(ArgumentError, match=problem):
        ms.keras.sparsify(**given)


def test_other_bad_input() -> None:
    constrained = keras.layers.Dense(3, kernel_constraint="non_neg")
    with pytest.raises(ArgumentError, match="kernels with constraints cannot be sparse"):
        ms.keras.sparsify(keras.Sequential([keras.Input([4]), constrained]), 0.5)
    sparse = ms.keras.sparsify(network(), 0.7)
    # Keras may wrap the error in one of its own that says where it happened.
    with pytest.raises((ArgumentError, RuntimeError), match="belong to a sparse model; train that"):
        sparse.inner(batch()[0], training=True)
    with pytest.raises(ArgumentError, match="is not sparse; train the model that sparsify returns"):
        compiled(network("dense")).fit(
            *batch("dense"), verbose=0, callbacks=[ms.keras.Reparameterize()]
        )
    # Keras knows this, and trains without XLA; other code gets an error.
    step = tf.function(lambda x: sparse(x), jit_compile=True)
    with pytest.raises(
        (ArgumentError, RuntimeError), match="compile the model with jit_compile=False"
    ):
        step(batch()[0])
    for bad in (
        {"schedule": []},
        {"schedule": [(0.5, 10), (0, 5)]},
        {"until": 0},
        {"moved": 2},
        {"threshold": 0},
    ):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            ms.keras.Reparameterize(**bad)


@st.composite
def layers(draw: Any) -> tuple[list[Any], Any]:
    masks = []
    for _ in range(draw(st.integers(1, 4))):
        mask = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=30)))
        mask[draw(st.integers(0, len(mask) - 1))] = True
        masks.append(mask)
    total = sum(int(mask.sum()) for mask in masks)
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=total, max_size=total))
    return masks, np.array(values, np.float32)


@given(layers(), st.floats(1e-3, 1), st.integers(0, 20), st.integers(0, 5))
@settings(max_examples=examples(100), deadline=None)
def test_a_rewiring(given: Any, threshold: float, wanted: int, seed: int) -> None:
    masks, values = given
    found = rewired(masks, values, threshold, wanted, np.random.default_rng(seed))
    assert len(found.sources) == len(values) == sum(int(mask.sum()) for mask in found.masks)
    old = iter(range(len(values)))
    where = {
        (k, place): next(old) for k, mask in enumerate(masks) for place in np.flatnonzero(mask)
    }
    new = iter(found.sources.tolist())
    kept = set()
    for k, mask in enumerate(found.masks):
        for place in np.flatnonzero(mask):
            source = next(new)
            if source >= 0:
                assert where[k, place] == source
                kept.add(source)
    gone = set(range(len(values))) - kept
    assert all(abs(float(values[k])) < threshold for k in gone)
    # Of the values below the threshold, only a layer's largest may stay, if it has no other.
    assert sum(abs(float(values[k])) < threshold for k in kept) <= len(masks)
    if len(gone) < 0.9 * wanted:
        assert found.threshold == 2 * threshold
    elif len(gone) > 1.1 * wanted:
        assert found.threshold == threshold / 2
    else:
        assert found.threshold == threshold


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6), st.data()
)
@settings(max_examples=examples(100), deadline=None)
def test_shares(layers: list[tuple[int, int]], data: Any) -> None:
    weights, room = zip(*layers, strict=True)
    total = data.draw(st.integers(0, sum(room)))
    parts = shared_out(total, weights, room)
    assert sum(parts) == total
    assert all(0 <= part <= most for part, most in zip(parts, room, strict=True))
    if all(part < most for part, most in zip(parts, room, strict=True)):
        exact = [total * weight / sum(weights) for weight in weights]
        assert all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))
