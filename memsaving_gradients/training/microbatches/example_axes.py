"""Rules for the axes of the examples in an op's outputs, from their axes in its inputs.

There is one rule for each kind of op; an unknown op is assumed to leave axes in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.ops import op_types

__all__ = [
    "BY_NUMBERS",
    "NONE",
    "PRODUCTS",
    "RULES",
    "UNKNOWN",
    "Axes",
    "MixedError",
    "elementwise",
    "kept",
    "sizes_of",
    "sliced",
    "sums_over_both",
]

Axes = frozenset[int]
Numbers = npt.NDArray[np.integer[Any]]

NONE: Axes = frozenset()
#: Fact: the substitute for unknown sizes: a prime, which is no product of other sizes.
UNKNOWN = 7919
#: Products of two matrices, and the attributes that say whether each is transposed.
PRODUCTS = {
    "MatMul": ("transpose_a", "transpose_b"),
    "SparseMatMul": ("transpose_a", "transpose_b"),
    "BatchMatMul": ("adj_x", "adj_y"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
}
_REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm".split())
_ALONG_LAST = frozenset("Softmax LogSoftmax".split())
#: Elementwise ops that never write into an input's buffer, as their results have another type.
_COMPARISONS = frozenset(
    "Equal NotEqual Greater GreaterEqual Less LessEqual ApproximateEqual Cast".split()
)
#: Ops that may write into an input's buffer, but are not elementwise.
_OF_ROWS = frozenset("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits".split())
_LONGER_OR_SHORTER = frozenset(
    "Concat ConcatV2 MirrorPad Pad PadV2 Slice Split SplitV Tile".split()
)
#: Reductions of rows that have the same number in the second input.
_SEGMENTS = frozenset(
    """SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum UnsortedSegmentMax
    UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum""".split()
)


class MixedError(Exception):
    """The error that an op mixes examples."""


def elementwise(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of an elementwise op, which aligns inputs at their last axes."""
    if op.type in _ALONG_LAST and out.shape.rank - 1 in reads[0]:
        raise MixedError
    found: set[int] = set()
    for tensor, axes in zip(op.inputs, reads, strict=True):
        found |= {axis + out.shape.rank - tensor.shape.rank for axis in axes}
    return frozenset(found)


def kept(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of an unknown op: an axis stays in place if the output's is as long, and all
    inputs agree."""
    sizes = out.shape.as_list()
    found = {
        axis
        for tensor, axes in zip(op.inputs, reads, strict=True)
        for axis in axes
        if axis < len(sizes) and sizes[axis] == tensor.shape.as_list()[axis]
    }
    return frozenset(found) if len(found) == 1 else None


def _same_rank(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of an op that makes axes longer or shorter, and leaves them in place."""
    found = [
        axes for t, axes in zip(op.inputs, reads, strict=True) if t.shape.rank == out.shape.rank
    ]
    return NONE.union(*found)


def _product(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of ``[..., rows, inner] @ [..., inner, columns]``."""
    found: set[int] = set()
    for k, (tensor, axes, inner) in enumerate(zip(op.inputs, reads, _summed(op), strict=True)):
        last = tensor.shape.rank - 1
        for axis in axes - inner:
            found.add(
                axis + out.shape.rank - 1 - last if axis < last - 1 else out.shape.rank - 2 + k
            )
    return frozenset(found)


def _einsum(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of an einsum by its labels; with an ellipsis, as of an unknown op."""
    terms, result = _labels(op)
    if "." in result:
        return kept(op, out, reads)
    seen = {term[axis] for term, axes in zip(terms, reads, strict=True) for axis in axes}
    return frozenset(result.index(label) for label in seen if label in result)


def _labels(op: tf.Operation) -> tuple[list[str], str]:
    terms, _, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
    return terms.split(","), result


def _summed(op: tf.Operation) -> list[Axes]:
    """Return, for each factor of a product, the axes that the product sums over."""
    if op.type == "Einsum":
        terms, result = _labels(op)
        if "." in result:
            return [NONE for _ in terms]
        return [frozenset(k for k, label in enumerate(t) if label not in result) for t in terms]
    turned = [bool(op.get_attr(name)) for name in PRODUCTS[op.type]]
    last = [tensor.shape.rank - 1 for tensor in op.inputs]
    return [frozenset({last[0] - turned[0]}), frozenset({last[1] - (not turned[1])})]


def sums_over_both(op: tf.Operation, reads: Sequence[Axes]) -> bool:
    """Return whether ``op`` is a product that sums over the examples of both factors."""
    if op.type != "Einsum" and op.type not in PRODUCTS:
        return False
    return len(reads) > 1 and all(
        axes & inner for axes, inner in zip(reads, _summed(op), strict=True)
    )


def _reduction(
    op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes], given: Numbers | None
) -> Axes | None:
    if given is None:
        return None
    rank = op.inputs[0].shape.rank
    dropped = {int(axis) % rank for axis in given.ravel()}
    keeps = out.shape.rank == rank
    return frozenset(
        axis if keeps else axis - sum(other < axis for other in dropped)
        for axis in reads[0] - dropped
    )


def _reshape(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes with as many elements before them, even if joined with axes after them."""
    before, after = sizes_of(op.inputs[0]), sizes_of(out)
    ways = {math.prod(after[:k]): k for k in range(len(after)) if after[k] != 1}
    found = [ways.get(math.prod(before[:axis])) for axis in reads[0]]
    return None if None in found else frozenset(axis for axis in found if axis is not None)


def sizes_of(tensor: tf.Tensor) -> list[int]:
    return [UNKNOWN if size is None else size for size in tensor.shape.as_list()]


def _transpose(
    op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes], given: Numbers | None
) -> Axes | None:
    return None if given is None else frozenset(list(given).index(axis) for axis in reads[0])


def _expand(
    op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes], given: Numbers | None
) -> Axes | None:
    if given is None:
        return None
    added = int(given.ravel()[0]) % out.shape.rank
    return frozenset(axis + (axis >= added) for axis in reads[0])


def _pack(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    added = op.get_attr("axis") % out.shape.rank
    return frozenset(axis + (axis >= added) for axes in reads for axis in axes)


def _unpack(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    dropped = op.get_attr("axis") % op.inputs[0].shape.rank
    return frozenset(axis - (axis > dropped) for axis in reads[0] if axis != dropped)


def _slice(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of a strided slice, whose masks add and drop axes."""
    return frozenset(
        place for _, source, place, dropped in sliced(op) if source in reads[0] and not dropped
    )


def sliced(op: tf.Operation) -> Iterator[tuple[int | None, int, int, bool]]:
    """Yield, for each axis of a strided slice's input: the number of its entry in begin and end
    (``None``: it has no entry, and stays whole), the axis, its place in the output, and whether it
    is dropped."""
    masks = [op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis")]
    given = op.inputs[1].shape.num_elements() or 0
    entries = [tuple(bool(mask >> k & 1) for mask in masks) for k in range(given)]
    if not masks[0]:
        # All axes after the last entry stay whole.
        entries.append((True, False, False))
    rank = op.inputs[0].shape.rank
    used = sum(not (rest or new) for rest, new, _ in entries)
    place = source = 0
    for number, (rest, new, dropped) in enumerate(entries):
        if new:
            place += 1
            continue
        for _ in range(rank - used if rest else 1):
            yield None if rest else number, source, place, dropped
            place += not dropped
            source += 1


def _segments(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Return the axes of a reduction over segments: the axes of their numbers become one."""
    covered = op.inputs[1].shape.rank
    return frozenset(axis - covered + 1 for axis in reads[0] if axis >= covered)


RULES: dict[str, Callable[[tf.Operation, tf.Tensor, Sequence[Axes]], Axes | None]] = {
    **dict.fromkeys((op_types.FORWARDING | _COMPARISONS) - _OF_ROWS, elementwise),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(_LONGER_OR_SHORTER, _same_rank),
    "Einsum": _einsum,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Pack": _pack,
    "Unpack": _unpack,
    "StridedSlice": _slice,
    **dict.fromkeys(_SEGMENTS, _segments),
}
#: Rules that need the numbers in the second input, if these do not depend on data.
BY_NUMBERS: dict[
    str, Callable[[tf.Operation, tf.Tensor, Sequence[Axes], Numbers | None], Axes | None]
] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "Transpose": _transpose,
    "ConjugateTranspose": _transpose,
    "ExpandDims": _expand,
}
