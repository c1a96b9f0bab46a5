"""Requirements of tests on the version of Keras that they run with."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import keras
import pytest

__all__ = ["KERAS", "needs_argument", "needs_keras", "takes"]

#: ``(3, 15)`` for Keras 3.15.1.
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])


def needs_keras(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if this version of Keras lacks ``name`` (written without
    ``keras.``)."""
    try:
        operator.attrgetter(name)(keras)
        missing = False
    except AttributeError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"Keras {keras.__version__} has no {name}")


def needs_argument(kind: Any, name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a class of this version of Keras takes no argument
    ``name``."""
    reason = f"{kind.__name__} of Keras {keras.__version__} takes no {name}"
    return pytest.mark.skipif(not takes(kind, name), reason=reason)


def takes(kind: Any, name: str) -> bool:
    """Return whether a class of Keras takes an argument of this name."""
    return name in inspect.signature(kind.__init__).parameters
