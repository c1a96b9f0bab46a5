"""Penalties of sparse kernels: each counts once a step, however often its layer is called, like
Keras' penalties of variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from memsaving_gradients.training.sparsity.store import SparseStore

if TYPE_CHECKING:
    from keras.regularizers import Regularizer as _Regularizer
else:
    # Before Keras 3.15, regularizers of variables must have this class; since then, any function.
    _Regularizer = keras.regularizers.Regularizer

__all__ = ["Penalties"]

#: Regularizers that are sums over elements, to which zeros add nothing; others get the kernel.
SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Penalties(_Regularizer):
    """The regularizer of a store's values: the sum of the layers' regularizers, by number."""

    def __init__(self, store: SparseStore, regularizers: Mapping[int, Any]) -> None:
        self.store, self.regularizers = store, regularizers

    def __call__(self, values: Any) -> tf.Tensor:
        """Return the sum of the penalties."""
        parts = self.store.split(values)
        found = []
        for number, regularizer in self.regularizers.items():
            part = parts[number]
            of = part if type(regularizer) in SUMS else self.store.placed(part, number)
            found.append(tf.cast(regularizer(of), part.dtype))
        return tf.add_n(found)
