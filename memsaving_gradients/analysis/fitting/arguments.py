"""Checks of the arguments of `fit_to`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.analysis.fitting.variants import MAY
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.keras_models import check_has_graph, unbuilt_layers

__all__ = ["checked_batch", "checked_may", "checked_model"]


def checked_may(may: Any) -> tuple[str, ...]:
    """Return the allowed changes, the least harmful first."""
    names = list(may) if isinstance(may, Iterable) and not isinstance(may, str) else [may]
    unknown = [one for one in names if one not in MAY]
    if unknown or isinstance(may, str):
        raise ArgumentError(
            "may",
            unknown[0] if unknown else may,
            f"give a list of any of {', '.join(map(repr, MAY))}; an empty list allows no changes",
        )
    return tuple(one for one in MAY if one in names)


def checked_model(model: Any) -> None:
    """Raise if a model is not compiled and built, or runs eagerly."""
    if not getattr(model, "built", False) or getattr(model, "optimizer", None) is None:
        raise ArgumentError(
            "model",
            model,
            "is not a compiled and built Keras model; call compile, and call the model on a batch",
        )
    if unbuilt := unbuilt_layers(model):
        # An optimizer built now would not know the variables of these layers.
        raise ArgumentError(
            "model",
            model.name,
            f"layer {unbuilt[0].name!r} is not built; call the model on a batch",
        )
    check_has_graph(model)


def checked_batch(batch: Sequence[Any]) -> tuple[list[Any], int]:
    """Return the specs of a batch, and its number of examples."""
    leaves = tf.nest.flatten(list(batch))
    for given in batch:
        if isinstance(given, tf.data.Dataset):
            spec = given.element_spec
            raise ArgumentError(
                "batch",
                spec,
                "is the element_spec of a dataset, not a batch; give tensor specs like these, one"
                " after the other, with the batch size in all shapes",
            )
    # None is allowed, for example for no sample weights; it needs no shape.
    odd = next((leaf for leaf in leaves if not _is_array(leaf) and leaf is not None), None)
    if odd is not None:
        raise ArgumentError(
            "batch", odd, "give arrays, tensors or tf.TensorSpec, not numbers or lists of numbers"
        )
    specs = [leaf for leaf in leaves if leaf is not None]
    shapes = ", ".join(str(leaf.shape) for leaf in specs)
    rows = {leaf.shape[0] if len(leaf.shape) else None for leaf in specs if _has_rank(leaf)}
    known = all(_has_rank(leaf) and None not in tuple(leaf.shape) for leaf in specs)
    if not known or len(rows) != 1 or None in rows:
        raise ArgumentError(
            "batch",
            shapes,
            "give the parts of a whole batch as in fit, with its size in all shapes",
        )
    (examples,) = rows
    if not examples:
        raise ArgumentError("batch", shapes, "has no examples; give a batch of one or more")
    return [tf.nest.map_structure(_spec, given) for given in batch], int(examples)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _has_rank(leaf: Any) -> bool:
    return tf.TensorShape(leaf.shape).rank is not None


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype))
