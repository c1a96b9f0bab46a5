"""Unscaling and clipping of gradients as in Keras, but in 32 bits, for optimizers of 16-bit
variables.

In ``float16`` a square above 65504 is infinite, and so is the norm that gradients are divided by;
in ``bfloat16``, 256 + 1 is 256. Norms are summed over some rows of one gradient at a time, and give
one factor. Each gradient is multiplied by the factor only when its weights are updated: no gradient
has 32 bits for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memsaving_gradients.training.precision.runs import runs_of

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping:
    """The unscaling and clipping of gradients before they are used.

    Attributes
    ----------
    scale
        The factor that the loss was multiplied by.
    norm, value
        The limits of a gradient's norm, and of the absolute value of its elements.
    factor
        The factor that gradients are multiplied by to limit a norm: of all gradients, or of one.
    """

    scale: float | None = None
    norm: float | None = None
    value: float | None = None
    factor: tf.Tensor | None = None

    def together(self, gradients: Iterable[Any], most: float) -> Clipping:
        """Return a clipping of the norm of all gradients to ``most``; not finite if one is not."""
        total = tf.constant(0.0)
        for gradient in gradients:
            if gradient is not None:
                total = self._squares(gradient, total)
        norm = tf.sqrt(total)
        factor = most * tf.minimum(1 / norm, 1 / most) + (norm - norm)
        return replace(self, factor=factor)

    def alone(self, gradient: Any) -> Clipping:
        """Return a clipping of the norm of this gradient to `norm`."""
        if self.norm is None:
            return self
        norm = tf.sqrt(self._squares(gradient, tf.constant(0.0)))
        return replace(self, factor=self.norm / tf.maximum(norm, self.norm))

    def rows(self, gradient: Any, places: tuple[int, int] | None, count: int) -> tf.Tensor:
        """Return some of ``count`` rows of a gradient, or all, clipped and in 32 bits. Rows that
        occur several times are added up in 32 bits, too."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self.wide(gradient if places is None else gradient[places[0] : places[1]])
        first, last = places or (0, count)
        at = gradient.indices
        # Rows with negative numbers are ignored.
        at = tf.where((at >= first) & (at < last), at - first, -1)
        summed = tf.math.unsorted_segment_sum(
            tf.cast(gradient.values, tf.float32), at, last - first
        )
        return self.wide(summed)

    def whole(self, gradient: Any) -> Any:
        """Return the clipped gradient of a variable that does not have 16 bits."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self.wide(gradient)
        if self.value is not None:
            return self.wide(tf.convert_to_tensor(gradient))
        return tf.IndexedSlices(self.wide(gradient.values), gradient.indices, gradient.dense_shape)

    def wide(self, values: tf.Tensor) -> tf.Tensor:
        """Return a gradient unscaled and clipped, in 32 bits or more."""
        values = self._unscaled(values)
        if self.factor is not None:
            values *= tf.cast(self.factor, values.dtype)
        return values if self.value is None else tf.clip_by_value(values, -self.value, self.value)

    def _unscaled(self, values: tf.Tensor) -> tf.Tensor:
        if values.dtype.size < tf.float32.size:
            values = tf.cast(values, tf.float32)
        return values if self.scale is None else values / self.scale

    def _squares(self, gradient: Any, total: tf.Tensor) -> tf.Tensor:
        # As in Keras and TensorFlow, rows that occur several times count one by one.
        sparse = isinstance(gradient, tf.IndexedSlices)
        for values in _pieces(gradient.values if sparse else tf.convert_to_tensor(gradient)):
            with tf.control_dependencies([total]):
                square = tf.reduce_sum(tf.square(self._unscaled(values)))
                total += tf.cast(square, tf.float32)
        return total


def _pieces(values: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yield a tensor, some rows at a time if it is large and its shape is known."""
    runs = runs_of(values.shape)
    if not runs:
        yield values
    for first, last in runs:
        yield values[first:last]
