"""Penalties of sparse kernels: each counted once a step, however often a layer is called, as Keras counts those of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from memsaving_gradients.sparsity.store import SparseStore

__all__ = ["penalty_of"]

#: Sums over elements, to which zeros add nothing; others are given the kernel.
SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def penalty_of(store: SparseStore, regularizers: Mapping[int, Any]) -> Callable[[Any], tf.Tensor]:
    """The regularizer of the values: those of layers, by number, together."""

    def penalty(values: Any) -> tf.Tensor:
        parts = store.split(values)
        found = []
        for number, regularizer in regularizers.items():
            part = parts[number]
            of = part if type(regularizer) in SUMS else store.placed(part, number)
            found.append(tf.cast(regularizer(of), part.dtype))
        return tf.add_n(found)

    return penalty
