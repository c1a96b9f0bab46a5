"""Residuals of which the backward pass reads only a part, by the types of the ops that read them.

``ReluGrad``, ``LeakyReluGrad``
    need to know whether an element is positive; they are given 1 where it is, else 0.
``Relu6Grad``
    needs to know whether it is between 0 and 6; it is given the same.
``MaxPoolGrad``
    needs to know which elements are the largest of their windows, where these do not overlap. It is
    given 1 where they are, else 0, and 1 for the result of pooling.
``MaxPoolGrad`` and ``ReluGrad``, where the second reads the result of the first
    need to know which elements are the largest of their windows, and positive. They are given the
    result of pooling where they are, else 0.
an index below a number that is known
    is kept in the smallest integer type that holds it.

A part replaces a tensor if all its backward readers are in this list. A huge tensor may also have
other readers, and is then kept whole next to its part. With a part for the rectifier's gradient,
only the gradient of the filter reads the layer's whole input. It can then run first and free that
input, before the gradient of the input (`memsaving_gradients.schedules.order.brought_forward`). Of
the three largest buffers of a convolutional network's first layers, two are left. O(ops).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.schedules.order import huge_bytes

__all__ = ["Part", "parts_read"]

#: Fact: the input of a gradient op that is read only for its sign or linear range.
_SIGNS = {"ReluGrad": 1, "LeakyReluGrad": 1, "Relu6Grad": 1}

_Take = Callable[[tf.Tensor], tf.Tensor]
_Give = Callable[[tf.Tensor], Sequence[tf.Tensor]]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a tensor, and the ops that need no more of the tensor.

    Attributes
    ----------
    tensor
        The tensor.
    name
        The kind of part.
    packs
        Whether the part is boolean and is kept in bits.
    readers
        The ops, each with the number of an input that is replaced.
    take
        ``take(tensor)`` returns the part.
    give
        ``give(part)`` returns the tensor that each of the readers reads instead.
    """

    tensor: tf.Tensor
    name: str
    packs: bool
    readers: tuple[tuple[tf.Operation, int], ...]
    take: _Take
    give: _Give


def parts_read(step: CapturedStep) -> Iterator[Part]:
    """Yield the parts of tensors that suffice for backward ops; a tensor may have several."""
    graph, ops = step.graph, step.source
    storage, size = graph.storage.tolist(), graph.size.tolist()
    readers: dict[int, list[tuple[int, int, int]]] = {}
    for position in range(graph.first_backward, graph.length):
        # An op that needs only shapes reads nothing.
        for k, value in enumerate(ops.inputs[position] if graph.reads[position] else ()):
            readers.setdefault(storage[value], []).append((position, k, value))
    for root in sorted(graph.residuals):
        if not ops.here[ops.producer[root]]:
            continue
        if size[root] and all(value == root for _, _, value in readers[root]):
            tensor = ops.tensor(root)
            read_by = [(ops.ops[position], k) for position, k, _ in readers[root]]
            if tensor.dtype.is_integer:
                yield from _index(tensor, read_by)
            else:
                yield from _floats(tensor, read_by, huge=size[root] >= huge_bytes(graph))


def _floats(
    tensor: tf.Tensor, readers: Sequence[tuple[tf.Operation, int]], *, huge: bool
) -> list[Part]:
    pooling = [op for op, k in readers if op.type == "MaxPoolGrad" and k == 0]
    rectifying = [op for op, _ in readers if op.type == "ReluGrad"]
    if len(pooling) == len(rectifying) == 1 and len(readers) == 2:
        (op,), (after,) = pooling, rectifying
        both = _winners(tensor, op, 0, after) if after.inputs[0].op is op else None
        if both is not None:
            return [both]
    found = [_sign(tensor, op, k) or _winners(tensor, op, k) for op, k in readers]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) and not huge:
        return []
    # Readers of the same part share it.
    shared: dict[str, Part] = {}
    for part in parts:
        first = shared.get(part.name)
        shared[part.name] = part if first is None else _together(first, part)
    return list(shared.values())


def _together(one: Part, other: Part) -> Part:
    """Return one part for the readers of two equal parts."""

    def give(taken: tf.Tensor) -> Sequence[tf.Tensor]:
        given = list(one.give(taken))
        return [*given, *given[: len(other.readers)]]

    return replace(one, readers=(*one.readers, *other.readers), give=give)


def _sign(tensor: tf.Tensor, op: tf.Operation, k: int) -> Part | None:
    if _SIGNS.get(op.type) != k or not tensor.dtype.is_floating:
        return None
    most = 6 if op.type == "Relu6Grad" else None

    def take(x: tf.Tensor) -> tf.Tensor:
        positive = x > 0
        return positive if most is None else tf.logical_and(positive, x < most)

    def give(taken: tf.Tensor) -> Sequence[tf.Tensor]:
        return [tf.cast(taken, tensor.dtype)]

    return Part(tensor, "sign" if most is None else "linear", True, ((op, k),), take, give)


def _winners(
    tensor: tf.Tensor, op: tf.Operation, k: int, after: tf.Operation | None = None
) -> Part | None:
    """Return the largest elements of windows that tile the tensor (all of several equal ones).

    ``after``: the gradient of a rectifier that reads the gradient of pooling. Then only positive
    elements matter, since it makes the gradient of all others zero.
    """
    if op.type != "MaxPoolGrad" or k != 0 or op.get_attr("data_format") != b"NHWC":
        return None
    pooled = op.inputs[1]
    window = op.get_attr("ksize")
    rows, columns, pools = tensor.shape[1], tensor.shape[2], pooled.shape.as_list()
    if window != op.get_attr("strides") or window[0] != 1 or window[3] != 1:
        return None
    if None in (rows, columns, *pools[1:]):
        return None
    _, high, wide, _ = window
    if pools[1] * high != rows or pools[2] * wide != columns:
        return None
    tiles = [-1, pools[1], high, pools[2], wide, pools[3]]

    def take(x: tf.Tensor) -> tf.Tensor:
        largest = tf.reshape(pooled, [-1, pools[1], 1, pools[2], 1, pools[3]])
        # NaN is not less than any number.
        below = tf.reshape(x, tiles) < largest
        winners = tf.reshape(tf.logical_not(below), [-1, *tensor.shape.as_list()[1:]])
        return winners if after is None else tf.logical_and(winners, x > 0)

    def give(taken: tf.Tensor) -> Sequence[tf.Tensor]:
        numbers = tf.ensure_shape(tf.cast(taken, tensor.dtype), tensor.shape)
        largest = tf.reduce_max(tf.reshape(numbers, tiles), [2, 4])
        return [numbers, tf.ensure_shape(largest, pooled.shape)]

    def give_both(taken: tf.Tensor) -> Sequence[tf.Tensor]:
        # The gradient of pooling reads the result of pooling in any case.
        largest = tf.reshape(pooled, [-1, pools[1], 1, pools[2], 1, pools[3]])
        numbers = tf.where(tf.reshape(taken, tiles), largest, tf.zeros([], tensor.dtype))
        return [
            tf.ensure_shape(tf.reshape(numbers, [-1, *tensor.shape.as_list()[1:]]), tensor.shape)
        ] * 2

    if after is not None:
        return Part(tensor, "winners", True, ((op, 0), (after, 1)), take, give_both)
    # Windows of another size have other winners.
    return Part(tensor, f"winners_{high}x{wide}", True, ((op, 0), (op, 1)), take, give)


def _index(tensor: tf.Tensor, readers: Sequence[tuple[tf.Operation, int]]) -> list[Part]:
    most = _most(tensor)
    fits = [t for t in (tf.uint8, tf.uint16, tf.int32) if most is not None and most <= t.max]
    if not fits or fits[0].size >= tensor.dtype.size:
        return []

    def take(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, fits[0])

    def give(taken: tf.Tensor) -> Sequence[tf.Tensor]:
        return [tf.cast(taken, tensor.dtype)] * len(readers)

    return [Part(tensor, "index", False, tuple(readers), take, give)]


def _most(tensor: tf.Tensor) -> int | None:
    """Return the largest index that ``tensor`` can hold; ``None``: it has none, or unknown."""
    op = tensor.op
    if not op.inputs or op.inputs[0].shape.rank is None:
        return None
    shape = op.inputs[0].shape.as_list()
    if op.type == "TopKV2" and tensor.value_index == 1:
        return _below(shape[-1])
    if op.type in ("ArgMax", "ArgMin"):
        axis = tf.get_static_value(op.inputs[1])
        return None if axis is None else _below(shape[int(axis)])
    if op.type == "MaxPoolWithArgmax" and tensor.value_index == 1:
        first = 0 if op.get_attr("include_batch_in_index") else 1
        return _below(None if None in shape[first:] else math.prod(shape[first:]))
    return None


def _below(many: int | None) -> int | None:
    return None if many is None else many - 1
