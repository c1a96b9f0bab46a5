"""Recurrent networks: as loops, and unrolled, where two state tensors cross every cut."""

from __future__ import annotations

import keras

from benchmarks.networks.base import Model, keras_classifier


def lstm(
    length: int = 64, hidden: int = 256, features: int = 256, batch: int = 64, classes: int = 10
) -> Model:
    """Make an LSTM unrolled over `length` steps, with a classifier on its last output."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, features), batch_size=batch)
    x = keras.layers.LSTM(hidden, unroll=True, use_cudnn=False, name="lstm")(inputs)
    layers = keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="lstm")
    return keras_classifier("lstm", layers, (length, features), batch, classes)


def recurrence(
    length: int = 256,
    hidden: int = 1024,
    features: int = 64,
    batch: int = 16,
    classes: int = 16,
    cells: int = 1,
    unroll: bool = False,
) -> Model:
    """Make `cells` LSTM cells in one recurrence, with a classifier on the last output."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, features), batch_size=batch)
    stack = [keras.layers.LSTMCell(hidden) for _ in range(cells)]
    x = keras.layers.RNN(stack if cells > 1 else stack[0], unroll=unroll)(inputs)
    layers = keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="recurrence")
    return keras_classifier("recurrence", layers, (length, features), batch, classes)
