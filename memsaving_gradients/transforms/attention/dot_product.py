"""Scaled dot-product attention that never holds a number for each pair of a query and a key.

Plain attention (Vaswani et al. 2017, arXiv 1706.03762) keeps scores or weights from the forward to the backward pass:
``queries × keys × heads`` numbers, several times while it computes. Here both passes go through them in blocks (Rabe & Staats 2021,
arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135) and keep the output and one number for each query. The gradient is
exact: the same sums in another order. One product of matrices more than the six of plain attention pays for it; smaller
passes over memory win some of that back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.transforms.attention.arguments import (
    block_pair,
    broadcastable,
    check_mask,
    check_rate,
    check_same,
    check_seed,
    floating,
    number,
)
from memsaving_gradients.transforms.attention.block_passes import NOTHING, backward, forward
from memsaving_gradients.transforms.attention.blocks import Cut, dims, run
from memsaving_gradients.transforms.attention.custom_gradient import differentiable
from memsaving_gradients.transforms.attention.scores import Setting
from memsaving_gradients.transforms.attention.second_order import second

__all__ = ["attend", "dot_product_attention"]

NAME = "dot_product_attention"


@tf.autograph.experimental.do_not_convert
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    scale: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    block: int | tuple[int, int] | None = None,
) -> tf.Tensor:
    """``softmax(scale · query keyᵀ + bias) value``, in blocks of queries and keys.

    Works in eager execution, in a ``tf.function`` with known or unknown lengths, and under XLA. The gradient for queries, keys,
    values and bias is exact; it can be differentiated once more. Scores and sums are ``float32`` where inputs are
    ``float16`` or ``bfloat16``.

    Parameters
    ----------
    query : Tensor [..., queries, width]
        ``float16``, ``bfloat16``, ``float32`` or ``float64``; axes before the last two are batches and heads.
    key : Tensor [..., keys, width]
        Of the dtype of ``query``.
    value : Tensor [..., keys, any width]
        Of the dtype of ``query``.
    mask : Tensor of booleans, broadcastable to [..., queries, keys], optional
        True where a query sees a key. It is never broadcast as a whole; one that is ``[..., 1, keys]`` costs next to nothing.
        A query that sees no key gets the mean of all values, as from equal scores (which are not dropped).
    bias : Tensor, broadcastable to [..., queries, keys], optional
        Added to the scores. Differentiable; its gradient takes as much memory as it does.
    causal
        Whether query ``i`` sees keys up to ``i`` only. Blocks that no query sees are not computed.
    scale : number or scalar tensor, optional
        ``1 / sqrt(width)`` if not given.
    dropout
        The part of weights that is set to zero, the others being scaled up.
    seed : Tensor [2] of integers
        What weights are dropped follows from it, and from ``block``; needed with ``dropout``.
    block
        Queries and keys of a block, at most: one number or two. ``None``: powers of two such that a block of scores takes no more than
        all keys do (or 1 MiB), and at most 8 MiB.

    Returns
    -------
    Tensor [..., queries, width of values]
        Of the dtype of ``value``.

    Raises
    ------
    ArgumentError
        An argument has a wrong dtype, shape or value. Lengths that are unknown when a graph is built are checked by
        TensorFlow when it runs.
    HigherOrderError
        Gradients of gradients of gradients are asked for.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from memsaving_gradients.transforms.attention import dot_product_attention
    >>> x = tf.random.stateless_normal([2, 4, 1000, 16], [1, 2])
    >>> seen = tf.sequence_mask([1000, 700])[:, tf.newaxis, tf.newaxis]
    >>> y = dot_product_attention(x, x, x, mask=seen, causal=True)
    >>> y.shape
    TensorShape([2, 4, 1000, 16])
    >>> bool(tf.reduce_max(abs(y[:, :, 0] - x[:, :, 0])) < 1e-6)
    True
    """
    query = floating("query", query)
    key, value = floating("key", key, query.dtype), floating("value", value, query.dtype)
    check_same("key", key, "query", query, [-2])
    check_same("value", value, "key", key, [-1])
    rate, size = check_rate(dropout, seed), block_pair(block)
    if not isinstance(causal, bool):
        raise ArgumentError("causal", causal, "must be True or False")
    scores = [*query.shape.as_list()[:-1], key.shape.as_list()[-2]]
    masks = [] if mask is None else [check_mask("mask", mask, scores)]
    if bias is not None:
        try:
            bias = tf.convert_to_tensor(bias, None if tf.is_tensor(bias) else query.dtype)
        except (TypeError, ValueError) as error:
            raise ArgumentError("bias", bias, f"is no tensor ({error})") from error
        if not bias.dtype.is_floating:
            problem = f"has dtype {bias.dtype.name}; cast it to a floating one"
            raise ArgumentError("bias", bias, problem)
        bias = _spelled_out(broadcastable("bias", bias, scores), query, key)
    if scale is None:
        scale = tf.math.rsqrt(tf.cast(dims(query)[-1], tf.float64))
    setting = Setting(causal=causal, rate=rate, block=size)
    seed = check_seed(seed) if rate else None
    query *= number("scale", scale, query.dtype)
    return attend(setting, query, key, value, bias=bias, masks=masks, seed=seed)


def attend(
    setting: Setting,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    bias: tf.Tensor | None = None,
    masks: Sequence[tf.Tensor] = (),
    seed: tf.Tensor | None = None,
    mean: bool = True,
) -> tf.Tensor:
    """Attention with scaled queries and checked arguments.

    Parameters
    ----------
    setting
        See there; its ``axis`` is that of queries, keys, values and result.
    masks
        Each with as many axes as scores, ``[..., queries or 1, keys or 1]``; a pair is seen if all of them say so.
    mean
        What a query gets that sees no key: the mean of all values, or zero.
    """
    for_queries = [m for m in masks if m.shape.as_list()[-1] == 1]
    others = tuple(m for m in masks if m.shape.as_list()[-1] != 1)
    arguments = (others, seed)

    def forwards(*inputs: tf.Tensor) -> Any:
        output, logs = run(forward, setting, inputs, *arguments)
        return output, [logs]

    def backwards(inputs: Any, output: tf.Tensor, kept: Any, upstream: tf.Tensor) -> Any:
        return run(backward, setting, tuple(inputs), *arguments, output, kept[0], upstream)

    def twice(inputs: Any, output: tf.Tensor, kept: Any, upstream: tf.Tensor, to: Any) -> Any:
        return run(second, setting, tuple(inputs), *arguments, output, kept[0], upstream, tuple(to))

    inputs = [query, key, value] + ([] if bias is None else [bias])
    output, logs = differentiable(NAME, forwards, backwards, twice, inputs)
    nowhere = [tf.logical_not(_turned(m, setting.axis)) for m in for_queries]
    if others or bias is not None or setting.window is not None:
        nowhere.append(_of_rows(logs >= NOTHING / 2, setting.axis, dims(query)[setting.axis]))
    for rows in nowhere:
        instead = (
            tf.reduce_mean(value, setting.axis, keepdims=True)
            if mean
            else tf.zeros([], value.dtype)
        )
        output = tf.where(rows, instead, output)
    return output


def _turned(mask: tf.Tensor, axis: int) -> tf.Tensor:
    """A mask of queries, ``[..., queries, 1]``, with the queries on ``axis``."""
    if axis == -2:
        return mask
    rank = mask.shape.rank
    return tf.transpose(mask, [*range(rank - 3), rank - 2, rank - 3, rank - 1])


def _of_rows(blocks: tf.Tensor, axis: int, length: Any) -> tf.Tensor:
    """Blocks of queries joined, without padding."""
    shape = dims(blocks)
    return Cut(length, shape[-2], shape[0]).join(blocks, axis)


def _spelled_out(bias: tf.Tensor, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """``bias`` with axes of known length 1 or of full length."""
    if None not in bias.shape.as_list():
        return bias
    full = [*dims(query)[:-1], dims(key)[-2]]
    shape = [full[i] if n is None else n for i, n in enumerate(bias.shape.as_list())]
    return tf.broadcast_to(bias, shape)
