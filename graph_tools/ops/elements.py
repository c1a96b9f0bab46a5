"""The number of elements of a tensor whose shape does not say it, but depends on the run.

An unknown dimension counts as the batch, each further one as `UNKNOWN_DIM`. If only one dimension
is unknown, the inputs of its op bound it. A slice has as many rows as its ends are apart, if they
say so. An op that chooses rows (a mask, other slices, unique values) gives no more than it reads. A
reshape or a concatenation keeps the number of elements. A stacked list has as many rows as the loop
that fills it has steps. All other ops give as many rows as the largest of their inputs. O(1) for
each op with an unknown shape, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.ops.slices import slice_length
from graph_tools.ops.trip_counts import behind_identities, unknown_steps, whole_steps
from graph_tools.tf_private import loops

__all__ = ["Count", "elements", "most_chosen", "rows"]

#: The size to assume for unknown dimensions other than the batch.
UNKNOWN_DIM = 64


class Count(NamedTuple):
    """A number as a function of the batch size: ``fixed + per_example × batch``."""

    fixed: int
    per_example: int

    def at(self, batch: int) -> int:
        """Return the number at a batch of ``batch`` examples."""
        return self.fixed + self.per_example * batch

    def over(self, parts: int) -> Count:
        """Return the number divided by ``parts``, rounded up."""
        return Count(*(-(-number // max(parts, 1)) for number in self))


class _Rows(dict[int, Count | None]):
    """The rows of an op's outputs, by the op's id (``None``: nothing bounds them); ``steps``: the
    result of `unknown_steps` when the rows were counted."""

    steps: int | None = None


def elements(tensor: tf.Tensor) -> Count:
    """Return the most elements of a tensor, as far as anything bounds them.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.zeros([100, 4])
    ...     positive = tf.tanh(tf.boolean_mask(x, x[:, 0] > 0))
    >>> positive.shape, elements(positive)
    (TensorShape([None, 4]), Count(fixed=400, per_example=0))
    """
    if tensor.shape.rank is None:
        return Count(0, UNKNOWN_DIM)
    known, unknown = _dimensions(tensor)
    if not unknown:
        return Count(known, 0)
    if unknown > 1:
        return Count(0, known * UNKNOWN_DIM ** (unknown - 1))
    fixed, rate = rows(tensor)
    return Count(known * fixed, known * rate)


def rows(tensor: tf.Tensor) -> Count:
    """Return the maximum of the one unknown dimension of ``tensor``; if nothing bounds it, the
    batch."""
    known = notes(tensor.graph, _Rows)
    if (steps := unknown_steps(tensor.graph)) != known.steps:
        known.clear()
        known.steps = steps
    stack = [(tensor.op, False)]
    while stack:
        op, ready = stack.pop()
        if ready:
            known[id(op)] = _bounded(op, known)
        elif id(op) not in known:
            known[id(op)] = None  # Ends the cycle of a TensorFlow 1 loop.
            stack.append((op, True))
            stack += [(t.op, False) for t in (*filter(_has_rows, op.inputs), *_shaped_like(op))]
    return known[id(tensor.op)] or Count(0, 1)


def most_chosen(ops: Iterable[tf.Operation], batch: int) -> int | None:
    """Return the most rows that any of ``ops`` may choose, when it runs, from a known number of
    rows; ``None``: no op does so."""
    found = [
        bound.at(batch)
        for op in ops
        if op.type in op_types.CHOOSERS and slice_length(op) is None
        for out in op.outputs
        if _has_rows(out) and (bound := rows(out)).fixed
    ]
    return max(found, default=None)


def _bounded(op: tf.Operation, known: dict[int, Count | None]) -> Count | None:
    """Return a bound of the rows of the outputs of ``op``, from the rows of its inputs."""
    if not op.inputs:
        return None
    first, out = op.inputs[0], next(filter(_has_rows, op.outputs))
    if op.type == "Where":
        # A row for each element, if all of them are true.
        return None if first.shape.rank is None else elements(first)
    if (length := slice_length(op)) is not None:
        return Count(length, 0)
    if op.type in op_types.CHOOSERS and first.shape.is_fully_defined():
        return elements(first).over(_dimensions(out)[0])
    if op.type in op_types.AXES:
        # At most one axis for each dimension.
        return Count(max(elements(t).fixed for t in op.inputs), 0)
    if op.type == "TensorListStack":
        filled = behind_identities(first).op
        return Count(whole_steps(filled), 0) if filled.type in loops.LOOPS else None
    if op.type in op_types.VIEWS | op_types.CONCATENATIONS and len(op.outputs) == 1:
        parts = [t for t in op.inputs if t.shape.rank != 0]
        parts = parts[:1] if op.type in op_types.VIEWS else parts
        if all(_is_bounded(t, known) for t in parts):
            sizes = list(map(elements, parts))
            whole = Count(sum(n.fixed for n in sizes), sum(n.per_example for n in sizes))
            return whole.over(_dimensions(out)[0])
    for read in (filter(_has_rows, op.inputs), _shaped_like(op)):
        bounds = [bound for t in read if (bound := known[id(t.op)]) is not None]
        if bounds:
            return Count(*map(max, zip(*bounds, strict=True)))
    return None


def _is_bounded(tensor: tf.Tensor, known: dict[int, Count | None]) -> bool:
    """Return whether the elements of an input are known or bounded, and so are no guess."""
    if _has_rows(tensor):
        return known[id(tensor.op)] is not None
    return bool(tensor.shape.is_fully_defined())


def _shaped_like(op: tf.Operation) -> list[tf.Tensor]:
    """Return the tensors with rows whose shapes are computed into inputs of ``op``: the gradient of
    a sum is broadcast to the shape of the summed tensor."""
    found: list[tf.Tensor] = []
    seen: set[tf.Operation] = set()
    stack = [t.op for t in op.inputs if _is_size(t)]
    while stack:
        maker = stack.pop()
        if maker in seen:
            continue
        seen.add(maker)
        if maker.type in op_types.SHAPES:
            found += filter(_has_rows, maker.inputs)
        else:
            stack += [t.op for t in maker.inputs if _is_size(t)]
    return found


def _is_size(tensor: tf.Tensor) -> bool:
    """Return whether a tensor may be a shape, or a part of one."""
    return tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank in (0, 1)


def _has_rows(tensor: tf.Tensor) -> bool:
    """Return whether exactly one dimension of ``tensor`` is unknown."""
    return tensor.shape.rank is not None and tensor.shape.as_list().count(None) == 1


def _dimensions(tensor: tf.Tensor) -> tuple[int, int]:
    """Return the product of the known dimensions, and the number of unknown dimensions."""
    shape = tensor.shape.as_list()
    return math.prod(dim for dim in shape if dim is not None), shape.count(None)
