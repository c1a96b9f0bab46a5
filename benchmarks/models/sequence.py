"""A recurrent network written out step by step: two state tensors cross every cut."""

from __future__ import annotations

import keras

from benchmarks.models.base import Model, keras_classifier

__all__ = ["lstm"]


def lstm(
    length: int = 64, hidden: int = 256, features: int = 256, batch: int = 64, classes: int = 10
) -> Model:
    """An LSTM unrolled over `length` steps, with a classifier on its last output."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, features), batch_size=batch)
    x = keras.layers.LSTM(hidden, unroll=True, use_cudnn=False, name="lstm")(inputs)
    layers = keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="lstm")
    return keras_classifier("lstm", layers, (length, features), batch, classes)
