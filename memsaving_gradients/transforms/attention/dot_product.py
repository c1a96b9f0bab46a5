"""Scaled dot-product attention that never holds a number for each pair of a query and a key.

Plain attention (Vaswani et al. 2017, arXiv 1706.03762) keeps scores or weights from the forward to
the backward pass: ``queries × keys × heads`` numbers, several times while it computes. Here both
passes compute them in blocks (Rabe & Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv
2205.14135) and keep the output and one number for each query. The gradient is exact: the same sums
in another order. The two passes take seven products of matrices, one more than plain attention;
smaller passes over memory save some of that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from memsaving_gradients.transforms.attention.attend import Kind, attend
from memsaving_gradients.transforms.attention.blocks import shape_of, zero_like
from memsaving_gradients.transforms.attention.grid import Grid, Options
from memsaving_gradients.transforms.attention.pairs import ONE, BlockMatrix, Place, padded
from memsaving_gradients.transforms.attention.scores import (
    Block,
    Pullback,
    ScoreBlock,
    ScoreTangent,
    TwiceDifferentiable,
)

__all__ = ["dot_product", "dot_product_attention"]

Tensors = Sequence[tf.Tensor]


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
    """Return ``softmax(scale · query keyᵀ + bias) value``, computed in blocks of queries and keys.

    Works in eager execution, in a ``tf.function`` with known or unknown lengths, and under XLA. The
    gradient for queries, keys, values and bias is exact; it can be differentiated once more. Scores
    and sums are ``float32`` where inputs are ``float16`` or ``bfloat16``.

    Parameters
    ----------
    query : Tensor [..., queries, width]
        ``float16``, ``bfloat16``, ``float32`` or ``float64``; axes before the last two are batches
        and heads.
    key : Tensor [..., keys, width]
        Of the dtype of ``query``.
    value : Tensor [..., keys, any width]
        Of the dtype of ``query``.
    mask : Tensor of booleans, broadcastable to [..., queries, keys], optional
        True where a query sees a key. It is never broadcast as a whole; a mask ``[..., 1, keys]``
        costs next to nothing. A query that sees no key gets the mean of all values, as from equal
        weights without dropout.
    bias : Tensor, broadcastable to [..., queries, keys], optional
        Added to the scores. Differentiable; its gradient takes as much memory as the bias.
    causal
        Whether query ``i`` sees keys up to ``i`` only. Blocks that no query sees are not computed.
    scale : number or scalar tensor, optional
        ``1 / sqrt(width)`` if not given.
    dropout
        The share of weights that is set to zero; the others are scaled up.
    seed : Tensor [2] of integers
        Determines the dropped weights, together with ``block``; needed with ``dropout``.
    block
        The most queries and keys of a block: one number or two. ``None``: powers of two such that a
        block of scores takes no more than all queries or keys do (or 1 MiB), and at most 8 MiB.

    Returns
    -------
    Tensor [..., queries, width of values]
        Of the dtype of ``value``.

    Raises
    ------
    ArgumentError
        An argument has a wrong dtype, shape or value. Lengths that are unknown while a graph is
        built are checked by TensorFlow when it runs.
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
            raise ArgumentError(
                "bias", bias, f"cannot be converted to a tensor ({error})"
            ) from error
        if not bias.dtype.is_floating:
            problem = f"has dtype {bias.dtype.name}; cast it to a floating point dtype"
            raise ArgumentError("bias", bias, problem)
        bias = _full_where_unknown(broadcastable("bias", bias, scores), query, key)
    if scale is None:
        scale = tf.math.rsqrt(tf.cast(shape_of(query)[-1], tf.float64))
    seed = check_seed(seed) if rate else None
    query *= number("scale", scale, query.dtype)
    options = Options(causal=causal, dropout=rate, block=size)
    kind = dot_product(options, biased=bias is not None)
    inputs = [query, key, value] + ([] if bias is None else [bias])
    return attend(kind, inputs, masks=masks, seed=seed)


def _full_where_unknown(bias: tf.Tensor, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Return ``bias`` with axes of known length 1 or of full length."""
    if None not in bias.shape.as_list():
        return bias
    full = [*shape_of(query)[:-1], shape_of(key)[-2]]
    shape = [full[i] if n is None else n for i, n in enumerate(bias.shape.as_list())]
    return tf.broadcast_to(bias, shape)


def dot_product(options: Options, *, biased: bool = False) -> Kind:
    """Return the attention whose scores are ``query keyᵀ``, plus a bias if ``biased``."""
    return Kind("dot_product_attention", DotProductScores.of, options, biased)


@dataclass(frozen=True)
class _Bias:
    """A bias, padded, and the layout of its gradient.

    The bias may have one row, column, head or batch for all. Its gradient is summed block by block,
    in the same shape.
    """

    matrix: tf.Tensor
    sums: BlockMatrix

    @staticmethod
    def of(grid: Grid, bias: tf.Tensor) -> _Bias:
        one_row, one_column = (n == 1 for n in bias.shape.as_list()[-2:])
        rows, columns = ONE if one_row else grid.rows, ONE if one_column else grid.columns
        matrix = padded(bias, grid.rows, grid.columns, 0)
        return _Bias(matrix, BlockMatrix(rows, columns, shape_of(bias)[:-2], grid.dtype))

    def part(self, place: Place) -> tf.Tensor:
        return tf.cast(place.part(self.matrix), self.sums.dtype)


@dataclass(frozen=True)
class DotProductScores(TwiceDifferentiable):
    """The scores ``query keyᵀ + bias``.

    Numbers for keys alone (masks) and for queries alone (which a softmax subtracts) are part of the
    product: each is an additional column of both operands.
    """

    bias: _Bias | None

    subtracts_in_product = True

    @staticmethod
    def of(
        options: Options, inputs: Tensors, masks: Tensors, seed: tf.Tensor | None
    ) -> DotProductScores:
        """Return the scores of queries, keys, values and perhaps a bias."""
        query, key, _, *bias = inputs
        dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
        grid = Grid.of(options, query, key, dtype)
        return DotProductScores(
            grid.masked(masks, seed),
            zero_like(query, dtype),
            grid.rows.split(query, options.axis),
            grid.columns.split(key, options.axis),
            _Bias.of(grid, bias[0]) if bias else None,
        )

    def block(self, at: Block, minus: Tensors = ()) -> ScoreBlock:
        """See `Scores.block`."""

        def pullback(of_scores: tf.Tensor, shared: Tensors) -> Pullback:
            of_query = self.grid.weighted(of_scores, at.key)
            of_key = self.grid.weighted(of_scores, at.query, transpose=True)
            return of_query, of_key, self._add_bias(shared, at, of_scores)

        return ScoreBlock(self._masked(at, minus), pullback)

    def _masked(self, at: Block, minus: Tensors) -> tf.Tensor:
        key_mask = self.grid.key_mask(at.place)
        scores = self.grid.product(at.query, at.key, minus[0] if minus else None, key_mask)
        if self.bias is not None:
            scores += self.bias.part(at.place)
        return self.grid.mask_pairs(at.place, scores)

    def _add_bias(self, shared: Tensors, at: Block, of_scores: tf.Tensor) -> list[tf.Tensor]:
        if self.bias is None:
            return []
        return [self.bias.sums.add(shared[0], at.place, of_scores)]

    def tangent(
        self, at: Block, direction: DotProductScores, to: Block, minus: Tensors = ()
    ) -> ScoreTangent:
        """See `TwiceDifferentiable.tangent`."""
        grid = self.grid
        change = grid.product(to.query, at.key) + grid.product(at.query, to.key)
        if direction.bias is not None:
            change += direction.bias.part(at.place)

        def pullback(of_scores: tf.Tensor, of_change: tf.Tensor, shared: Tensors) -> Pullback:
            of_query = grid.weighted(of_scores, at.key) + grid.weighted(of_change, to.key)
            of_key = grid.weighted(of_scores, at.query, transpose=True)
            of_key += grid.weighted(of_change, to.query, transpose=True)
            return of_query, of_key, self._add_bias(shared, at, of_scores)

        return ScoreTangent(self._masked(at, minus), change, pullback)

    def shared_sums(self) -> list[tf.Tensor]:
        """Return the initial sum of gradients for the bias: zeros."""
        return [] if self.bias is None else [self.bias.sums.zeros()]

    def shared_gradients(self, sums: Tensors) -> list[tf.Tensor]:
        """Return the gradient for the bias."""
        return [] if self.bias is None else [self.bias.sums.joined(sums[0])]
