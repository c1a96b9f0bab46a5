"""Every private Keras call, and all that differs between the versions of Keras, in one place.

Each comment says why there is no public way, or since when there is. Seen in Keras 3.3 to 3.15;
older ones have no ``keras.tree``.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from memsaving_gradients.errors import ArgumentError, VersionError

__all__ = [
    "ASKS_FOR_SCORES",
    "AutocastScope",
    "MultiOptimizer",
    "Muon",
    "Variable",
    "applied_steps",
    "check_version",
    "export",
    "random_generator",
    "set_random_generator",
    "unannounced_slots",
    "zero_if_all_is_masked",
]

OLDEST = "3.3"


def check_version(version: str) -> None:
    """Raise if Keras is of a version that is not supported.

    Raises
    ------
    VersionError
        It says which one is needed.
    """
    if _numbers(version) < _numbers(OLDEST):
        raise VersionError("Keras", version, OLDEST)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


# Before what older ones do not have is asked for.
check_version(keras.__version__)
_backend = importlib.import_module("keras.src.backend")
_global_state = importlib.import_module("keras.src.backend.common.global_state")

#: By which Keras casts variables while layers are called; an optimizer has no other way to see its
#: own in another type.
AutocastScope: Any = _backend.AutocastScope
#: What variables are that Keras makes; ``keras.Variable`` is a class derived from it before 3.7.
Variable: Any = _backend.Variable
#: Optimizers that came later (Muon with Keras 3.10, MultiOptimizer after 3.14); where they are not
#: there, of no class, which nothing is an instance of.
Muon: Any = getattr(keras.optimizers, "Muon", ())
MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())

#: Whether `keras.layers.MultiHeadAttention` says, where it computes attention, that scores are to
#: be returned. Before 3.9, only ``call`` knows.
ASKS_FOR_SCORES = (
    "return_attention_scores"
    in inspect.signature(keras.layers.MultiHeadAttention._compute_attention).parameters
)

_GENERATOR = "global_seed_generator"


def applied_steps(optimizer: Any) -> Any:
    """The variable that counts how often ``optimizer`` was applied.

    That was ``iterations``. Since 3.5 these are divided by the steps that gradients are accumulated
    over, and the variable is private.
    """
    private = getattr(optimizer, "_iterations", None)
    return optimizer.iterations if private is None else private


def unannounced_slots(optimizer: Any) -> list[tuple[Any, Any]]:
    """``(variable, slot)`` for slots that an optimizer makes without saying for which variable: not
    with ``add_variable_from_reference``.

    Sums of squares of Adagrad and Ftrl until Keras 3.9; only the optimizer's private lists tell
    which is whose.
    """
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, (keras.optimizers.Adagrad, keras.optimizers.Ftrl)):
        return []
    slots = getattr(optimizer, "_accumulators", ())
    return list(zip(optimizer._trainable_variables, slots, strict=False))


def export(
    model: Any, filepath: Any, format: str, verbose: Any, input_signature: Any, **options: Any
) -> None:
    """Export a model for inputs of a signature, as ``keras.Model.export`` does; before 3.8 it does
    not take one."""
    if "input_signature" in inspect.signature(keras.Model.export).parameters:
        keras.Model.export(model, filepath, format, verbose, input_signature, **options)
        return
    if format != "tf_saved_model" or options:
        asked = {"format": format, **options}
        raise ArgumentError(
            "export",
            asked,
            f"Keras {keras.__version__} exports as 'tf_saved_model' alone, without further options;"
            " take a newer Keras",
        )
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.__call__, input_signature)
    archive.write_out(str(filepath))


def random_generator() -> Any:
    """The generator that layers without a seed draw from, or ``None``; there is no public way to it
    (3.3 to 3.15)."""
    return _global_state.get_global_attribute(_GENERATOR)


def set_random_generator(generator: Any) -> None:
    """Put `random_generator` back."""
    _global_state.set_global_attribute(_GENERATOR, generator)


@cache
def zero_if_all_is_masked() -> bool:
    """Whether Keras' softmax is zero where a mask leaves nothing, as it is since 3.14, or the same
    for all.

    Looked up at the layer, which says nothing of it; with a name, as one without would change those
    of the user's layers.
    """
    softmax = keras.layers.Softmax(dtype="float32", name="all_masked")
    with tf.init_scope():
        weights = softmax(tf.zeros([1, 2]), mask=tf.zeros([1, 2], tf.bool))
    return not np.any(weights)
