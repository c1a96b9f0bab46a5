"""Losses whose gradients are computed before they are asked for, and gradients of other results.

A loop over microbatches has to differentiate each of them before the next. An op connects the loss
to the variables: its gradient is the sum that the loop computed, times the gradient from above.
That is right for tapes and ``tf.gradients`` alike. The loop keeps nothing else, so that gradients
of these gradients are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import graphs
from graph_tools.warn import warn
from memsaving_gradients.errors import HigherOrderError, NothingSavedWarning
from memsaving_gradients.training.microbatches.buffers import is_number

__all__ = ["loss_with", "through_the_loop", "without_gradient"]

_KEPT_NOTHING = (
    "gradients of gradients of a loss in microbatches cannot be computed: the loop keeps no values"
    " for them; compute the inner gradients inside of the function that you give to microbatch"
)
_APPLIED = (
    "a result of a step in microbatches that applies gradients itself has no gradient;"
    " differentiate a loss, in a separate function"
)


def loss_with(value: tf.Tensor, grads: Sequence[Any], sources: Sequence[Any]) -> tf.Tensor:
    """Return ``value`` with the gradients ``grads`` with respect to ``sources``; ``None`` where it
    does not depend on one."""
    known = [(g, x) for g, x in zip(grads, sources, strict=True) if g is not None]
    grads = [g for g, _ in known]

    @tf.custom_gradient
    def loss(value: tf.Tensor, *read: tf.Tensor) -> Any:
        def gradient(above: tf.Tensor) -> list[Any]:
            return [None, *(_times(g, above, x) for g, x in zip(grads, read, strict=True))]

        return tf.identity(value), gradient

    return loss(value, *(tf.convert_to_tensor(x) for _, x in known))


def without_gradient(value: Any, sources: Sequence[Any]) -> Any:
    """Return ``value`` so that differentiating it is an error: how it depends on ``sources`` is not
    known."""
    if not isinstance(value, tf.Tensor) or not is_number(value.dtype):
        return value
    # TensorFlow's gradients see the tensors that a loop read, but tapes do not.
    seen = sources if graphs.tape_is_recording() else ()
    return _final(value, [tf.convert_to_tensor(x) for x in seen], _APPLIED)


def through_the_loop(value: Any) -> Any:
    """Return ``value`` with TensorFlow's own gradient, through the loop: exact, with a warning that
    it saves nothing."""
    if not isinstance(value, tf.Tensor) or not is_number(value.dtype):
        return value

    @tf.custom_gradient
    def kept(value: tf.Tensor) -> Any:
        def gradient(above: tf.Tensor) -> tf.Tensor:
            warn(
                "microbatch: the differentiated result is not a loss, or not the only result; its"
                " gradient goes through the loop, which keeps the values of all microbatches."
                " Return only a scalar loss from the function, and compute other results in"
                " another function.",
                NothingSavedWarning,
            )
            return above

        return tf.identity(value), gradient

    return kept(value)


def _times(grad: Any, above: tf.Tensor, source: tf.Tensor) -> Any:
    above = tf.cast(above, grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        values = _final(grad.values * above, [source], _KEPT_NOTHING)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return _final(grad * above, [source], _KEPT_NOTHING)


def _final(value: tf.Tensor, sources: Sequence[tf.Tensor], problem: str) -> tf.Tensor:
    """Return ``value``, which depends on ``sources`` by a gradient that raises an error."""

    @tf.custom_gradient
    def final(value: tf.Tensor, *sources: tf.Tensor) -> Any:
        def refused(above: tf.Tensor) -> Any:
            raise HigherOrderError(problem)

        return tf.identity(value), refused

    return final(value, *sources)
