"""``keras.applications``: every architecture, on the smallest images that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, tensors
from benchmarks.zoo.sizes import batch_for, cross_entropy, draw_images

CLASSES = 10
#: Sides of images, the first that a network takes counts.
SIDES = (64, 72, 80, 96, 128, 224)


def names() -> list[str]:
    """All functions that make a network: those that can be told which weights to load."""
    return sorted(
        name
        for name, value in vars(keras.applications).items()
        if inspect.isfunction(value) and "weights" in inspect.signature(value).parameters
    )


def build(name: str) -> Model:
    """The network of a name, under softmax cross-entropy."""
    keras.utils.set_random_seed(0)
    layers, side = _smallest(getattr(keras.applications, name))
    return _classifier(name, layers, side, batch_for(layers))


def build_small(name: str, side: int = 32, batch: int = 4, **options: Any) -> Model:
    """The same at a stated size, such as ``alpha=0.35``, to try things on."""
    keras.utils.set_random_seed(0)
    make = getattr(keras.applications, name)
    layers = make(input_shape=(side, side, 3), **_UNTRAINED, **options)
    return _classifier(name, layers, side, batch)


_UNTRAINED: dict[str, Any] = {"weights": None, "classes": CLASSES, "classifier_activation": None}


def _smallest(make: Any) -> tuple[Any, int]:
    """The network and the side of its images."""
    refusals = []
    for side in SIDES:
        try:
            return make(input_shape=(side, side, 3), **_UNTRAINED), side
        except ValueError as error:  # too small for it, says the library
            refusals.append(f"{side}: {error}")
    raise ValueError(f"no side of an image works; {'; '.join(refusals)}")


def _classifier(name: str, layers: Any, side: int, batch: int) -> Model:
    labels = np.random.default_rng(1).integers(0, CLASSES, batch).astype(np.int32)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.add_n([cross_entropy(y, layers(x, training=True)), *layers.losses])

    return Model(name, loss, tensors(layers), (draw_images((batch, side, side, 3)), labels), layers)
