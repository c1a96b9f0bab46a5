"""A Keras model that draws random numbers and normalizes, with training steps of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memsaving_gradients as ms

MemorySavingGradients = ms.keras.MemorySavingGradients

ROWS, WIDTH = 64, 16


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return (
        numbers.normal(size=(ROWS, WIDTH)).astype("f"),
        numbers.normal(size=(ROWS, 1)).astype("f"),
    )


class WithTape(keras.Model):
    """A model with a training step of its own, by a tape."""

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class WithGradients(keras.Model):
    """A model with a training step of its own, by ``tf.gradients``."""

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = [v.value for v in self.trainable_variables]
        self.optimizer.apply(tf.gradients(loss, weights), self.trainable_variables)
        return {"loss": loss}


def build(kind: type[keras.Model] = keras.Model, activation: str = "gelu") -> keras.Model:
    keras.utils.set_random_seed(1)
    x = start = keras.Input([WIDTH])
    for k in range(4):
        x = keras.layers.Dense(WIDTH, activation=activation, name=f"dense_{k}")(x)
        x = keras.layers.BatchNormalization(name=f"norm_{k}")(x)
        x = keras.layers.Dropout(0.2, name=f"drop_{k}")(x)
    return kind(start, keras.layers.Dense(1, name="last")(x))


def convolutions(size: int, layers: int, optimizer: str) -> keras.Model:
    """Return a compiled classifier of images of ``size`` × ``size``: a chain of convolutions."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((size, size, 3)),
            *(keras.layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(layers)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def compiled(
    kind: type[keras.Model] = keras.Model,
    optimizer: Any = None,
    activation: str = "gelu",
    **options: Any,
) -> keras.Model:
    model = build(kind, activation)
    options = {"jit_compile": False, **options}
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", **options)
    return model


def fit(model: keras.Model, callback: Any = None, **options: Any) -> list[float]:
    x, y = data()
    options = {"batch_size": 16, "epochs": 1, "verbose": 0, "shuffle": False, **options}
    callbacks = options.pop("others", []) + ([callback] if callback else [])
    return model.fit(x, y, callbacks=callbacks, **options).history["loss"]


def assert_trains_alike(
    make: Callable[[], keras.Model], tolerance: float = 0.0, **fitting: Any
) -> Any:
    """Assert that the callback changes no losses and weights; return its plans."""
    plain, ours = make(), make()
    losses = fit(plain, **fitting)
    callback = MemorySavingGradients(checkpoints="memory")
    found = fit(ours, callback, **fitting)
    np.testing.assert_allclose(found, losses, rtol=tolerance)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert callback.plans
    assert all(plan.clones > 0 for plan in callback.plans)
    return callback.plans
