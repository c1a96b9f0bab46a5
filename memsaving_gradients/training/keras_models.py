"""Properties of Keras' models and optimizers: bytes, held gradients, built layers, statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from memsaving_gradients._keras import layers_of
from memsaving_gradients.errors import EagerExecutionError

__all__ = [
    "bytes_of",
    "check_has_graph",
    "holds_gradients",
    "normalizes_batches",
    "replaced",
    "unbuilt_layers",
]


def bytes_of(variables: Iterable[Any]) -> int:
    """Return the bytes of Keras variables, each counted once."""
    found = {id(v): v for v in variables}
    return sum(
        math.prod(v.shape) * tf.as_dtype(keras.backend.standardize_dtype(v.dtype)).size
        for v in found.values()
        if v.dtype != "string"
    )


def check_has_graph(model: Any) -> None:
    """Raise an `EagerExecutionError` if ``model`` trains eagerly, without a graph to rewire."""
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise EagerExecutionError(
            "run_eagerly=True: there is no graph to rewire in eager execution; compile the model"
            " with run_eagerly=False (and leave tf.config.run_functions_eagerly off)"
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


def normalizes_batches(model: Any) -> bool:
    """Return whether ``model`` normalizes by statistics of the batch when it trains."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for layer in layers_of(model)
    )


@contextmanager
def replaced(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Make ``function`` the method ``name`` of ``model`` in a block."""
    if function == getattr(model, name):
        yield
        return
    # An attribute of the model hides the method that its class has.
    own = vars(model).get(name)
    setattr(model, name, function)
    try:
        yield
    finally:
        delattr(model, name)
        if own is not None:
            setattr(model, name, own)


def unbuilt_layers(model: Any) -> list[Any]:
    """Return the layers of ``model``, itself included, that have no variables yet. Keras says of
    some models that they are built when their layers are not."""
    return [layer for layer in layers_of(model) if not layer.built]
