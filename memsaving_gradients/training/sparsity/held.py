"""Bytes of a sparse model's variables and their slots."""

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
    """The bytes of a sparse model's variables and their slots.

    Attributes
    ----------
    values, bits, slots
        Bytes of the sparse weights, of the bits that mark their places, and of their slots.
    rest
        Bytes of all other variables, with their slots.
    dense
        Bytes of weights and slots of the same model if no kernel were sparse.
    """

    values: int
    bits: int
    slots: int
    rest: int
    dense: int

    @property
    def share(self) -> float:
        """All bytes, as a share of the bytes of dense weights and slots."""
        return (self.values + self.bits + self.slots + self.rest) / self.dense


def sparse_bytes(model: Any, optimizer: Any = None) -> HeldBytes:
    """Return the bytes of a sparse model's variables and of an optimizer's.

    Parameters
    ----------
    model
        A model made by `sparsify`, or with one of them as a part.
    optimizer
        An optimizer of the model, built; ``None``: the one that the model was compiled with, if
        any, with the slots that it has so far.

    Raises
    ------
    ArgumentError
        If the model is not sparse, or the optimizer is not one of Keras, or not built.
    """
    store = sparse_model_in(model).store
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    elif not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
        raise ArgumentError(
            "optimizer",
            getattr(optimizer, "name", optimizer),
            "give a Keras optimizer with slots: optimizer.build(model.trainable_variables)",
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
