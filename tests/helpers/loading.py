"""Functions for fresh processes that load a saved model, and import only Keras and this library's
layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import memsaving_gradients.keras  # noqa: F401

__all__ = ["optimizer_in", "predicted"]


def optimizer_in(path: Any) -> tuple[str, str, int]:
    """Return the class, the rounding and the step of the inner optimizer of a saved model."""
    optimizer = keras.models.load_model(path).optimizer.inner_optimizer
    return type(optimizer).__name__, optimizer.rounding, int(optimizer.iterations.numpy())


def predicted(path: Any, x: np.ndarray) -> np.ndarray:
    """Return the predictions of a saved model."""
    return keras.models.load_model(path).predict(x, verbose=0)
