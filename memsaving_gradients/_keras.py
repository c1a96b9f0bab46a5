"""Every private Keras call, and every difference between versions of Keras, in one place.

Each comment says why there is no public way, or since which version there is one. Found in Keras
3.3 to 3.15; older versions have no ``keras.tree``.
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
    "check_backend",
    "check_version",
    "compiled_with",
    "export",
    "innermost",
    "layers_of",
    "learning_rate_of",
    "made_by",
    "own_variables",
    "random_generator",
    "set_random_generator",
    "set_trainable_alone",
    "unannounced_slots",
    "value_of",
    "variables_known_to",
    "zero_if_all_is_masked",
]

OLDEST = "3.3"


def check_backend(why: str) -> None:
    """Raise an `ArgumentError` unless Keras runs on TensorFlow; ``why``: the reason to need it."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ArgumentError(
            "keras.backend.backend()",
            backend,
            f"{why}; set the environment variable KERAS_BACKEND=tensorflow before keras is"
            " imported",
        )


def check_version(version: str) -> None:
    """Raise if Keras is older than the oldest supported version.

    Raises
    ------
    VersionError
        The error names the version that is needed.
    """
    if _numbers(version) < _numbers(OLDEST):
        raise VersionError("Keras", version, OLDEST)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


# Checked before the first use of anything that older versions do not have.
check_version(keras.__version__)
_backend = importlib.import_module("keras.src.backend")
_global_state = importlib.import_module("keras.src.backend.common.global_state")

#: The scope in which Keras casts variables while it calls layers. An optimizer has no other way to
#: see its own variables in another type.
AutocastScope: Any = _backend.AutocastScope
#: The class of the variables that Keras makes. Before 3.7, ``keras.Variable`` is derived from it.
Variable: Any = _backend.Variable
#: Optimizers of later versions (Muon since Keras 3.10, MultiOptimizer after 3.14). Where Keras has
#: none, an empty tuple of classes, of which nothing is an instance.
Muon: Any = getattr(keras.optimizers, "Muon", ())
MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())

#: Whether the method of `keras.layers.MultiHeadAttention` that computes attention has an argument
#: that asks for scores. Before 3.9, only ``call`` has it.
ASKS_FOR_SCORES = (
    "return_attention_scores"
    in inspect.signature(keras.layers.MultiHeadAttention._compute_attention).parameters
)

_GENERATOR = "global_seed_generator"


def applied_steps(optimizer: Any) -> Any:
    """Return the variable that counts how often ``optimizer`` was applied.

    Before 3.5, this is ``iterations``. Since then, ``iterations`` is divided by the number of steps
    over which gradients are accumulated, and the variable is private.
    """
    private = getattr(optimizer, "_iterations", None)
    return optimizer.iterations if private is None else private


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate as the optimizer holds it: a variable, a schedule or a function. The
    public property calls a schedule (3.3 to 3.15)."""
    return optimizer._learning_rate


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that updates variables: the one inside of those that scale losses."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def variables_known_to(optimizer: Any) -> list[Any]:
    """Return the variables that the innermost optimizer was built for. There is no public list (3.3
    to 3.15)."""
    return list(innermost(optimizer)._trainable_variables)


def layers_of(model: Any) -> list[Any]:
    """Return a model or layer and all layers inside, at any depth. ``layers`` has the outermost
    ones only (3.3 to 3.15)."""
    return list(model._flatten_layers())


def own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer without those of layers inside. The public lists have both
    (3.3 to 3.15)."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def set_trainable_alone(layer: Any, trainable: bool) -> None:
    """Set whether a layer is trained. The public property also sets layers inside (3.3 to 3.15)."""
    layer._trainable = trainable


def made_by(tensor: Any) -> Any:
    """Return the layer or operation that made a symbolic tensor (private from 3.3 to 3.15)."""
    return tensor._keras_history.operation


def compiled_with(model: Any) -> dict[str, Any]:
    """Return the arguments of ``compile`` as they were given. The public config has only those that
    can be serialized (3.3 to 3.15)."""
    return dict(model._compile_config.config)


def value_of(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable behind a variable of Keras. The public property may cast it
    (3.3 to 3.15)."""
    return variable._value


def unannounced_slots(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return ``(variable, slot)`` for slots that an optimizer makes without naming their variable
    (not with ``add_variable_from_reference``).

    These are the sums of squares of Adagrad and Ftrl until Keras 3.9. Only the optimizer's private
    lists show which slot belongs to which variable.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, (keras.optimizers.Adagrad, keras.optimizers.Ftrl)):
        return []
    slots = getattr(optimizer, "_accumulators", ())
    return list(zip(variables_known_to(optimizer), slots, strict=False))


def export(
    model: Any, filepath: Any, format: str, verbose: Any, input_signature: Any, **options: Any
) -> None:
    """Export a model for inputs of a signature, as ``keras.Model.export`` does since 3.8. Before,
    that takes no signature."""
    if "input_signature" in inspect.signature(keras.Model.export).parameters:
        keras.Model.export(model, filepath, format, verbose, input_signature, **options)
        return
    if format != "tf_saved_model" or options:
        asked = {"format": format, **options}
        raise ArgumentError(
            "export",
            asked,
            f"Keras {keras.__version__} exports only as 'tf_saved_model', without further options;"
            " use a newer Keras",
        )
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.__call__, input_signature)
    archive.write_out(str(filepath))


def random_generator() -> Any:
    """Return the generator that layers without a seed draw from, or ``None``. There is no public
    way to get it (3.3 to 3.15)."""
    return _global_state.get_global_attribute(_GENERATOR)


def set_random_generator(generator: Any) -> None:
    """Set the generator that `random_generator` returns."""
    _global_state.set_global_attribute(_GENERATOR, generator)


@cache
def zero_if_all_is_masked() -> bool:
    """Return whether Keras' softmax is zero where a mask leaves nothing, as since 3.14. Before, all
    its weights are equal there.

    Only a call of the layer shows this. The layer has a name, because an unnamed one would change
    the names of the user's layers.
    """
    softmax = keras.layers.Softmax(dtype="float32", name="all_masked")
    with tf.init_scope():
        weights = softmax(tf.zeros([1, 2]), mask=tf.zeros([1, 2], tf.bool))
    return not np.any(weights)
