"""Sparse models are saved, exported and loaded."""

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
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering
from tests.training.test_sparsity_models import X, chain, compiled, dense, fitted, pair


def test_checkpoints_of_tensorflow_hold_places(tmp_path: Path) -> None:
    one, other = pair()
    path = tf.train.Checkpoint(model=one).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(one(X), other(X))


@pytest.mark.parametrize(
    ("signature", "trained"), covering([None, [tf.TensorSpec([None, 8])]], [True, False])
)
def test_export(signature: Any, trained: bool, tmp_path: Path) -> None:
    sparse, _ = pair()
    if trained:
        fitted(compiled(sparse))
    sparse.export(tmp_path / "model", verbose=False, input_signature=signature)
    exported = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(exported.serve(X), sparse(X), atol=1e-6)


def test_export_of_several_inputs_of_other_types(tmp_path: Path) -> None:
    words, numbers = keras.Input([3], dtype="int32", name="words"), keras.Input([8], name="numbers")
    joined = layers.Concatenate()([layers.Flatten()(layers.Embedding(5, 4)(words)), numbers])
    plain = keras.Model({"words": words, "numbers": numbers}, dense()(joined))
    sparse = ms.keras.sparsify(plain, 0.5)
    sparse.export(tmp_path / "model", verbose=False)
    given = {"words": tf.ones([32, 3], tf.int32), "numbers": tf.constant(X)}
    exported = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(exported.serve(given), sparse(given), atol=1e-6)


def test_the_model_inside_can_be_called_but_not_trained() -> None:
    sparse, _ = pair()
    inner = sparse.inner
    np.testing.assert_array_equal(inner(X), sparse(X))
    features = keras.Model(inner.inputs, inner.layers[0].output)
    assert features.predict(X, verbose=0).shape == (32, 8)
    with pytest.raises((ArgumentError, RuntimeError), match="train that, not the layer"):
        fitted(compiled(inner))


def test_weights_of_another_sparsity_and_the_legacy_format(tmp_path: Path) -> None:
    sparse, _ = pair()
    sparse.save_weights(tmp_path / "model.weights.h5")
    other = ms.keras.sparsify(chain(dense(8), dense()), 0.75)
    with pytest.raises(
        ValueError, match="total=24: is the number of .*sparse weights, but the file has 48"
    ):
        other.load_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ArgumentError, match="save as .keras"):
        sparse.save(tmp_path / "model.h5")


def test_loading_in_another_process(tmp_path: Path) -> None:
    sparse, _ = pair()
    sparse.save(tmp_path / "model.keras")
    found = fresh("tests.helpers.loading:predicted", path=tmp_path / "model.keras", x=X)
    np.testing.assert_allclose(found, sparse(X), atol=1e-6)
