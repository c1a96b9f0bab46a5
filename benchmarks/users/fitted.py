"""Keras models trained by ``fit``."""

from __future__ import annotations

from typing import Any

import keras

from benchmarks.users.base import Program, draw


def convlstm() -> Program:
    """Return two ConvLSTM layers that predict the frames of a film."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([8, 32, 32, 1]),
            keras.layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True),
            keras.layers.BatchNormalization(),
            keras.layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True),
            keras.layers.Conv3D(1, 3, padding="same"),
        ]
    )
    model.compile("adam", "mse")
    film = draw(6, 9, 32, 32, 1)
    return Program(None, (film[:, :-1], film[:, 1:]), model)


def unet3d() -> Program:
    """Return a U-Net of volumes, with batch normalization and dropout."""
    keras.utils.set_random_seed(0)

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = keras.layers.Conv3D(filters, 3, padding="same")(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        return x

    inputs = keras.Input([24, 24, 24, 1])
    skips, x = [], inputs
    for filters in (8, 16):
        skips.append(x := block(x, filters))
        x = keras.layers.MaxPooling3D()(x)
    x = keras.layers.Dropout(0.2)(block(x, 32))
    for filters in (16, 8):
        x = keras.layers.Conv3DTranspose(filters, 2, 2)(x)
        x = block(keras.layers.Concatenate()([x, skips.pop()]), filters)
    model = keras.Model(inputs, keras.layers.Conv3D(1, 1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(1e-4), "binary_crossentropy")
    volumes = draw(4, 24, 24, 24, 1)
    return Program(None, (volumes, keras.ops.cast(volumes > 0.5, "float32")), model)
