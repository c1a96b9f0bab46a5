"""Keras layers that apply the functions of this package for tensors of a graph, such as `mark`."""

from __future__ import annotations

from typing import Any

import keras

from memsaving_gradients.engine.marks import mark

__all__ = ["Checkpoint"]


@keras.saving.register_keras_serializable(package="memsaving_gradients")
class Checkpoint(keras.layers.Layer):
    """A layer that marks its input as a tensor to keep, and changes nothing."""

    def call(self, inputs: Any) -> Any:
        """Mark and return ``inputs``."""
        return mark(inputs)
