"""Optimizers of another class with the same settings, and an error that names lost settings.

Keras copies an optimizer by its config. `made_again` compares the attributes of the two optimizers
to find settings that are not in the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from memsaving_gradients._keras import Variable, learning_rate_of
from memsaving_gradients.errors import ArgumentError

__all__ = ["made_again"]

#: Errors where a class and its config do not fit together.
_FAILURES = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError)
#: Attributes that ``exclude_from_weight_decay`` sets, by keys and by names of variables.
_EXCLUSIONS = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def made_again(optimizer: Any, kind: Any, **more: Any) -> Any:
    """Return an optimizer of class ``kind``, with the settings of ``optimizer`` and ``more``.

    Raises
    ------
    ArgumentError
        If the config of ``optimizer`` does not have all of its settings.
    """
    _check_learning_rate(learning_rate_of(optimizer))
    try:
        made = kind.from_config({**optimizer.get_config(), **more})
    except _FAILURES as error:
        raise ArgumentError(
            "optimizer",
            optimizer.name,
            f"cannot be recreated from its config ({error}): give {type(optimizer).__name__} a"
            " get_config() with all arguments of its __init__()",
        ) from error
    # Attributes that all optimizers have are in the config, or belong to Keras.
    shared = vars(keras.optimizers.Optimizer(learning_rate=0.0)).keys() | {*_EXCLUSIONS}
    shared |= {"_exclude_from_weight_decay_cache"}
    for name, value in vars(optimizer).items():
        known = name in shared or name.startswith("_self_")
        if not known and not _same(value, vars(made).get(name, made)):
            raise ArgumentError(
                name,
                value,
                "would be lost: this attribute of the optimizer is not in its config; add it to"
                f" the get_config() of {type(optimizer).__name__}, and to the arguments of its"
                " __init__()",
            )
    for name in _EXCLUSIONS:
        if hasattr(optimizer, name):
            setattr(made, name, getattr(optimizer, name))
    made.iterations.assign(optimizer.iterations)
    return made


def _check_learning_rate(rate: Any) -> None:
    if not callable(rate) or isinstance(rate, Variable):
        return
    if not _is_kept(rate):
        raise ArgumentError(
            "learning_rate",
            rate,
            "cannot be put into the config of an optimizer; give a number, or a"
            " keras.optimizers.schedules.LearningRateSchedule whose class has get_config() and is"
            " decorated by keras.saving.register_keras_serializable()",
        )


def _is_kept(rate: Any) -> bool:
    # Keras would save the code of a lambda, and refuse to load it.
    if getattr(rate, "__name__", "") == "<lambda>":
        return False
    try:
        kept = keras.saving.serialize_keras_object(rate)
        return _same(rate, keras.saving.deserialize_keras_object(kept))
    except _FAILURES:
        return False


def _same(one: Any, other: Any) -> bool:
    """Return whether two values that were made in the same way are equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (Variable, np.ndarray, tf.Variable, tf.Tensor)):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "get_config"):
        return _same(one.get_config(), other.get_config())
    if hasattr(one, "__code__"):
        return bool(one.__code__ is other.__code__)
    if getattr(type(one), "__eq__", None) is object.__eq__:
        return _same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    return bool(one == other)
