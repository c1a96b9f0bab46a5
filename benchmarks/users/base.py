"""The class of a program, and the few layers that programs share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Program:
    """One training step of a user.

    Attributes
    ----------
    step
        Computes gradients with tapes, updates variables, and returns losses.
    batch
        Arguments of `step`.
    model
        A compiled Keras model, which its ``fit`` trains on the batch instead of a `step`.
    """

    step: Callable[..., Any] | None
    batch: tuple[tf.Tensor, ...]
    model: Any = None


class Weights:
    """A creator of the variables of a network, each drawn from a seed of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.all: list[tf.Variable] = []

    def __call__(self, *shape: int) -> tf.Variable:
        """Return a new matrix or filter, scaled by the number of its inputs."""
        drawn = tf.random.stateless_normal(shape, [self.seed, len(self.all)])
        self.all.append(tf.Variable(drawn * (1.5 / math.prod(shape[:-1])) ** 0.5))
        return self.all[-1]


def draw(*shape: int, seed: int = 0) -> tf.Tensor:
    """Return normally distributed numbers."""
    return tf.random.stateless_normal(shape, [seed, 7])


def descend(variables: Iterable[tf.Variable], grads: Iterable[Any], rate: float = 1e-3) -> None:
    """Take a step of gradient descent."""
    for variable, grad in zip(variables, grads, strict=True):
        variable.assign_sub(rate * tf.convert_to_tensor(grad))


def conv(x: tf.Tensor, weight: tf.Variable, stride: int = 1) -> tf.Tensor:
    """Return a convolution of images."""
    return tf.nn.conv2d(x, weight, stride, "SAME")


def normalized(x: tf.Tensor, axes: tuple[int, ...] = (-1,)) -> tf.Tensor:
    """Return ``x`` with mean 0 and variance 1 over some axes."""
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-5)


def enlarged(x: tf.Tensor) -> tf.Tensor:
    """Return images with sides of twice the length."""
    return tf.repeat(tf.repeat(x, 2, 1), 2, 2)
