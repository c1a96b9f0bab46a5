"""The zoo: networks that tests and benchmarks share, in any size.

``build("unet", image=64)`` makes one by name, so that its description can be sent to another
process.  ``SMALL`` holds sizes at which every network builds and runs in seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.networks.base import Model

__all__ = ["SMALL", "ZOO", "Model", "build", "small"]

# The module of each builder.  Imported on demand: Keras takes seconds, and chains do not need it.
ZOO: dict[str, str] = {
    "tanh_chain": "networks.chains",
    "residual_chain": "networks.chains",
    "mlp": "networks.chains",
    "transformer": "networks.transformer",
    "cifar_resnet": "networks.resnet",
    "wide_resnet": "networks.wide",
    "imagenet_resnet": "networks.preactivation",
    "application": "networks.vision",
    "unet": "networks.vision",
    "densenet": "networks.vision",
    "inception": "networks.vision",
    "vgg": "networks.vision",
    "lstm": "networks.sequence",
    "recurrence": "networks.sequence",
    "dynamic_conv": "networks.dynamic",
    "foreign": "zoo.network",
    "mixed": "networks.mixed",
    "encoder": "networks.stacks",
    "dense_chain": "networks.stacks",
}

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "tanh_chain": ("tanh_chain", {"length": 12, "size": 2**10}),
    "residual_chain": ("residual_chain", {"length": 12, "size": 2**10}),
    "mlp": ("mlp", {"depth": 8, "batch": 32, "width": 16}),
    "transformer": (
        "transformer",
        {"layers": 3, "batch": 2, "length": 8, "width": 16, "heads": 2, "vocabulary": 16},
    ),
    "cifar_resnet": ("cifar_resnet", {"blocks": 2, "batch": 2, "width": 4, "image": 16}),
    "wide_resnet": ("wide_resnet", {"depth": 10, "widen": 1, "batch": 4, "image": 16}),
    "imagenet_resnet": (
        "imagenet_resnet",
        {"size": 18, "batch": 2, "image": 32, "width": 4, "classes": 10},
    ),
    "dynamic_conv": (
        "dynamic_conv",
        {
            "batch": 4,
            "length": 8,
            "encoder": (3, 5),
            "decoder": (3,),
            "width": 16,
            "inner": 16,
            "words": 32,
        },
    ),
    "mixed": ("mixed", {"blocks": 2, "batch": 2, "image": 4, "width": 4}),
    "encoder": (
        "encoder",
        {"layers": 3, "batch": 2, "length": 8, "width": 16, "heads": 2, "vocabulary": 16},
    ),
    "dense_chain": ("dense_chain", {"depth": 12, "batch": 32, "width": 16}),
    "unet": ("unet", {"levels": 2, "filters": 4, "image": 16, "batch": 2}),
    "densenet": ("densenet", {"growth": 4, "batch": 2}),
    "inception": ("inception", {"width": 4, "batch": 2}),
    "vgg": ("vgg", {"filters": 4, "batch": 2}),
    "lstm": ("lstm", {"length": 8, "hidden": 8, "features": 4, "batch": 4}),
    "recurrence": (
        "recurrence",
        {"length": 24, "hidden": 8, "features": 4, "batch": 4, "cells": 2},
    ),
}


def build(name: str, /, **options: Any) -> Model:
    """Make a network of the zoo in the current graph.

    Raises
    ------
    ValueError
        The zoo has no network of this name.
    """
    if name not in ZOO:
        raise ValueError(f"unknown network {name!r}; the zoo has {sorted(ZOO)}")
    module = importlib.import_module(f"benchmarks.{ZOO[name]}")
    model: Model = getattr(module, name)(**options)
    return model


def small(name: str, /, **options: Any) -> Model:
    """Make the small version of a network; `options` override its sizes."""
    if name not in SMALL:
        raise ValueError(f"unknown small network {name!r}; the small networks are {sorted(SMALL)}")
    builder, sizes = SMALL[name]
    return build(builder, **{**sizes, **options})
