"""Long axes cut into blocks, and loops over them that hold one block at a time.

An axis of ``length`` positions becomes ``count`` blocks of ``size``. The blocks lie along a new first axis, so that reading one
is a view. Those that are made are put into tensor lists, which hold them as they are: scattering into one tensor would copy all of it at each
turn (TensorFlow 2.21). Blocks are made equal, ``size = ceil(length / count)``, so that at most ``count - 1`` positions of padding are computed for nothing.

Lengths that are known when the graph is built are plain integers here, the others scalar tensors. What is an integer under
XLA stays one, since it compiles static shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf

from graph_tools.editing import opaque

__all__ = ["Cut", "Shelf", "block_sizes", "dims", "if_long", "loop", "run", "up", "zero_like"]

#: A length: an integer where it is known, else a scalar ``int32`` tensor.
Length = Any

#: What a block of scores may take, all batches and heads together, in bytes: above a few MiB a block leaves the caches of a CPU.
BLOCK_BYTES = 8 * 2**20
#: Blocks that take less are not worth making smaller.
FREE_BYTES = 2**20
#: Smaller blocks cost more in products of small matrices than they save.
LEAST_SIDE = 64


def dims(tensor: tf.Tensor) -> list[Length]:
    """The shape of ``tensor``, with integers where they are known."""
    static = tensor.shape.as_list()
    if None not in static:
        return static
    dynamic = tf.shape(tensor)
    return [dynamic[i] if n is None else n for i, n in enumerate(static)]


def up(a: Length, b: Length) -> Length:
    """``a / b``, rounded up."""
    return (a + b - 1) // b


def at_most(a: Length, b: Length) -> Length:
    """The smaller one."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tf.minimum(a, b)


def at_least(a: Length, b: Length) -> Length:
    """The larger one."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else tf.maximum(a, b)


def if_long(matrix: tf.Tensor, axis: int, long: Length, short: Length) -> Length:
    """``long``, or ``short`` where an axis of unknown length turns out to have one position for all."""
    if matrix.shape.as_list()[axis] is not None:
        return long
    return tf.where(tf.shape(matrix)[axis] == 1, short, long)


@dataclass(frozen=True)
class Cut:
    """An axis in blocks.

    Attributes
    ----------
    length, size, count
        Positions, positions of a block, blocks.
    """

    length: Length
    size: Length
    count: Length

    @staticmethod
    def of(length: Length, largest: Length) -> Cut:
        """Equal blocks of at most ``largest`` positions."""
        count = at_least(up(length, largest), 1)
        return Cut(length, at_least(up(length, count), 1), count)

    @property
    def padding(self) -> Length:
        """Positions beyond the end."""
        return self.count * self.size - self.length

    @property
    def is_padded(self) -> bool:
        """Whether there may be any."""
        return not (isinstance(self.padding, int) and self.padding == 0)

    def split(self, x: tf.Tensor, axis: int, fill: float = 0.0) -> tf.Tensor:
        """``x`` with its blocks along a new first axis, the positions of a block on the last axis but one.

        Parameters
        ----------
        x
            ``length`` positions on ``axis``, which is negative and not the last one.
        fill
            What padding is filled with.
        """
        rank = x.shape.rank
        axis += rank
        x = self.padded(x, axis, fill)
        shape = dims(x)
        x = tf.reshape(x, [*shape[:axis], self.count, self.size, *shape[axis + 1 :]])
        return tf.transpose(x, _order(rank, axis))

    def join(self, blocks: tf.Tensor, axis: int) -> tf.Tensor:
        """The inverse of `split`."""
        rank = blocks.shape.rank - 1
        axis += rank
        order = _order(rank, axis)
        x = tf.transpose(blocks, [order.index(i) for i in range(rank + 1)])
        shape = dims(x)
        x = tf.reshape(x, [*shape[:axis], self.count * self.size, *shape[axis + 2 :]])
        if not self.is_padded:
            return x
        begin = [0] * rank
        return tf.slice(x, begin, [*shape[:axis], self.length, *shape[axis + 2 :]])

    def padded(self, x: tf.Tensor, axis: int, fill: Any = 0.0) -> tf.Tensor:
        """``x`` with the padding on ``axis``."""
        if not self.is_padded:
            return x
        width: list[list[Length]] = [[0, 0] for _ in range(x.shape.rank)]
        width[axis] = [0, self.padding]
        return tf.pad(x, width, constant_values=tf.cast(fill, x.dtype))


def _order(rank: int, axis: int) -> list[int]:
    """Where the axes of a tensor come from whose ``axis`` was split into two: number of the block first, place in it last but one."""
    others = [*range(axis), *range(axis + 2, rank)]
    return [axis, *others, axis + 1, rank]


def block_sizes(pairs: Length, rows: Length, columns: Length, width: int) -> tuple[Length, Length]:
    """How many queries and keys a block has at most: powers of two, keys no more than queries.

    A block of scores takes no more than all keys do (so it never decides the peak) or `FREE_BYTES`, nor than `BLOCK_BYTES`; it has no side
    below `LEAST_SIDE`.

    Parameters
    ----------
    pairs
        Batches times heads.
    rows, columns
        Queries and keys.
    width
        Numbers in a key.
    """
    pairs = at_least(pairs, 1)
    entries = at_least(FREE_BYTES // 4 // pairs, at_least(columns, rows) * width)
    entries = at_most(BLOCK_BYTES // 4 // pairs, entries)
    doublings = _doublings(at_least(entries, LEAST_SIDE**2))
    return _power(doublings - doublings // 2), _power(doublings // 2)


def _doublings(n: Length) -> Length:
    """The whole part of the binary logarithm."""
    if isinstance(n, int):
        return int(math.log2(n))
    return tf.reduce_sum(tf.cast(n >= tf.constant([2**k for k in range(1, 31)]), tf.int32))


def _power(k: Length) -> Length:
    return 1 << k if isinstance(k, int) else tf.bitwise.left_shift(tf.constant(1), k)


def loop(start: Length, stop: Length, body: Callable[..., Any], carried: Sequence[Any]) -> Any:
    """``carried = body(i, *carried)`` for ``i`` from ``start`` to ``stop``, one turn after the other."""
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
        parallel_iterations=1,  # more would hold as many blocks
    )
    return results


def zero_like(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A scalar zero that is only known when ``x`` is.

    Grappler would make constants of tensors filled with a known one. They would lie in memory between steps, too, and be copied
    before anything is written into them.
    """
    return tf.cast(opaque.never(x), dtype)


@dataclass(frozen=True)
class Shelf:
    """A list of as many blocks as there are places, zeros at first, all of one shape.

    It is a scalar tensor to loops (``empty``), to be handed back to it.
    """

    places: Length
    shape: Sequence[Length]
    dtype: tf.DType

    @staticmethod
    def like(blocks: tf.Tensor, dtype: tf.DType) -> Shelf:
        """For as many blocks of the same shape."""
        places, *shape = dims(blocks)
        return Shelf(places, shape, dtype)

    def empty(self) -> tf.Tensor:
        """All zeros, the same ones."""
        shape = tf.stack(self.shape) if self.shape else tf.zeros([0], tf.int32)
        blocks = tf.raw_ops.TensorListReserve(
            element_shape=shape, num_elements=self.places, element_dtype=self.dtype
        )
        # Places that nothing was put in would be zeros, too, but not once parallel loops are made of this.
        zeros = tf.zeros(shape, self.dtype)
        (found,) = loop(0, self.places, lambda i, so_far: [self.put(so_far, i, zeros)], [blocks])
        return found

    def put(self, blocks: tf.Tensor, place: Length, block: tf.Tensor) -> tf.Tensor:
        """``blocks`` with ``block`` at a place."""
        found: tf.Tensor = tf.raw_ops.TensorListSetItem(
            input_handle=blocks, index=place, item=tf.cast(block, self.dtype)
        )
        return found

    def add(self, blocks: tf.Tensor, place: Length, block: tf.Tensor) -> tf.Tensor:
        """``blocks`` with ``block`` added at a place."""
        before = tf.raw_ops.TensorListGetItem(
            input_handle=blocks,
            index=place,
            element_shape=self._known(),
            element_dtype=self.dtype,
        )
        return self.put(blocks, place, before + block)

    def stacked(self, blocks: tf.Tensor) -> tf.Tensor:
        """``[places, *shape]``."""
        found: tf.Tensor = tf.raw_ops.TensorListStack(
            input_handle=blocks, element_shape=self._known(), element_dtype=self.dtype
        )
        return tf.ensure_shape(found, [_static(n) for n in (self.places, *self.shape)])

    def _known(self) -> list[int]:
        return [-1 if n is None else n for n in map(_static, self.shape)]


def _static(n: Length) -> int | None:
    return n if isinstance(n, int) else None


def run(function: Callable[..., Any], setting: Any, *tensors: Any) -> Any:
    """``function(setting, *tensors)``; in eager execution as a graph, where a loop costs less and writes in place."""
    if tf.executing_eagerly():
        ranks = tuple(None if t is None else t.shape.rank for t in tf.nest.flatten(tensors))
        return _traced(function, setting, ranks)(*tensors)
    return function(setting, *tensors)


@lru_cache(maxsize=64)
def _traced(function: Callable[..., Any], setting: Any, ranks: tuple[int | None, ...]) -> Any:
    # One for each choice of ranks: where these change, TensorFlow would trace anew for unknown ones.
    return tf.function(partial(function, setting), autograph=False, reduce_retracing=True)
