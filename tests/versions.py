"""What tests need of the versions of Keras and TensorFlow that they run with."""

from __future__ import annotations

import operator

import keras
import pytest

__all__ = ["needs_keras"]


def needs_keras(name: str) -> pytest.MarkDecorator:
    """Skip a test of what this version of Keras does not have, and say so; ``name`` is what there must be, without ``keras.``."""
    try:
        operator.attrgetter(name)(keras)
        missing = False
    except AttributeError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"Keras {keras.__version__} has no {name}")
