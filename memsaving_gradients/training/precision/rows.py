"""Variables of 16 bits, or some rows of them, as an optimizer that computes in 32 is to see
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.training.precision.rounding import LOW

__all__ = ["Rows", "Wide", "stored_in"]


@dataclass(frozen=True)
class Rows:
    """Rows of a variable of 16 bits; all, if there are no ``places``."""

    stored: tf.Variable
    places: tuple[int, int] | None = None

    def of(self, tensor: Any) -> tf.Tensor:
        """These rows of a tensor, or a variable, that is like the variable."""
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
    """Rows of a variable of 16 bits that look like a variable of 32."""

    dtype = "float32"

    def __init__(self, rows: Rows) -> None:
        self.rows, self.name = rows, rows.stored.name
        # By which optimizers know their slots.
        self._unique_id = rows.stored._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        """Of the rows."""
        shape, places = self.rows.stored.shape, self.rows.places
        return shape if places is None else tf.TensorShape([places[1] - places[0], *shape[1:]])

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.cast(self.rows.read(), dtype or tf.float32)


def stored_in(variable: Any) -> tf.Variable | None:
    """The variable of 16 bits behind ``variable``; ``None``: it is not one."""
    stored = variable if isinstance(variable, tf.Variable) else variable._value
    return stored if stored.dtype in LOW else None
