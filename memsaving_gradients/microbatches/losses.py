"""A loss whose gradients are there before they are asked for.

A loop over microbatches has to differentiate each of them before the next. What it gives is connected to the variables by an op whose gradient is what
the loop added up, times what comes from above: right for tapes and ``tf.gradients`` alike. Nothing more is known, so that
gradients of these gradients are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import HigherOrderError

__all__ = ["loss_with"]


def loss_with(value: tf.Tensor, grads: Sequence[Any], sources: Sequence[Any]) -> tf.Tensor:
    """``value``, the gradients of which with respect to ``sources`` are ``grads``; ``None`` where it does not depend on one."""
    known = [(g, x) for g, x in zip(grads, sources, strict=True) if g is not None]
    grads = [g for g, _ in known]

    @tf.custom_gradient
    def loss(value: tf.Tensor, *read: tf.Tensor) -> Any:
        def gradient(above: tf.Tensor) -> list[Any]:
            return [None, *(_times(g, above, x) for g, x in zip(grads, read, strict=True))]

        return tf.identity(value), gradient

    return loss(value, *(tf.convert_to_tensor(x) for _, x in known))


def _times(grad: Any, above: tf.Tensor, source: tf.Tensor) -> Any:
    above = tf.cast(above, grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_final(grad.values * above, source), grad.indices, grad.dense_shape)
    return _final(grad * above, source)


def _final(grad: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """``grad``, which depends on ``source`` in a way that nobody can differentiate any more."""

    @tf.custom_gradient
    def final(grad: tf.Tensor, source: tf.Tensor) -> Any:
        def refused(above: tf.Tensor) -> Any:
            raise HigherOrderError(
                "gradients of gradients of a loss in microbatches: the gradients were computed in a loop that kept nothing of "
                "them; compute the inner gradients inside of the function that microbatch is given"
            )

        return tf.identity(grad), refused

    return final(grad, source)
