"""Long axes in blocks, and loops over the blocks that hold one block at a time.

An axis of ``length`` positions becomes ``count`` blocks of ``size`` positions. All blocks have the
same size, ``ceil(length / count)``: at most ``count - 1`` positions are padding. The numbers of
the blocks are a new first axis, so that reading one block is a view. Blocks that a loop computes go
into a TensorList, which updates one block in place. Scattering into one tensor would copy all of it
at each turn (TensorFlow 2.21).

A length that is known while the graph is built is a Python integer, any other length is a scalar
tensor. Under XLA, integers must stay integers, since XLA compiles static shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf

from graph_tools.editing import opaque

__all__ = [
    "BLOCK_BYTES",
    "BlockList",
    "BlockedAxis",
    "Length",
    "block_sizes",
    "ceil_div",
    "loop",
    "maximum",
    "minimum",
    "run",
    "shape_of",
    "zero_like",
]

#: A length: an integer where it is known, else a scalar ``int32`` tensor.
Length = Any

#: The most bytes of a block of scores, all batches and heads together. Larger blocks save no time:
#: a step of 2 × 4096 positions of width 64 took 557, 417, 425, 433 and 421 ms of a CPU with blocks
#: of 0.5, 2, 8, 32 and 128 MiB.
BLOCK_BYTES = 8 * 2**20
#: A block of scores may always take this many bytes. Smaller blocks would save memory where there
#: is enough, and cost time (152 ms with 0.5 MiB, 113 ms with 2 MiB, at 8 × 1024 positions of width
#: 64).
FREE_BYTES = 2**20
#: The least queries or keys of a block. A step of 8 × 1024 positions of width 64 took 2324, 718,
#: 294 and 152 ms of a CPU with square blocks of 16, 32, 64 and 128: products of small matrices are
#: slow.
LEAST_SIDE = 64


def shape_of(tensor: tf.Tensor) -> list[Length]:
    """Return the shape of ``tensor``, with integers where they are known."""
    static = tensor.shape.as_list()
    if None not in static:
        return static
    dynamic = tf.shape(tensor)
    return [dynamic[i] if n is None else n for i, n in enumerate(static)]


def ceil_div(a: Length, b: Length) -> Length:
    """Return ``a / b``, rounded up."""
    return (a + b - 1) // b


def minimum(a: Length, b: Length) -> Length:
    """Return the smaller length."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tf.minimum(a, b)


def maximum(a: Length, b: Length) -> Length:
    """Return the larger length."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else tf.maximum(a, b)


@dataclass(frozen=True)
class BlockedAxis:
    """An axis in blocks.

    Attributes
    ----------
    length
        Number of positions.
    size
        Positions of one block.
    count
        Number of blocks.
    """

    length: Length
    size: Length
    count: Length

    @staticmethod
    def of(length: Length, largest: Length) -> BlockedAxis:
        """Return equal blocks of at most ``largest`` positions."""
        count = maximum(ceil_div(length, largest), 1)
        return BlockedAxis(length, maximum(ceil_div(length, count), 1), count)

    @property
    def padding(self) -> Length:
        """The number of positions beyond the end."""
        return self.count * self.size - self.length

    @property
    def is_padded(self) -> bool:
        """Whether there may be padding."""
        return not (isinstance(self.padding, int) and self.padding == 0)

    def split(self, x: tf.Tensor, axis: int, fill: float = 0.0) -> tf.Tensor:
        """Return ``x`` in blocks: their numbers on a new first axis, positions on the last but one.

        Parameters
        ----------
        x
            A tensor with ``length`` positions on ``axis``.
        axis
            A negative number other than -1.
        fill
            The number at positions of padding.
        """
        rank = x.shape.rank
        axis += rank
        if self.is_padded:
            width: list[list[Length]] = [[0, 0] for _ in range(rank)]
            width[axis] = [0, self.padding]
            x = tf.pad(x, width, constant_values=tf.cast(fill, x.dtype))
        shape = shape_of(x)
        x = tf.reshape(x, [*shape[:axis], self.count, self.size, *shape[axis + 1 :]])
        return tf.transpose(x, _order(rank, axis))

    def join(self, blocks: tf.Tensor, axis: int) -> tf.Tensor:
        """Return the tensor that `split` turns into ``blocks``."""
        rank = blocks.shape.rank - 1
        axis += rank
        order = _order(rank, axis)
        x = tf.transpose(blocks, [order.index(i) for i in range(rank + 1)])
        shape = shape_of(x)
        x = tf.reshape(x, [*shape[:axis], self.count * self.size, *shape[axis + 2 :]])
        if not self.is_padded:
            return x
        begin = [0] * rank
        return tf.slice(x, begin, [*shape[:axis], self.length, *shape[axis + 2 :]])


def _order(rank: int, axis: int) -> list[int]:
    """Return the permutation that moves the number of a block first, and the position last but one.

    ``rank`` counts the axes before ``axis`` was split in two.
    """
    others = [*range(axis), *range(axis + 2, rank)]
    return [axis, *others, axis + 1, rank]


def block_sizes(pairs: Length, rows: Length, columns: Length, width: int) -> tuple[Length, Length]:
    """Return the most queries and keys of a block: powers of two, keys no more than queries.

    A block of scores takes no more bytes than all queries or all keys, so that it never decides the
    peak, or `FREE_BYTES`. It takes at most `BLOCK_BYTES`, but no side is below `LEAST_SIDE`.

    Parameters
    ----------
    pairs
        Batches times heads.
    rows, columns
        Number of queries and keys.
    width
        Numbers in a key.
    """
    pairs = maximum(pairs, 1)
    entries = maximum(FREE_BYTES // 4 // pairs, maximum(columns, rows) * width)
    entries = minimum(BLOCK_BYTES // 4 // pairs, entries)
    doublings = _log2(maximum(entries, LEAST_SIDE**2))
    return _power_of_two(doublings - doublings // 2), _power_of_two(doublings // 2)


def _log2(n: Length) -> Length:
    """Return the whole part of the binary logarithm."""
    if isinstance(n, int):
        return int(math.log2(n))
    return tf.reduce_sum(tf.cast(n >= tf.constant([2**k for k in range(1, 31)]), tf.int32))


def _power_of_two(k: Length) -> Length:
    return 1 << k if isinstance(k, int) else tf.bitwise.left_shift(tf.constant(1), k)


def loop(start: Length, stop: Length, body: Callable[..., Any], carried: Sequence[Any]) -> Any:
    """Return ``carried`` after ``carried = body(i, *carried)`` for each ``i``."""
    if isinstance(start, int) and isinstance(stop, int) and stop <= start + 1:
        return body(start, *carried) if stop > start else carried

    def turn(i: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
        results = body(i, *values)
        for result, value in zip(results, carried, strict=True):
            result.set_shape(value.shape)
        return [i + 1, *results]

    _, *results = tf.while_loop(
        lambda i, *_: i < stop,
        turn,
        [tf.convert_to_tensor(start, tf.int32), *carried],
        parallel_iterations=1,  # Each parallel turn would hold a block of its own.
    )
    return results


def zero_like(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar zero that is known only once ``x`` is.

    Grappler turns tensors filled with a known zero into constants. Constants stay in memory between
    steps, and TensorFlow copies them before anything is written into them.
    """
    return tf.cast(opaque.never(x), dtype)


@dataclass(frozen=True)
class BlockList:
    """The layout of a TensorList with ``places`` blocks, all of one shape.

    The list itself, ``blocks``, is a scalar tensor that loops carry.
    """

    places: Length
    shape: Sequence[Length]
    dtype: tf.DType

    @staticmethod
    def like(blocks: tf.Tensor, dtype: tf.DType) -> BlockList:
        """Return the layout for as many blocks as in ``blocks``, of the same shape."""
        places, *shape = shape_of(blocks)
        return BlockList(places, shape, dtype)

    def zeros(self) -> tf.Tensor:
        """Return a list of zeros, whose places share one block."""
        shape = tf.stack(self.shape) if self.shape else tf.zeros([0], tf.int32)
        blocks = tf.raw_ops.TensorListReserve(
            element_shape=shape, num_elements=self.places, element_dtype=self.dtype
        )
        # TensorFlow reads a place that was never set as zeros, but not in a vectorized loop.
        zeros = tf.zeros(shape, self.dtype)
        (found,) = loop(0, self.places, lambda i, so_far: [self.set(so_far, i, zeros)], [blocks])
        return found

    def set(self, blocks: tf.Tensor, place: Length, block: tf.Tensor) -> tf.Tensor:
        """Return ``blocks`` with ``block`` at ``place``."""
        found: tf.Tensor = tf.raw_ops.TensorListSetItem(
            input_handle=blocks, index=place, item=tf.cast(block, self.dtype)
        )
        return found

    def add(self, blocks: tf.Tensor, place: Length, block: tf.Tensor) -> tf.Tensor:
        """Return ``blocks`` with ``block`` added at ``place``."""
        before = tf.raw_ops.TensorListGetItem(
            input_handle=blocks,
            index=place,
            element_shape=self._static_shape(),
            element_dtype=self.dtype,
        )
        return self.set(blocks, place, before + block)

    def stack(self, blocks: tf.Tensor) -> tf.Tensor:
        """Return all blocks in one tensor, ``[places, *shape]``."""
        found: tf.Tensor = tf.raw_ops.TensorListStack(
            input_handle=blocks, element_shape=self._static_shape(), element_dtype=self.dtype
        )
        return tf.ensure_shape(found, [_static(n) for n in (self.places, *self.shape)])

    def _static_shape(self) -> list[int]:
        return [-1 if n is None else n for n in map(_static, self.shape)]


def _static(n: Length) -> int | None:
    return n if isinstance(n, int) else None


def run(function: Callable[..., Any], formula: Any, *tensors: Any) -> Any:
    """Return ``function(formula, *tensors)``; eager execution runs it as a graph.

    In a graph, a loop costs less and writes in place. ``formula`` is hashable.
    """
    if tf.executing_eagerly():
        ranks = tuple(None if t is None else t.shape.rank for t in tf.nest.flatten(tensors))
        return _traced(function, formula, ranks)(*tensors)
    return function(formula, *tensors)


@lru_cache(maxsize=64)
def _traced(function: Callable[..., Any], formula: Any, ranks: tuple[int | None, ...]) -> Any:
    # One function per choice of ranks: TensorFlow would generalize two ranks to an unknown one.
    return tf.function(partial(function, formula), autograph=False, reduce_retracing=True)
