"""Pre-activation bottleneck ResNets for 32 x 32 images (He et al. 2016, arXiv 1603.05027).

Three stages of equal blocks at 32, 16 and 8 pixels have 3 layers a block, plus 2: 111 blocks a
stage are the paper's 1001 layers, 9 are 83.  Keras' batch normalization becomes half a dozen ops,
so the deep one has about 40,000 forward ops, and plain training keeps over a gigabyte at batch 8.
"""

from __future__ import annotations

from typing import Any

import keras

from benchmarks.networks.base import Model, keras_classifier


def cifar_resnet(
    blocks: int = 111,
    batch: int = 8,
    width: int = 16,
    *,
    image: int = 32,
    classes: int = 10,
    dropout: float = 0.0,
    stages: int = 3,
) -> Model:
    """Make a ResNet with `blocks` bottlenecks a stage, of width `width` x 4 in the first stage."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((image, image, 3), batch_size=batch)
    x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name="stem")(inputs)
    for stage in range(stages):
        for block in range(blocks):
            x = _bottleneck(
                x,
                width * 2**stage,
                stride=2 if stage and not block else 1,
                dropout=dropout,
                name=f"stage{stage + 1}_block{block + 1}",
            )
    x = _activate(x, "final")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(classes, name="logits")(x)
    layers = keras.Model(inputs, outputs, name=f"resnet{3 * stages * blocks + 2}")
    return keras_classifier("cifar_resnet", layers, (image, image, 3), batch, classes)


def _bottleneck(x: Any, width: int, stride: int, dropout: float, name: str) -> Any:
    """Add BN-relu-conv1, BN-relu-conv3, BN-relu-conv1; a projection where the shape changes."""
    active = _activate(x, f"{name}_1")
    shortcut = x
    if stride != 1 or x.shape[-1] != 4 * width:
        shortcut = keras.layers.Conv2D(
            4 * width, 1, strides=stride, use_bias=False, name=f"{name}_shortcut"
        )(active)
    y = keras.layers.Conv2D(width, 1, use_bias=False, name=f"{name}_conv1")(active)
    y = keras.layers.Conv2D(
        width, 3, strides=stride, padding="same", use_bias=False, name=f"{name}_conv2"
    )(_activate(y, f"{name}_2"))
    y = _activate(y, f"{name}_3")
    if dropout:
        y = keras.layers.Dropout(dropout, seed=1, name=f"{name}_drop")(y)
    y = keras.layers.Conv2D(4 * width, 1, use_bias=False, name=f"{name}_conv3")(y)
    return keras.layers.Add(name=f"{name}_add")([shortcut, y])


def _activate(x: Any, name: str) -> Any:
    x = keras.layers.BatchNormalization(name=f"{name}_bn")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)
