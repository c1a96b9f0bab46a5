"""What sparse weights take, as they are held."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.keras_models import bytes_of
from memsaving_gradients.training.sparsity.model import sparse_model_in
from memsaving_gradients.training.sparsity.slots import slots_of

__all__ = ["HeldBytes", "sparse_bytes"]


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of variables.

    Attributes
    ----------
    values, bits, slots
        Of sparse weights: they themselves, where they are, and the optimizer's for them.
    rest
        Of everything else, with its slots.
    dense
        What weights and slots of the same model would take if no kernel were sparse.
    """

    values: int
    bits: int
    slots: int
    rest: int
    dense: int

    @property
    def share(self) -> float:
        """All of it, as a share of what dense weights and slots would take."""
        return (self.values + self.bits + self.slots + self.rest) / self.dense


def sparse_bytes(model: Any, optimizer: Any = None) -> HeldBytes:
    """The bytes that a sparse model's variables take, and an optimizer's.

    Parameters
    ----------
    model
        Made by `sparsify`, or with such a one as a part.
    optimizer
        Of the model, built; ``None``: the one that it was compiled with, if it was, with the slots
        that it has by now.

    Raises
    ------
    ArgumentError
        If the model is not sparse, or the optimizer is none of Keras, or not built.
    """
    store = sparse_model_in(model).store
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    elif not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
        raise ArgumentError(
            "optimizer",
            getattr(optimizer, "name", optimizer),
            "give one of Keras, with slots: optimizer.build(model.trainable_variables)",
        )
    values, bits = bytes_of([store.values]), bytes_of([*store.bits, store.counts])
    slots = bytes_of(slots_of(optimizer, store.values)) if optimizer is not None else 0
    whole = bytes_of(model.variables) + (
        bytes_of(optimizer.variables) if optimizer is not None else 0
    )
    rest = whole - values - bits - slots
    places = sum(math.prod(shape) for shape in store.shapes)
    dense = rest + places * (values + slots) // store.total
    return HeldBytes(values, bits, slots, rest, dense)
