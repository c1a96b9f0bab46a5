"""The weights of all sparse layers: one variable of values, and a bit for each place.

With one variable, slots are as small as the weights, and layers can get more weights or fewer
during training; their total stays the same, and so do all shapes. One split gives the parts of all
layers, and its gradient is one concatenation. A slice for each layer would give as many gradients
of the whole size, padded with zeros. Bits are the smallest code of places from 6 % to 94 %
sparsity. Beyond, 16-bit distances are smaller, but bits are only 1/32 of the dense weights.

A layer's kernel is computed from its part on demand, by counting bits: a few elementwise ops, which
a planner may repeat instead of keeping the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.tf_private import autodiff
from memsaving_gradients.errors import ArgumentError

__all__ = ["SparseStore"]


@keras.saving.register_keras_serializable(package="memsaving_gradients")
class SparseStore(keras.layers.Layer):
    """The values and places of the weights of all sparse layers.

    Parameters
    ----------
    shapes
        The shapes of the layers' kernels.
    total
        The number of weights.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], total: int, **options: Any) -> None:
        super().__init__(**options)
        self.shapes = [tuple(shape) for shape in shapes]
        self.total = total
        # Sizes of parts change, which XLA cannot compile.
        self.supports_jit = False
        self.values = self.add_weight([total], "zeros", name="values")
        state = {"trainable": False, "autocast": False}
        self.counts = self.add_weight([len(shapes)], "zeros", "int32", name="counts", **state)
        self.bits = [
            self.add_weight(
                [-(-math.prod(shape) // 8)], "zeros", "uint8", name=f"bits_{k}", **state
            )
            for k, shape in enumerate(self.shapes)
        ]
        for bits in self.bits:
            # TensorFlow's checkpoints see attributes, but no lists of Keras' variables.
            setattr(self, bits.name, bits)
        self._open: list[list[tf.Tensor]] = []
        self._failed: Exception | None = None
        self.built = True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Split the values once, for all layers that are called inside."""
        self._open.append(self.split(self.values))
        try:
            yield
        finally:
            self._open.pop()

    @property
    def is_open(self) -> bool:
        """Whether the model is being called."""
        return bool(self._open)

    def split(self, values: Any) -> list[tf.Tensor]:
        """Return the weights of each layer."""
        if autodiff.compiled_by_xla():
            raise ArgumentError(
                "jit_compile",
                True,
                "sparse weights move between layers, and XLA would have to know how many each"
                " layer has; compile the model with jit_compile=False",
            )
        values = _of_known_shape(tf.convert_to_tensor(values))
        parts: list[tf.Tensor] = tf.split(values, self.counts.value, num=len(self.shapes))
        return parts

    def kernel(self, number: int, dtype: str) -> tf.Tensor:
        """Return the dense kernel of a layer."""
        part = (self._open[-1] if self._open else self.split(self.values))[number]
        return self.placed(tf.cast(part, dtype), number)

    def placed(self, part: tf.Tensor, number: int) -> tf.Tensor:
        """Return a layer's weights at their places, with zeros elsewhere."""
        shape, bits = self.shapes[number], self.bits[number].value
        return tf.reshape(_dense(part, bits, math.prod(shape)), shape)

    def masks(self) -> list[npt.NDArray[Any]]:
        """Return, for each layer, whether each place has a weight."""
        return [
            np.unpackbits(bits.numpy(), count=math.prod(shape), bitorder="little").astype(bool)
            for bits, shape in zip(self.bits, self.shapes, strict=True)
        ]

    def set_masks(self, masks: Sequence[npt.NDArray[Any]]) -> None:
        """Set which places have a weight; values are in the order of layers and places."""
        for bits, mask in zip(self.bits, masks, strict=True):
            bits.assign(np.packbits(mask, bitorder="little"))
        self.counts.assign([int(mask.sum()) for mask in masks])

    def load_own_variables(self, store: Any) -> None:
        """Load values and places; raise if the number of weights differs."""
        if self._failed is not None and not len(store.keys()):
            # Keras tries a failed load once more, by a path that the file does not have, and would
            # report the second error.
            raise self._failed
        try:
            found = tuple(store["0"].shape) if "0" in store.keys() else None  # noqa: SIM118
            if found is not None and found != (self.total,):
                raise ArgumentError(
                    "total",
                    self.total,
                    f"is the number of this model's sparse weights, but the file has {found[0]};"
                    " make the model with the sparsity and the sparse layers of the saved one",
                )
            super().load_own_variables(store)
        except ValueError as error:
            self._failed = error
            raise


@tf.custom_gradient
def _of_known_shape(values: tf.Tensor) -> Any:
    """Return ``values`` with a gradient of their shape. Parts of unknown size have no static
    shape."""
    return tf.identity(values), lambda above: tf.ensure_shape(above, values.shape)


def _unpacked(packed: tf.Tensor, count: int) -> tf.Tensor:
    """Return the first ``count`` bits as booleans."""
    shifts = tf.range(8, dtype=tf.int32)
    bits = tf.bitwise.right_shift(tf.cast(packed, tf.int32)[:, None], shifts)
    return tf.reshape(tf.bitwise.bitwise_and(bits, 1) > 0, [-1])[:count]


def _dense(part: tf.Tensor, bits: tf.Variable, count: int) -> tf.Tensor:
    """Return weights at their places, with zeros elsewhere. The gradient is read at these places;
    TensorFlow's own gradient would add up rows."""

    @tf.custom_gradient
    def placed(part: tf.Tensor) -> Any:
        mask = _unpacked(tf.convert_to_tensor(bits), count)
        number = tf.cumsum(tf.cast(mask, tf.int32)) - 1
        found = tf.gather(part, tf.maximum(number, 0))

        def gradient(above: tf.Tensor) -> tf.Tensor:
            # This edge keeps the places packed until the gradient is there. Without it, they would
            # be unpacked at once.
            with tf.control_dependencies([above]):
                return tf.boolean_mask(above, _unpacked(tf.convert_to_tensor(bits), count))

        return tf.where(mask, found, tf.zeros([], part.dtype)), gradient

    return placed(part)
