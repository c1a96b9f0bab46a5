"""A copy of a model with another policy, compiled like it, that leaves all else as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from memsaving_gradients._keras import random_generator, set_random_generator
from memsaving_gradients.errors import ArgumentError

__all__ = ["POLICY", "in_lower_precision"]

POLICY = "mixed_bfloat16"


def in_lower_precision(model: Any) -> Any:
    """The model with its weights, and with `POLICY` in the place of ``float32``; what it returns
    stays ``float32``. Compiled like it.

    Layers that were given a policy of their own keep it.

    Raises
    ------
    ArgumentError
        If it cannot be copied so that it trains as before.
    """
    _check_copyable(model)
    try:
        with _random_numbers_kept():
            return _copied(model)
    except Exception as error:
        # Whatever layers, or objects that a model was compiled with, do when they are recomputed.
        raise _cannot(
            f"{model.name!r} cannot be copied ({type(error).__name__}: {error})"
        ) from error


def _cannot(why: str) -> ArgumentError:
    return ArgumentError(
        "may",
        ["precision"],
        f"{why}; leave 'precision' out, or make the model with"
        f" keras.config.set_dtype_policy({POLICY!r})",
    )


def _check_copyable(model: Any) -> None:
    """Raise if a copy would not have what the model's class, or it alone, does otherwise."""
    own = not type(model).__module__.startswith("keras.")
    if own or not hasattr(model, "outputs"):
        raise _cannot(
            f"{model.name!r} is a {type(model).__name__}, and copies can be made of functional and"
            " sequential models alone"
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
    pairs = list(zip(model._flatten_layers(), made._flatten_layers(), strict=True))
    for old, new in pairs:
        # From the outside in: a model sets that of its layers.
        new.trainable = old.trainable
    made.set_weights(model.get_weights())
    for _, new in pairs:
        # What was adapted to data is used in another form.
        if hasattr(new, "finalize_state"):
            new.finalize_state()
    _compile(made, model)
    return made


@contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
    """Let Keras not compile copies from what can be serialized of how models were compiled."""
    models = [one for one in model._flatten_layers() if getattr(one, "compiled", False)]
    for one in models:
        one.compiled = False
    try:
        yield
    finally:
        for one in models:
            one.compiled = True


def _ends(model: Any) -> Iterator[int]:
    """The layers that make the outputs, also of models inside."""
    for tensor in model.outputs:
        layer = tensor._keras_history.operation
        yield id(layer)
        if getattr(layer, "outputs", None) and isinstance(layer, keras.Model):
            yield from _ends(layer)


def _compile(made: Any, model: Any) -> None:
    """As ``model`` was, with the same functions, and an optimizer and metrics of its own."""
    old = model.optimizer
    # The objects themselves; a configuration has only what can be serialized.
    given = dict(model._compile_config.config)
    for name in ("metrics", "weighted_metrics"):
        given[name] = keras.tree.map_structure(_made_again, given.get(name))
    optimizer = type(old).from_config(old.get_config())
    made.compile(**{**given, "optimizer": optimizer})
    # The optimizer may know variables that were frozen since.
    place = {id(v): k for k, v in enumerate(model.variables)}
    variables = made.variables
    optimizer.build([variables[place[id(v)]] for v in _known_to(old)])
    for new, value in zip(optimizer.variables, old.variables, strict=True):
        new.assign(value)


def _known_to(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(optimizer._trainable_variables) if inner is None else _known_to(inner)


def _made_again(metric: Any) -> Any:
    if not isinstance(metric, keras.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Layers that are made draw seeds, for weights that are not used: afterwards, the generators
    are where they were."""
    drawn, generator = random.getstate(), random_generator()
    before = None if generator is None else keras.ops.copy(generator.state.value)
    try:
        yield
    finally:
        random.setstate(drawn)
        set_random_generator(generator)
        if generator is not None:
            generator.state.assign(before)
