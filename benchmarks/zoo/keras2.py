"""Keras 2 (``tf_keras``): applications, an LSTM, a functional model with two inputs."""

from __future__ import annotations

import tf_keras

from benchmarks.networks.base import Model
from benchmarks.zoo.sizes import batch_for, classifier, draw_images, draw_tokens

APPLICATIONS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121")
SIDE, CLASSES = 64, 10
LENGTH, WORDS, WIDTH = 64, 512, 64


def names() -> list[str]:
    """Return the names of some applications, and of the networks of this module."""
    return [*APPLICATIONS, "functional", "lstm"]


def build(name: str) -> Model:
    """Make a network by name, with softmax cross-entropy."""
    tf_keras.utils.set_random_seed(0)
    if name in APPLICATIONS:
        layers = getattr(tf_keras.applications, name)(
            weights=None, input_shape=(SIDE, SIDE, 3), classes=CLASSES, classifier_activation=None
        )
        return classifier(name, layers, [draw_images((batch_for(layers), SIDE, SIDE, 3))], CLASSES)
    return {"functional": _functional, "lstm": _lstm}[name]()


def _lstm() -> Model:
    keras = tf_keras
    layers = keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int32"),
            keras.layers.Embedding(WORDS, WIDTH),
            keras.layers.LSTM(WIDTH, return_sequences=True),
            keras.layers.Bidirectional(keras.layers.LSTM(WIDTH)),
            keras.layers.Dense(CLASSES),
        ]
    )
    return classifier("lstm", layers, [draw_tokens((batch_for(layers), LENGTH), WORDS)], CLASSES)


def _functional() -> Model:
    """Make a network of images and words: a layer used twice, dropout, normalization, residuals."""
    keras = tf_keras
    image = keras.Input([SIDE, SIDE, 3])
    words = keras.Input([LENGTH], dtype="int32")
    x = keras.layers.Conv2D(32, 3, padding="same")(image)
    twice = keras.layers.Conv2D(32, 3, padding="same")
    for _ in range(2):
        h = keras.layers.BatchNormalization()(twice(x))
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.activations.gelu(h))])
    x = keras.layers.GlobalAveragePooling2D()(x)
    y = keras.layers.Embedding(WORDS, WIDTH)(words)
    y = keras.layers.LayerNormalization()(
        y + keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y)
    )
    y = keras.layers.GlobalMaxPooling1D()(y)
    outputs = keras.layers.Dense(CLASSES, kernel_regularizer="l2")(
        keras.layers.Concatenate()([x, y])
    )
    layers = keras.Model([image, words], outputs)
    batch = batch_for(layers)
    inputs = [draw_images((batch, SIDE, SIDE, 3)), draw_tokens((batch, LENGTH), WORDS)]
    return classifier("functional", layers, inputs, CLASSES)
