"""Properties of Keras' models and optimizers: bytes, held gradients, built layers, statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from memsaving_gradients._keras import layers_of

__all__ = ["bytes_of", "holds_gradients", "is_whole", "normalizes_batches"]


def bytes_of(variables: Iterable[Any]) -> int:
    """Return the bytes of Keras variables, each counted once."""
    found = {id(v): v for v in variables}
    return sum(
        math.prod(v.shape) * tf.as_dtype(keras.backend.standardize_dtype(v.dtype)).size
        for v in found.values()
        if v.dtype != "string"
    )


def holds_gradients(optimizer: Any) -> bool:
    """Return whether ``optimizer`` reads all gradients before it uses the first."""
    while optimizer is not None:
        if getattr(optimizer, "global_clipnorm", None):
            return True
        if getattr(optimizer, "gradient_accumulation_steps", None):
            return True
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False


def is_whole(model: Any) -> bool:
    """Return whether ``model`` and all of its layers have their variables; Keras says of some
    models that they are built when their layers are not."""
    return all(layer.built for layer in layers_of(model))


def normalizes_batches(model: Any) -> bool:
    """Return whether ``model`` normalizes by statistics of the batch when it trains."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for layer in layers_of(model)
    )
