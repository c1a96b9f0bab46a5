"""Tensor lists in which a loop's values wait for its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

__all__ = ["empty_list", "pushed", "static_shape", "untyped"]


def empty_list(tensor: tf.Tensor, most: int | None, name: str) -> tf.Tensor:
    """A list for values like ``tensor``, at most so many (``None``: not known)."""
    return tf.raw_ops.EmptyTensorList(
        element_shape=static_shape(tensor),
        max_num_elements=-1 if most is None else most,
        element_dtype=tensor.dtype,
        name=name,
    )


def untyped(lists: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """``lists``, of which the graph does not know the type of the elements any more: they hold
    others than it thinks."""
    return tf.raw_ops.IdentityN(input=list(lists)) if lists else []


def static_shape(tensor: tf.Tensor) -> tf.Tensor:
    """The shape of ``tensor`` as ops of lists take it, as far as it is known."""
    if tensor.shape.rank is None:
        return tf.constant(-1)
    return tf.constant([-1 if n is None else n for n in tensor.shape.as_list()], tf.int32)


def pushed(lists: Iterable[tf.Tensor], tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Each list with a tensor appended."""
    return [
        tf.raw_ops.TensorListPushBack(input_handle=so_far, tensor=tensor)
        for so_far, tensor in zip(lists, tensors, strict=True)
    ]
