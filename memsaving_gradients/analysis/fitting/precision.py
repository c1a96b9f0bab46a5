"""A copy of a model with another policy, compiled like the model, which itself stays unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from memsaving_gradients._keras import (
    compiled_with,
    layers_of,
    made_by,
    random_generator,
    set_random_generator,
    variables_known_to,
)
from memsaving_gradients.errors import ArgumentError

__all__ = ["POLICY", "in_lower_precision"]

POLICY = "mixed_bfloat16"


def in_lower_precision(model: Any) -> Any:
    """Return a copy of ``model``, with its weights and compiled like it, in which layers have
    `POLICY` in the place of ``float32``.

    Outputs stay ``float32``, as do the layers that compute them. Other policies stay, too.

    Raises
    ------
    ArgumentError
        If the model cannot be copied so that the copy trains like it.
    """
    _check_copyable(model)
    try:
        with _random_numbers_kept():
            return _copied(model)
    except Exception as error:
        # Copying runs code of layers, optimizers and metrics, which may raise any error.
        raise _cannot(
            f"{model.name!r} cannot be copied ({type(error).__name__}: {error})"
        ) from error


def _cannot(why: str) -> ArgumentError:
    return ArgumentError(
        "may",
        ["precision"],
        f"{why}; leave 'precision' out, or call keras.config.set_dtype_policy({POLICY!r}) before"
        " you create the model",
    )


def _check_copyable(model: Any) -> None:
    """Raise if a copy would lose methods that the model's class, or the model itself, overrides."""
    own = not type(model).__module__.startswith("keras.")
    if own or not hasattr(model, "outputs"):
        raise _cannot(
            f"{model.name!r} is a {type(model).__name__}, and only functional and sequential"
            " models can be copied"
        )
    for name in ("train_step", "compute_loss", "call"):
        if name in vars(model):
            raise _cannot(f"{model.name!r} has a {name} of its own, which a copy would not have")


def _copied(model: Any) -> Any:
    ends = set(_ends(model))

    def clone(layer: Any) -> Any:
        config = layer.get_config()
        if layer.dtype_policy.name == "float32" and id(layer) not in ends:
            config["dtype"] = POLICY
        return type(layer).from_config(config)

    with _uncompiled(model):
        made = keras.models.clone_model(model, clone_function=clone, recursive=True)
    pairs = list(zip(layers_of(model), layers_of(made), strict=True))
    for old, new in pairs:
        # Outer models first: setting `trainable` on a model sets it on all of its layers.
        new.trainable = old.trainable
    made.set_weights(model.get_weights())
    for _, new in pairs:
        # Layers adapted to data, such as `Normalization`, derive constants from their weights.
        if hasattr(new, "finalize_state"):
            new.finalize_state()
    _compile(made, model)
    return made


@contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
    """Keep Keras from compiling copies by itself, from serialized arguments of ``compile``."""
    models = [one for one in layers_of(model) if getattr(one, "compiled", False)]
    for one in models:
        one.compiled = False
    try:
        yield
    finally:
        for one in models:
            one.compiled = True


def _ends(model: Any) -> Iterator[int]:
    """Yield the ids of the layers that compute the outputs, nested models' layers included."""
    for tensor in model.outputs:
        layer = made_by(tensor)
        yield id(layer)
        if getattr(layer, "outputs", None) and isinstance(layer, keras.Model):
            yield from _ends(layer)


def _compile(made: Any, model: Any) -> None:
    """Compile ``made`` like ``model``: the same functions, but its own optimizer and metrics."""
    old = model.optimizer
    # These are the objects given to `compile`; a configuration has only serializable ones.
    given = compiled_with(model)
    for name in ("metrics", "weighted_metrics"):
        given[name] = keras.tree.map_structure(_made_again, given.get(name))
    optimizer = type(old).from_config(old.get_config())
    made.compile(**{**given, "optimizer": optimizer})
    # The optimizer may have been built for variables that are frozen now.
    place = {id(v): k for k, v in enumerate(model.variables)}
    variables = made.variables
    optimizer.build([variables[place[id(v)]] for v in variables_known_to(old)])
    for new, value in zip(optimizer.variables, old.variables, strict=True):
        new.assign(value)


def _made_again(metric: Any) -> Any:
    if not isinstance(metric, keras.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the states of random generators on exit. New layers draw seeds for initial weights,
    which the copied weights replace."""
    drawn, generator = random.getstate(), random_generator()
    before = None if generator is None else keras.ops.copy(generator.state.value)
    try:
        yield
    finally:
        random.setstate(drawn)
        set_random_generator(generator)
        if generator is not None:
            generator.state.assign(before)
