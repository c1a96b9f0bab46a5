"""Sparse versions of many kinds of models: what stays the same, what is saved, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError
from tests.helpers.versions import KERAS

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

X = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
Y = X[:, :4] ** 2


def chain(*parts: Any) -> keras.Model:
    return keras.Sequential([keras.Input([8]), *parts])


def dense(units: int = 4, **options: Any) -> Any:
    return layers.Dense(units, **options)


def compiled(model: Any, optimizer: Any = "adam", **options: Any) -> Any:
    model.compile(optimizer, "mse", **options)
    return model


def fitted(model: Any, *callbacks: Any, epochs: int = 1, x: Any = X, y: Any = Y) -> Any:
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks])


def moving(**options: Any) -> Any:
    return ms.keras.Reparameterize([(0, 1)], until=1, moved=0.2, threshold=0.2, **options)


def pair(**options: Any) -> tuple[Any, Any]:
    """Return two sparse models whose weights and places differ."""
    made = []
    for seed in range(2):
        keras.utils.set_random_seed(seed)
        made.append(ms.keras.sparsify(chain(dense(8), dense()), 0.5, seed=seed))
    return made[0], made[1]


def dense_kernels(sparse: Any) -> list[np.ndarray[Any, Any]]:
    return [sparse.store.kernel(k, "float32").numpy() for k in range(len(sparse.store.shapes))]


# ---------------------------------------------------------------- parts that stay


@keras.saving.register_keras_serializable("test_sparsity")
class TwoScales(layers.Layer):
    """A layer whose variables get their names from Keras."""

    def build(self, shape: Any) -> None:
        self.one, self.two = (self.add_weight((shape[-1],), "ones") for _ in range(2))

    def call(self, inputs: Any) -> Any:
        return inputs * self.one - self.two


def test_normalization_keeps_its_statistics() -> None:
    part = layers.Normalization()
    part.adapt(5 * X + 3)
    plain = chain(part, dense())
    sparse = ms.keras.sparsify(plain, 0.0)
    by_hand = part(X) @ dense_kernels(sparse)[0] + plain.layers[-1].bias
    np.testing.assert_allclose(sparse(X), by_hand, atol=1e-5)


def test_all_state_of_other_layers_is_kept() -> None:
    scales = TwoScales()
    inner = keras.Sequential([keras.Input([8]), layers.BatchNormalization(), TwoScales()])
    plain = chain(scales, inner, dense())
    for number, variable in enumerate(plain.variables):
        variable.assign(tf.fill(variable.shape, number + 1.0))
    sparse = ms.keras.sparsify(plain, 0.5)
    kept = [v for v in plain.variables if v.name != "kernel"]
    for old, new in zip(kept, sparse.inner.variables, strict=True):
        np.testing.assert_array_equal(old, new)


def test_vocabularies_are_kept() -> None:
    words = layers.StringLookup(output_mode="multi_hot")
    words.adapt(np.array([["a", "b"], ["b", "c"]]))
    plain = keras.Sequential([keras.Input([2], dtype="string"), words, dense()])
    sparse = ms.keras.sparsify(plain, 0.5)
    assert sparse.inner.layers[0].get_vocabulary() == words.get_vocabulary()


def test_equal_names_are_no_matter() -> None:
    blocks = [keras.Sequential([keras.Input([8]), dense(8, name="same")]) for _ in range(2)]
    for number, block in enumerate(blocks):
        block.layers[0].bias.assign(np.full(8, number + 1.0))
    sparse = ms.keras.sparsify(chain(*blocks), 0.5)
    assert [float(v[0]) for v in sparse.inner.variables] == [1, 2]
    assert len(sparse.store.shapes) == 2


def test_a_compiled_model_leaves_no_slots_behind() -> None:
    plain = compiled(chain(dense(), dense()))
    fitted(plain)
    # In Keras 3.3, models that were not compiled have no such attribute.
    assert getattr(ms.keras.sparsify(plain, 0.5).inner, "optimizer", None) is None
    assert plain.compiled and plain.optimizer is not None


# ---------------------------------------------------------------- frozen layers


@pytest.mark.parametrize("as_a_whole", [False, True])
def test_frozen_layers_stay_as_they_are(as_a_whole: bool) -> None:
    base = keras.Sequential([keras.Input([8]), dense(8), layers.BatchNormalization()])
    plain = chain(base, dense(8), dense(4))
    (base if as_a_whole else base.layers[0]).trainable = False
    if as_a_whole:
        # The model inside is frozen, whatever its layers say.
        base.layers[0]._trainable = True
    sparse = ms.keras.sparsify(plain, 0.5)
    assert len(sparse.store.shapes) == 2
    assert [v.path.split("/")[-1] for v in sparse.trainable_variables].count("kernel") == 0
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    fitted(compiled(sparse, optimizer), moving(), epochs=2)
    np.testing.assert_array_equal(sparse.inner.layers[0].layers[0].kernel, base.layers[0].kernel)


def test_frozen_layers_cannot_be_named() -> None:
    plain = chain(dense(8, name="still"), dense(4, name="moving"))
    plain.layers[0].trainable = False
    with pytest.raises(ArgumentError, match="'still': is frozen, and stays dense.*: 'moving'"):
        ms.keras.sparsify(plain, 0.5, layers=["still"])
    plain.trainable = False
    with pytest.raises(ArgumentError, match="no layer to make sparse.*'still' is frozen"):
        ms.keras.sparsify(plain, 0.5)


def test_one_sparse_layer_cannot_be_frozen_but_all_can() -> None:
    sparse = ms.keras.sparsify(chain(dense(8), dense(4)), 0.5)
    sparse.inner.layers[0].trainable = False
    with pytest.raises((ArgumentError, RuntimeError), match="is frozen, but its weights are"):
        fitted(compiled(sparse))
    with pytest.raises((ArgumentError, RuntimeError), match="is frozen, but its weights are"):
        sparse(X, training=True)
    sparse.trainable = False
    outer = compiled(chain(sparse, dense(4)), keras.optimizers.SGD(0.1, weight_decay=0.1))
    before = dense_kernels(sparse)
    fitted(outer)
    np.testing.assert_array_equal(
        np.concatenate(before, None), np.concatenate(dense_kernels(sparse), None)
    )
    with pytest.raises(ArgumentError, match="its sparse weights are frozen"):
        fitted(outer, moving())


# ---------------------------------------------------------------- penalties


@keras.saving.register_keras_serializable("test_sparsity")
def largest(kernel: Any) -> Any:
    return keras.ops.max(keras.ops.abs(kernel))


@pytest.mark.parametrize(
    "kind",
    [
        *("l2", "l1_l2", "orthogonal"),
        pytest.param(
            "function",
            marks=pytest.mark.skipif(
                KERAS < (3, 15),
                reason=f"variables of Keras {keras.__version__} take no function as a regularizer",
            ),
        ),
    ],
)
def test_penalties_are_those_of_dense_kernels_once(kind: str) -> None:
    penalty = {
        "l2": keras.regularizers.L2(0.1),
        "l1_l2": keras.regularizers.L1L2(0.1, 0.2),
        "orthogonal": keras.regularizers.OrthogonalRegularizer(0.1),
        "function": largest,
    }[kind]
    shared = dense(8, kernel_regularizer=penalty)
    inputs = keras.Input([8])
    plain = keras.Model(inputs, dense()(shared(shared(shared(inputs)))))
    sparse = ms.keras.sparsify(plain, 0.5)
    sparse(X)
    assert len(sparse.losses) == len(plain.losses) == 1
    wanted = penalty(tf.constant(dense_kernels(sparse)[0]))
    np.testing.assert_allclose(sparse.losses[0], wanted, rtol=1e-5)
    fitted(compiled(sparse))


# ---------------------------------------------------------------- classes with code of their own


@keras.saving.register_keras_serializable("test_sparsity")
class Doubled(keras.Model):
    """A model with its own training step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"doubled": 2 * loss}


def test_a_train_step_is_not_lost(tmp_path: Path) -> None:
    inputs = keras.Input([8])
    model = Doubled(inputs, dense()(dense(8)(inputs)))
    with pytest.raises(ArgumentError, match="its class Doubled has its own train_step") as said:
        ms.keras.sparsify(model, 0.5)
    first = "network = sparsify(keras.Model(model.inputs[0], model.outputs[0]), ...)"
    assert f"{first}; model = Doubled(model.inputs[0], network(model.inputs[0]))" in str(said.value)
    network = ms.keras.sparsify(keras.Model(model.inputs[0], model.outputs[0]), 0.5)
    model = compiled(Doubled(model.inputs[0], network(model.inputs[0])))
    before, weights = network.store.masks(), moving()
    assert "doubled" in fitted(model, weights, epochs=2).history
    assert weights.rewirings == 8
    assert any((a != b).any() for a, b in zip(before, network.store.masks(), strict=True))
    assert ms.keras.sparse_bytes(model).slots == 2 * ms.keras.sparse_bytes(model).values
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))


def test_a_loss_of_a_sequential_class_is_not_lost() -> None:
    class Halved(keras.Sequential):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return 0.5 * super().compute_loss(*args, **options)

    model = Halved([keras.Input([8]), dense(8), dense()])
    with pytest.raises(ArgumentError, match=r"compute_loss.*; model = Halved\(\[network\]\)"):
        ms.keras.sparsify(model, 0.5)
    network = ms.keras.sparsify(keras.Model(model.inputs[0], model.outputs[0]), 0.5)
    weights = moving()
    fitted(compiled(Halved([network])), weights)
    assert weights.rewirings == 4


def test_several_outputs_have_names() -> None:
    inputs = keras.Input([8])
    hidden = dense(8)(inputs)
    plain = keras.Model(inputs, [dense(4, name="a")(hidden), dense(4, name="b")(hidden)])
    sparse = ms.keras.sparsify(plain, 0.5)
    sparse.compile("adam", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 2.0})
    assert fitted(sparse, y={"a": Y, "b": Y}).history["loss"]


# ---------------------------------------------------------------- layers inside of others


def test_layers_inside_of_layers_stay_dense() -> None:
    inside = layers.SpectralNormalization(dense(8, name="inside"))
    sparse = ms.keras.sparsify(chain(inside, dense(4)), 0.5)
    assert sparse.store.shapes == [(8, 4)]
    for name, problem in {
        "inside": "is called by another layer",
        "layer": "no layer of that name",
    }.items():
        with pytest.raises(ArgumentError, match=problem):
            ms.keras.sparsify(chain(inside, dense(4)), 0.5, layers=[name])
    with pytest.raises(ArgumentError, match="no layer to make sparse.*'inside' is called by"):
        ms.keras.sparsify(chain(inside), 0.5)
