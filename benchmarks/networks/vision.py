"""Classic convolutional networks, some with skips that leave no single tensor to cut at.

`application` wraps the networks that Keras ships, with random weights.  The others are written here
because tests need small ones.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, entropy, keras_classifier, tensors


def application(name: str, batch: int, image: int = 224, classes: int = 1000) -> Model:
    """Make an untrained ``keras.applications`` network (``"ResNet50"``, ``"DenseNet121"``, ...)."""
    keras.utils.set_random_seed(0)
    layers = getattr(keras.applications, name)(
        weights=None,
        input_tensor=keras.Input((image, image, 3), batch_size=batch),
        classes=classes,
        classifier_activation=None,
    )
    return keras_classifier(name, layers, (image, image, 3), batch, classes)


def unet(
    levels: int = 4, filters: int = 32, image: int = 128, batch: int = 8, classes: int = 2
) -> Model:
    """Make a U-Net (Ronneberger et al. 2015, arXiv 1505.04597): conv-BN-relu twice per level, side.

    The U has `levels` levels above its bottom, each half the size of the one above it.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((image, image, 3), batch_size=batch)
    x, skips = inputs, []
    for level in range(levels):
        x = _conv_twice(x, filters * 2**level, f"down{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(name=f"down{level}_pool")(x)
    x = _conv_twice(x, filters * 2**levels, "bottom")
    for level in reversed(range(levels)):
        x = keras.layers.Conv2DTranspose(filters * 2**level, 2, strides=2, name=f"up{level}_grow")(
            x
        )
        x = keras.layers.Concatenate(name=f"up{level}_join")([skips[level], x])
        x = _conv_twice(x, filters * 2**level, f"up{level}")
    outputs = keras.layers.Conv2D(classes, 1, name="logits")(x)
    layers = keras.Model(inputs, outputs, name="unet")
    draw = np.random.default_rng(0)
    images = draw.standard_normal((batch, image, image, 3)).astype(np.float32)
    labels = draw.integers(0, classes, (batch, image, image)).astype(np.int32)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return entropy(layers(x, training=True), y)

    return Model("unet", loss, tensors(layers), (images, labels), layers)


def densenet(
    depths: tuple[int, ...] = (3, 3),
    growth: int = 8,
    image: int = 16,
    batch: int = 4,
    classes: int = 10,
) -> Model:
    """Make a small DenseNet (Huang et al. 2017, arXiv 1608.06993): a layer reads all before it."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((image, image, 3), batch_size=batch)
    x = keras.layers.Conv2D(2 * growth, 3, padding="same", use_bias=False)(inputs)
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            y = keras.layers.Conv2D(4 * growth, 1, use_bias=False)(_activate(x))
            y = keras.layers.Conv2D(growth, 3, padding="same", use_bias=False)(_activate(y))
            x = keras.layers.Concatenate()([x, y])
        if stage < len(depths) - 1:
            x = keras.layers.Conv2D(x.shape[-1] // 2, 1, use_bias=False)(_activate(x))
            x = keras.layers.AveragePooling2D(2)(x)
    return _classifier("densenet", inputs, _activate(x), image, batch, classes)


def inception(
    modules: int = 3, width: int = 8, image: int = 16, batch: int = 4, classes: int = 10
) -> Model:
    """Make a small Inception net (Szegedy et al. 2015, arXiv 1409.4842): four branches a module."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((image, image, 3), batch_size=batch)
    x = _conv(inputs, 2 * width, 3)
    for _ in range(modules):
        pooled = keras.layers.MaxPooling2D(3, strides=1, padding="same")(x)
        branches = [
            _conv(x, width, 1),
            _conv(_conv(x, width, 1), width, 3),
            _conv(_conv(_conv(x, width, 1), width, 3), width, 3),
            _conv(pooled, width, 1),
        ]
        x = keras.layers.Concatenate()(branches)
    return _classifier("inception", inputs, x, image, batch, classes)


def vgg(
    depths: tuple[int, ...] = (1, 1, 2),
    filters: int = 8,
    image: int = 32,
    batch: int = 4,
    classes: int = 10,
    dropout: float = 0.5,
    decay: float = 0.0,
) -> Model:
    """Make a small VGG (Simonyan, Zisserman 2015, arXiv 1409.1556), dropout after dense layers."""
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(decay) if decay else None
    inputs = keras.Input((image, image, 3), batch_size=batch)
    x: Any = inputs
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            x = keras.layers.Conv2D(
                filters * 2**stage, 3, padding="same", activation="relu", kernel_regularizer=penalty
            )(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    for i in range(2):
        x = keras.layers.Dense(8 * filters, activation="relu", kernel_regularizer=penalty)(x)
        if dropout:
            x = keras.layers.Dropout(dropout, seed=i)(x)
    outputs = keras.layers.Dense(classes, name="logits")(x)
    layers = keras.Model(inputs, outputs, name="vgg")
    return keras_classifier("vgg", layers, (image, image, 3), batch, classes)


def _classifier(name: str, inputs: Any, x: Any, image: int, batch: int, classes: int) -> Model:
    x = keras.layers.GlobalAveragePooling2D()(x)
    layers = keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name=name)
    return keras_classifier(name, layers, (image, image, 3), batch, classes)


def _conv(x: Any, filters: int, size: int) -> Any:
    return _activate(keras.layers.Conv2D(filters, size, padding="same", use_bias=False)(x))


def _conv_twice(x: Any, filters: int, name: str) -> Any:
    for i in (1, 2):
        x = keras.layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv{i}")(x)
        x = keras.layers.BatchNormalization(name=f"{name}_bn{i}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{i}")(x)
    return x


def _activate(x: Any) -> Any:
    return keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
