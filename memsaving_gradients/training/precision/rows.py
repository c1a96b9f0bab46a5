"""Views of 16-bit variables, or of some of their rows, for optimizers that compute in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients._keras import value_of
from memsaving_gradients.training.precision.rounding import LOW

__all__ = ["Rows", "Wide", "stored_in"]


@dataclass(frozen=True)
class Rows:
    """Rows of a 16-bit variable; all rows, if ``places`` is ``None``."""

    stored: tf.Variable
    places: tuple[int, int] | None = None

    def of(self, tensor: Any) -> tf.Tensor:
        """Return these rows of a tensor or variable of the same shape."""
        if self.places is None:
            return tf.convert_to_tensor(tensor)
        first, last = self.places
        return tensor[first:last]

    def read(self) -> tf.Tensor:
        return self.of(self.stored)

    def write(self, value: tf.Tensor, into: tf.Variable | None = None) -> Any:
        into = self.stored if into is None else into
        if self.places is None:
            return into.assign(value, read_value=False)
        (first, last), handle = self.places, into.handle
        return tf.raw_ops.ResourceStridedSliceAssign(
            ref=handle, begin=[first], end=[last], strides=[1], value=value
        )


class Wide:
    """Rows of a 16-bit variable that an optimizer sees as a 32-bit variable."""

    dtype = "float32"

    def __init__(self, rows: Rows) -> None:
        self.rows, self.name = rows, rows.stored.name
        # Optimizers look slots up by this id.
        self._unique_id = rows.stored._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the rows."""
        shape, places = self.rows.stored.shape, self.rows.places
        return shape if places is None else tf.TensorShape([places[1] - places[0], *shape[1:]])

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.cast(self.rows.read(), dtype or tf.float32)


def stored_in(variable: Any) -> tf.Variable | None:
    """Return the TensorFlow variable behind ``variable``; ``None``, if it does not have 16 bits."""
    stored = variable if isinstance(variable, tf.Variable) else value_of(variable)
    return stored if stored.dtype in LOW else None
