"""``keras.applications``: every architecture, on the smallest of `SIDES` that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from benchmarks.networks.base import Model
from benchmarks.zoo.sizes import batch_for, classifier, draw_images

CLASSES = 10
#: Sides of images; a network gets the first one that it takes.
SIDES = (64, 72, 80, 96, 128, 224)


def names() -> list[str]:
    """Return all functions that make a network: those with a parameter ``weights``."""
    return sorted(
        name
        for name, value in vars(keras.applications).items()
        if inspect.isfunction(value) and "weights" in inspect.signature(value).parameters
    )


def build(name: str) -> Model:
    """Make a network by name, with softmax cross-entropy."""
    keras.utils.set_random_seed(0)
    layers, side = _smallest(getattr(keras.applications, name))
    return classifier(name, layers, [draw_images((batch_for(layers), side, side, 3))], CLASSES)


def build_small(name: str, side: int = 32, batch: int = 4, **options: Any) -> Model:
    """Make a network by name at a given size, such as ``alpha=0.35``, for quick trials."""
    keras.utils.set_random_seed(0)
    make = getattr(keras.applications, name)
    layers = make(input_shape=(side, side, 3), **_UNTRAINED, **options)
    return classifier(name, layers, [draw_images((batch, side, side, 3))], CLASSES)


_UNTRAINED: dict[str, Any] = {"weights": None, "classes": CLASSES, "classifier_activation": None}


def _smallest(make: Any) -> tuple[Any, int]:
    """Return the network and the side of its images."""
    refusals = []
    for side in SIDES:
        try:
            return make(input_shape=(side, side, 3), **_UNTRAINED), side
        except ValueError as error:  # the library says that the side is too small
            refusals.append(f"{side}: {error}")
    raise ValueError(f"no side of an image works; {'; '.join(refusals)}")
