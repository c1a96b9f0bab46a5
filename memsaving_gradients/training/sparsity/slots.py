"""An optimizer's slots for sparse weights."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients._keras import innermost, unannounced_slots

__all__ = ["first_values", "optimizers_of", "slots_of"]


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model: the one that it was compiled with, and others that are its
    attributes."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [one for one in found if isinstance(one, keras.optimizers.Optimizer)]
    return list({id(one): one for one in found}.values())


def slots_of(optimizer: Any, weight: Any) -> list[Any]:
    """Return the variables that an optimizer has made for ``weight`` in the same shape."""
    begins = weight.path.replace("/", "_")
    others = [slot for of, slot in unannounced_slots(optimizer) if of is weight]
    return [
        slot
        for slot in optimizer.variables
        if slot.shape == weight.shape
        and tf.as_dtype(slot.dtype).is_floating
        and (slot.name.startswith(begins) or any(slot is other for other in others))
    ]


def first_values(optimizer: Any, weight: Any) -> list[float]:
    """Return the initial value of each slot of a weight: zero for most, but Adagrad and Ftrl would
    divide by it.

    The values are read from an optimizer like this one, for a weight of one element.
    """
    count = len(slots_of(optimizer, weight))
    optimizer = innermost(optimizer)
    one = keras.Variable(np.zeros(1), dtype=weight.dtype, name=weight.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A schedule may be a function, or of a class that Keras does not know: any rate will
            # do.
            config = optimizer.get_config()
        like = type(optimizer).from_config({**config, "learning_rate": 0.1})
        like.build([one])
        found = [float(slot.numpy()[0]) for slot in slots_of(like, one)]
    except Exception as error:
        found, why = [], str(error)
    else:
        why = f"it has {len(found)} slots"
    if len(found) != count:
        warn(
            f"Reparameterize: no optimizer like {optimizer.name!r} can be made from its"
            f" get_config() to read the initial values of slots ({why}); those of new weights"
            " begin at zero",
            UserWarning,
        )
        return [0.0] * count
    return found
