"""Copy the state of a model to the sparse model made from it: all except sparse kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from memsaving_gradients._keras import layers_of, own_variables, set_trainable_alone
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.choosing import is_graph_of_layers
from memsaving_gradients.training.sparsity.layers import SPARSE

__all__ = ["carry_over"]


def carry_over(model: Any, copy: Any) -> None:
    """Copy the state of a model to ``copy``, layer by layer, as by saving and loading, and freeze
    the same layers and variables."""
    for old, new in _pairs(model, copy):
        if type(new) in SPARSE.values():
            kept = [variable for variable in own_variables(old) if variable is not old._kernel]
            for variable, value in zip(own_variables(new), kept, strict=True):
                variable.assign(value)
        else:
            kept = own_variables(old)
            _load(old, new)
        for variable, value in zip(own_variables(new), kept, strict=True):
            variable.trainable = value.trainable
        set_trainable_alone(new, old.trainable)


def _pairs(model: Any, copy: Any) -> Iterator[tuple[Any, Any]]:
    """Yield layers and their copies, including layers inside of others."""
    yield model, copy
    for old, new in zip(model.layers, copy.layers, strict=True):
        if is_graph_of_layers(old):
            yield from _pairs(old, new)
            continue
        parts, others = layers_of(old), layers_of(new)
        if [*map(type, parts)] != [*map(type, others)] and type(new) not in SPARSE.values():
            raise ArgumentError(
                "model",
                old.name,
                "get_config and from_config of this layer make a layer with other layers inside,"
                " so its weights cannot be copied; they must make a layer like it",
            )
        yield from zip(parts, others, strict=True)


def _load(old: Any, new: Any) -> None:
    """Copy the state of a layer as Keras does with a file: some layers compute values from loaded
    ones, or keep state outside of variables."""
    found, there = len(own_variables(new)), len(own_variables(old))
    if found != there:
        raise ArgumentError(
            "model",
            old.name,
            f"get_config and from_config of this layer make a layer with {found} variables instead"
            f" of {there}; they must make a layer like it",
        )
    state: dict[str, Any] = {}
    old.save_own_variables(state)
    new.load_own_variables(state)
    if hasattr(old, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)
