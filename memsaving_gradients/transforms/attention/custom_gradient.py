"""A computation with a gradient of its own, and a gradient of that gradient.

``tf.custom_gradient`` keeps whatever the gradient function reads, and lets TensorFlow differentiate what it computes. A gradient
in blocks must not be differentiated like that: its loops would keep every block. So the gradient is a computation with a
gradient of its own as well, and that one refuses to be differentiated once more instead of holding what the first two
avoided. Forward mode works for the first order: TensorFlow gets a product with the Jacobian by transposing
the gradient, which is what the second order gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import HigherOrderError

__all__ = ["differentiable"]

Tensors = Sequence[tf.Tensor]


def differentiable(
    what: str,
    forward: Callable[..., tuple[tf.Tensor, Tensors]],
    backward: Callable[..., Tensors],
    second: Callable[..., Tensors],
    inputs: Tensors,
) -> tuple[tf.Tensor, ...]:
    """``forward(*inputs)``: the result, differentiable twice, and what is kept, not differentiable.

    Parameters
    ----------
    what
        Its name, for errors.
    forward
        Returns the result and a sequence of what ``backward`` needs beside the inputs and the result.
    backward
        ``backward(inputs, result, kept, upstream)``: a gradient for each input.
    second
        ``second(inputs, result, kept, upstream, directions)``: the gradients, for each input and for ``upstream``, of the sum of
        products of what ``backward`` returns with ``directions``.
    inputs
        Floating tensors.
    """

    @tf.custom_gradient
    def computed(*inputs: tf.Tensor) -> Any:
        # What is computed here is not differentiated by TensorFlow. Tapes would record it all the same, and keep it.
        result, kept = forward(*map(tf.stop_gradient, inputs))

        @tf.custom_gradient
        def gradient(upstream: tf.Tensor, *inputs: tf.Tensor) -> Any:
            still = [tf.stop_gradient(x) for x in inputs]
            found = backward(still, result, kept, tf.stop_gradient(upstream))

            def again(*directions: tf.Tensor) -> Any:
                return _last(what, second, result, kept, upstream, inputs, directions)

            return tuple(found), again

        def once(upstream: tf.Tensor, *_: tf.Tensor) -> Any:
            return gradient(upstream, *inputs)

        return (result, *kept), once

    found: tuple[tf.Tensor, ...] = computed(*inputs)
    return found


def _last(
    what: str,
    second: Callable[..., Tensors],
    result: tf.Tensor,
    kept: Tensors,
    upstream: tf.Tensor,
    inputs: Tensors,
    directions: Tensors,
) -> Any:
    @tf.custom_gradient
    def gradient(*tensors: tf.Tensor) -> Any:
        upstream, *rest = map(tf.stop_gradient, tensors)
        inputs, directions = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        *found, of_upstream = second(inputs, result, kept, upstream, directions)

        def refused(*_: tf.Tensor) -> Any:
            raise HigherOrderError(
                f"{what} can be differentiated twice in reverse mode, or once in forward mode; for more take the plain layer or "
                "formula"
            )

        return (of_upstream, *found), refused

    return gradient(upstream, *inputs, *directions)
