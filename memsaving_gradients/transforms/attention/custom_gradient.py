"""A computation with a gradient of its own, and a gradient of that gradient.

``tf.custom_gradient`` keeps all tensors that the gradient function reads, and lets TensorFlow
differentiate that function. TensorFlow must not differentiate a gradient in blocks: its loops would
keep every block. So the gradient has a gradient of its own, too. That second gradient refuses to be
differentiated, instead of holding the blocks that the first two avoid. Forward mode works for the
first order: TensorFlow computes a product with the Jacobian by transposing the gradient, for which
it uses the second one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import HigherOrderError
from memsaving_gradients.transforms.attention.blocks import run

__all__ = ["Passes", "differentiable"]

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Passes:
    """The passes of a computation, functions of a ``formula`` and of tensors.

    Attributes
    ----------
    name
        The name of the computation, for errors.
    forward
        ``forward(formula, inputs, *given)`` returns the result, and a sequence ``kept`` of tensors
        that ``backward`` needs in addition to the inputs and the result.
    backward
        ``backward(formula, inputs, given, result, kept, upstream)`` returns a gradient for each
        input.
    second
        ``second(formula, inputs, given, result, kept, upstream, directions)`` returns the
        gradients, for each input and for ``upstream``, of the inner product of ``directions`` and
        the result of ``backward``.
    """

    name: str
    forward: Callable[..., tuple[tf.Tensor, Tensors]]
    backward: Callable[..., Tensors]
    second: Callable[..., Tensors]


def differentiable(
    passes: Passes, formula: Any, inputs: Tensors, given: tuple[Any, ...] = ()
) -> tuple[tf.Tensor, ...]:
    """Return the result of the forward pass, twice differentiable, and ``kept`` as constants.

    Parameters
    ----------
    formula
        The hashable first argument of each pass: eager execution traces one graph for each.
    inputs
        Floating tensors.
    given
        Other tensors, which are not differentiated.
    """

    @tf.custom_gradient
    def computed(*inputs: tf.Tensor) -> Any:
        # TensorFlow does not differentiate these ops, but tapes would record and keep them.
        still = tuple(map(tf.stop_gradient, inputs))
        result, kept = run(passes.forward, formula, still, *given)
        kept = tuple(kept)

        @tf.custom_gradient
        def gradient(upstream: tf.Tensor, *inputs: tf.Tensor) -> Any:
            upstream_now, *still = map(tf.stop_gradient, (upstream, *inputs))
            found = run(passes.backward, formula, tuple(still), given, result, kept, upstream_now)

            def again(*directions: tf.Tensor) -> Any:
                return _last(passes.name, second, upstream, inputs, directions)

            return tuple(found), again

        def second(inputs: Tensors, upstream: tf.Tensor, directions: Tensors) -> Any:
            arguments = tuple(inputs), given, result, kept, upstream, tuple(directions)
            return run(passes.second, formula, *arguments)

        def once(upstream: tf.Tensor, *_: tf.Tensor) -> Any:
            return gradient(upstream, *inputs)

        return (result, *kept), once

    found: tuple[tf.Tensor, ...] = computed(*inputs)
    return found


def _last(
    name: str,
    second: Callable[..., Tensors],
    upstream: tf.Tensor,
    inputs: Tensors,
    directions: Tensors,
) -> Any:
    @tf.custom_gradient
    def gradient(*tensors: tf.Tensor) -> Any:
        upstream, *rest = map(tf.stop_gradient, tensors)
        inputs, directions = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        *found, of_upstream = second(inputs, upstream, directions)

        def refused(*_: tf.Tensor) -> Any:
            raise HigherOrderError(
                f"{name} can be differentiated twice in reverse mode, or once in forward mode; "
                "for more, use the plain layer or formula"
            )

        return (of_upstream, *found), refused

    return gradient(upstream, *inputs, *directions)
