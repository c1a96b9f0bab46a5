"""A generator and a discriminator with one loss each, which share their forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Array, tensors


@dataclass(frozen=True)
class Gan:
    """Two networks; `losses` takes noise and real images, returns generator's, discriminator's."""

    losses: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    generator_variables: tuple[Any, ...]
    discriminator_variables: tuple[Any, ...]
    batch: tuple[Array, ...]


def gan(filters: int = 8, image: int = 16, batch: int = 4, noise: int = 16) -> Gan:
    """A small DCGAN (Radford et al. 2016, arXiv 1511.06434) with logistic losses."""
    keras.utils.set_random_seed(0)
    small = image // 4
    generator = keras.Sequential(
        [
            keras.Input((noise,), batch_size=batch),
            keras.layers.Dense(small * small * 2 * filters),
            keras.layers.Reshape((small, small, 2 * filters)),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2DTranspose(filters, 4, strides=2, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )
    discriminator = keras.Sequential(
        [
            keras.Input((image, image, 3), batch_size=batch),
            keras.layers.Conv2D(filters, 4, strides=2, padding="same"),
            keras.layers.LeakyReLU(0.2),
            keras.layers.Conv2D(2 * filters, 4, strides=2, padding="same"),
            keras.layers.LeakyReLU(0.2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=2),
            keras.layers.Dense(1),
        ],
        name="discriminator",
    )
    draw = np.random.default_rng(0)
    fed = (
        draw.standard_normal((batch, noise)).astype(np.float32),
        draw.uniform(-1, 1, (batch, image, image, 3)).astype(np.float32),
    )

    def losses(z: tf.Tensor, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        fake = discriminator(generator(z, training=True), training=True)
        true = discriminator(real, training=True)
        return (
            tf.reduce_mean(tf.nn.softplus(-fake)),
            tf.reduce_mean(tf.nn.softplus(fake)) + tf.reduce_mean(tf.nn.softplus(-true)),
        )

    return Gan(losses, tensors(generator), tensors(discriminator), fed)
