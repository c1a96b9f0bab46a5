"""Wide residual networks for 32 x 32 images (Zagoruyko & Komodakis 2016, arXiv 1605.07146).

Three stages of (depth - 4) / 6 blocks of two 3 x 3 convolutions each, `widen` times as wide as a
ResNet's. With 28 layers, twice as wide, it is the network of Sohoni et al. 2019 (arXiv 1904.10631),
with 1.5 million weights.
"""

from __future__ import annotations

from typing import Any

import keras

from benchmarks.networks.base import Model, keras_classifier

NORMS = {
    "batch": lambda name: keras.layers.BatchNormalization(
        momentum=0.9, name=name, dtype=policy_of_normalizations()
    ),
    "group": lambda name: keras.layers.GroupNormalization(
        groups=8, name=name, dtype=policy_of_normalizations()
    ),
}


def policy_of_normalizations() -> str:
    """Return the dtype policy of normalizations, whose weights and averages always have 32 bits."""
    name: str = keras.config.dtype_policy().name
    return f"mixed_{name}" if name in ("bfloat16", "float16") else name


def wide_resnet(
    depth: int = 28,
    widen: int = 2,
    batch: int = 100,
    *,
    norm: str = "batch",
    image: int = 32,
    classes: int = 10,
    seed: int = 0,
) -> Model:
    """Make a wide residual network, normalized over the ``"batch"`` or a ``"group"``."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((image, image, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem")(inputs)
    for stage in range(3):
        for block in range((depth - 4) // 6):
            x = _block(
                x,
                16 * widen * 2**stage,
                stride=2 if stage and not block else 1,
                norm=norm,
                name=f"stage{stage + 1}_block{block + 1}",
            )
    x = _activate(x, norm, "final")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(classes, name="logits")(x)
    layers = keras.Model(inputs, outputs, name=f"wide_resnet{depth}_{widen}")
    return keras_classifier("wide_resnet", layers, (image, image, 3), batch, classes)


def _block(x: Any, width: int, stride: int, norm: str, name: str) -> Any:
    """Add norm-relu-conv, norm-relu-conv; if the shape changes, project the activated input."""
    active = _activate(x, norm, f"{name}_1")
    shortcut = x
    if stride != 1 or x.shape[-1] != width:
        shortcut = keras.layers.Conv2D(
            width, 1, strides=stride, use_bias=False, name=f"{name}_shortcut"
        )(active)
    y = active
    for number in (1, 2):
        y = keras.layers.Conv2D(
            width,
            3,
            strides=stride if number == 1 else 1,
            padding="same",
            use_bias=False,
            name=f"{name}_conv{number}",
        )(y)
        if number == 1:
            y = _activate(y, norm, f"{name}_2")
    return keras.layers.Add(name=f"{name}_add")([shortcut, y])


def _activate(x: Any, norm: str, name: str) -> Any:
    return keras.layers.ReLU(name=f"{name}_relu")(NORMS[norm](f"{name}_norm")(x))
