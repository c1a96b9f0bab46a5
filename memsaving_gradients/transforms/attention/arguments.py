"""Checks of the arguments of attention functions and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError

__all__ = [
    "block_pair",
    "broadcastable",
    "check_mask",
    "check_rate",
    "check_same",
    "check_seed",
    "floating",
    "number",
]


def floating(argument: str, value: Any, dtype: tf.DType | None = None) -> tf.Tensor:
    """Return ``value`` as a tensor of floating numbers, of a known rank of at least 2."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ArgumentError(
            argument,
            value,
            f"is a {type(value).__name__}; make it dense (to_tensor, tf.sparse.to_dense) and give "
            "a mask",
        )
    try:
        tensor = tf.convert_to_tensor(value, dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            argument, value, f"cannot be converted to {_name(dtype)} ({error}); cast it"
        ) from error
    if not tensor.dtype.is_floating:
        raise ArgumentError(
            argument, tensor, f"has dtype {tensor.dtype.name}; cast it to a floating point dtype"
        )
    if tensor.shape.rank is None or tensor.shape.rank < 2:
        raise ArgumentError(
            argument,
            tensor,
            f"has shape {tensor.shape}; its axes must be [..., positions, width], so set its shape "
            "with tf.ensure_shape, or add axes",
        )
    return tensor


def _name(dtype: tf.DType | None) -> str:
    return "floating point numbers" if dtype is None else dtype.name


def number(argument: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    """Return ``value`` as a scalar."""
    try:
        tensor = tf.cast(tf.convert_to_tensor(value), dtype)
    except (TypeError, ValueError, tf.errors.UnimplementedError) as error:
        raise ArgumentError(argument, value, "is not a number") from error
    if not tensor.shape.is_compatible_with([]):
        raise ArgumentError(
            argument,
            value,
            f"has shape {tensor.shape}; give one number for all scores, or scale queries yourself",
        )
    return tensor


def check_same(
    argument: str, value: tf.Tensor, other: str, like: tf.Tensor, but: Sequence[int]
) -> None:
    """Raise unless two tensors agree in rank and in all axes but some."""
    a, b = (t.shape.as_list() for t in (value, like))
    if len(a) == len(b):
        for axis in but:
            a[axis] = b[axis] = None
        if all(m == n or None in (m, n) for m, n in zip(a, b, strict=True)):
            return
    axes = " and ".join(map(str, but))
    raise ArgumentError(
        argument,
        value,
        f"has shape {value.shape}, which must be the shape of {other}, {like.shape}, except in axis"
        f" {axes}; broadcast or transpose it",
    )


def check_mask(argument: str, value: Any, shape: Sequence[int | None]) -> tf.Tensor:
    """Return a boolean tensor that can be broadcast to a shape, with as many axes."""
    mask = tf.convert_to_tensor(value)
    if mask.dtype != tf.bool:
        raise ArgumentError(
            argument,
            mask,
            f"has dtype {mask.dtype.name}, but must be boolean, True where a query sees a key; "
            "cast it with tf.cast(mask, tf.bool)",
        )
    return broadcastable(argument, mask, shape)


def broadcastable(argument: str, tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Return ``tensor`` with leading axes of length 1, if it can be broadcast to a shape."""
    found = tensor.shape.rank
    fits = found is not None and found <= len(shape)
    if fits:
        axes = zip(reversed(tensor.shape.as_list()), reversed(shape), strict=False)
        fits = all(m in (None, 1) or n is None or m == n for m, n in axes)
    if not fits:
        raise ArgumentError(
            argument,
            tensor,
            f"has shape {tensor.shape}, which cannot be broadcast to {list(shape)}; add axes with "
            "tf.newaxis where it should be broadcast",
        )
    for _ in range(len(shape) - found):
        tensor = tensor[tf.newaxis]
    return tensor


def check_rate(dropout: Any, seed: Any) -> float:
    """Return a rate below one; a positive rate needs a seed."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ArgumentError(
            "dropout",
            dropout,
            "must be a number, at least 0 and less than 1: the share of weights to drop",
        )
    if dropout and seed is None:
        raise ArgumentError(
            "seed",
            seed,
            f"dropout={dropout} needs a seed to draw the weights to drop; give two integers that "
            "differ from step to step, such as those of tf.random.Generator.make_seeds or "
            "keras.random.SeedGenerator.next",
        )
    return float(dropout)


def check_seed(seed: Any) -> tf.Tensor:
    """Return the seed as a tensor of two integers."""
    tensor = tf.convert_to_tensor(seed)
    if not tensor.dtype.is_integer or not tensor.shape.is_compatible_with([2]):
        raise ArgumentError(
            "seed",
            seed,
            f"has dtype {tensor.dtype.name} and shape {tensor.shape}; give two integers, as for "
            "tf.random.stateless_uniform",
        )
    return tf.cast(tensor, tf.int64)


def block_pair(block: Any) -> tuple[int, int] | None:
    """Return the most queries and keys of a block, from one number, two numbers, or ``None``."""
    if block is None:
        return None
    pair = (block, block) if isinstance(block, int) else block
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair)
    ):
        raise ArgumentError(
            "block",
            block,
            "must be a positive integer, a pair of them (queries, keys), or None, which chooses "
            "the size by bytes",
        )
    return pair[0], pair[1]
