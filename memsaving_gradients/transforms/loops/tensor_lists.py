"""Tensor lists that keep a loop's values for its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

__all__ = ["empty_list", "pushed", "static_shape", "untyped"]


def empty_list(tensor: tf.Tensor, most: int | None, name: str) -> tf.Tensor:
    """Return an empty list for at most ``most`` values like ``tensor`` (``None``: unknown)."""
    return tf.raw_ops.EmptyTensorList(
        element_shape=static_shape(tensor),
        max_num_elements=-1 if most is None else most,
        element_dtype=tensor.dtype,
        name=name,
    )


def untyped(lists: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return ``lists`` without the element types that the graph knows for them: their elements now
    have other types."""
    return tf.raw_ops.IdentityN(input=list(lists)) if lists else []


def static_shape(tensor: tf.Tensor) -> tf.Tensor:
    """Return the known part of the shape of ``tensor``, in the form that list ops take."""
    if tensor.shape.rank is None:
        return tf.constant(-1)
    return tf.constant([-1 if n is None else n for n in tensor.shape.as_list()], tf.int32)


def pushed(lists: Iterable[tf.Tensor], tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Return each list with a tensor appended."""
    return [
        tf.raw_ops.TensorListPushBack(input_handle=so_far, tensor=tensor)
        for so_far, tensor in zip(lists, tensors, strict=True)
    ]
