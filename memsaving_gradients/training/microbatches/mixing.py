"""Losses that compare the examples of a batch, which microbatches cannot: found in the graph of a
microbatch.

A contrastive loss takes the product of all examples with all examples (van den Oord et al. 2018;
Chen et al. 2020), a redundancy loss that of all features with all features over the examples
(Zbontar et al. 2021), and some losses normalize by a statistic of the batch. In microbatches each
example meets fewer others, so that gradients are not those of the batch.

The module follows the axes of the examples, and their order, through the ops behind the results. An
op mixes examples

- where a tensor gets two such axes;
- where examples meet others in another order: shifted, reversed, chosen, cut or shuffled ones;
- where it cumulates or ranks examples;
- where something that was reduced over examples meets examples again;
- where a product that sums over the examples of both factors goes into an op that is not linear;
- where anything of a loss that was reduced over examples, and depends on variables, does. (What a
  step returns besides its gradients may be such: a root mean square, a perplexity.)

Sums and means add up, and so do gradients, which are such products and go into none. Linear in the
number of ops. An op that is not known is taken to leave axes where they are, and what becomes of an
axis may not be known at all: mixing may be missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.costs.parameters import parameters
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.grappler.common_subexpressions import equal_ops
from graph_tools.ops import op_types

__all__ = ["mixing_op"]

Axes = frozenset[int]
Numbers = npt.NDArray[np.integer[Any]]

_NONE: Axes = frozenset()
#: In the place of sizes that are unknown: a prime, which no product of others is.
UNKNOWN = 7919
#: Products of two matrices, and the attributes that say whether each is transposed.
_PRODUCTS = {
    "MatMul": ("transpose_a", "transpose_b"),
    "SparseMatMul": ("transpose_a", "transpose_b"),
    "BatchMatMul": ("adj_x", "adj_y"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
}
_REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm".split())
_ALONG_LAST = frozenset("Softmax LogSoftmax".split())
#: Elementwise ops that never write into the buffer of an input, whose results are not of its type.
_COMPARISONS = frozenset(
    "Equal NotEqual Greater GreaterEqual Less LessEqual ApproximateEqual Cast".split()
)
#: Others that do write into it, but are not elementwise.
_OF_ROWS = frozenset("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits".split())
_LONGER_OR_SHORTER = frozenset(
    "Concat ConcatV2 MirrorPad Pad PadV2 Slice Split SplitV Tile".split()
)
_LINEAR = op_types.VIEWS | frozenset(
    """Add AddN AddV2 BiasAdd Cast ConcatV2 Mean Neg Pack Slice Split StridedSlice Sub Sum
    Transpose""".split()
)
_QUOTIENTS = frozenset("Div DivNoNan RealDiv".split())
_SELECTIONS = frozenset("Select SelectV2".split())
#: Reductions of what has the same number in the second input.
_SEGMENTS = frozenset(
    """SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum UnsortedSegmentMax
    UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum""".split()
)
#: Ops along whose axis, the second input, each example adds to those before it.
_CUMULATIVE = frozenset("Cumsum Cumprod CumulativeLogsumexp".split())
#: Ops that put examples into another order, with the input that holds the examples and the one that
#: says the axis; ``None``: the first axis.
_MOVES: dict[str, tuple[int, int | None]] = {
    "ConcatV2": (0, -1),
    "GatherV2": (0, 2),
    "RandomShuffle": (0, None),
    "ReverseV2": (0, 1),
    "Roll": (0, 2),
    "Split": (1, 0),
    "SplitV": (0, 2),
}
#: They look at shapes only.
_SHAPES = op_types.SHAPE_READERS | {"BroadcastGradientArgs"}


class _Mixed(Exception):
    """The op at hand mixes examples."""


def mixing_op(
    results: Sequence[tf.Tensor],
    batch: Sequence[tf.Tensor],
    *,
    stop: Sequence[tf.Tensor] = (),
    statistics: bool = True,
    losses: bool = False,
) -> tf.Operation | None:
    """The first op behind ``results`` that mixes examples; ``None``: there is none.

    Parameters
    ----------
    results
        Tensors of one graph.
    batch
        Tensors whose first axis is that of the examples.
    stop
        Tensors behind which nothing is looked at: gradients, which are sums of products over the
        examples.
    statistics
        Whether it counts that what was reduced over examples meets examples again.
    losses
        Whether ``results`` are losses: what an op makes of a sum over examples counts then, unless
        it is linear.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8])
    ...     similar = tf.matmul(x, x, transpose_b=True, name="similar")
    ...     op = mixing_op([tf.reduce_mean(similar)], [x])
    >>> op.name
    'similar'
    """
    ops = capture(results, stop=stop)
    found = _Axes(ops, batch, statistics, losses)
    cut = {t.op for t in stop}
    for op in ops.ops:
        if op in cut:
            continue
        try:
            found.follow(op)
        except _Mixed:
            return op
    return None


class _Axes:
    """For each tensor, by reference, the axes of the examples.

    ``reduced``: tensors that examples were reduced to; ``trained``: tensors that depend on
    variables; ``products``: of these, sums of products of
    examples, and what is linear in them; ``order``: for tensors of examples, what has put them into
    another order.
    """

    def __init__(
        self, ops: OpGraph, batch: Sequence[tf.Tensor], statistics: bool, losses: bool
    ) -> None:
        self.of = {t.ref(): frozenset({0}) for t in batch if t.shape.rank}
        self.reduced: set[Any] = set()
        self.products: set[Any] = set()
        self.order: dict[Any, tuple[object, ...]] = {}
        self.trained: set[Any] = set()
        self.statistics, self.losses = statistics, losses
        self.ops, self.numbers = ops, parameters(ops, UNKNOWN)
        self._twins = equal_ops(ops)

    def follow(self, op: tf.Operation) -> None:
        """Note the axes of what ``op`` gives."""
        reads = [self.of.get(t.ref(), _NONE) for t in op.inputs]
        meets = [t.ref() in self.reduced for t in op.inputs]
        trained = [t.ref() in self.trained for t in op.inputs]
        if any(trained) or op.type in op_types.READS:
            self.trained.update(out.ref() for out in op.outputs)
        if op.type in _SHAPES or not (any(reads) or any(meets)):
            return
        known = all(t.shape.rank is not None for t in (*op.inputs, *op.outputs))
        of_products = [t.ref() in self.products for t in op.inputs]
        depends = [bool(axes) or alone for axes, alone in zip(reads, meets, strict=True)]
        if any(of_products) and not _is_linear(op, depends):
            raise _Mixed
        sums = [alone and learns for alone, learns in zip(meets, trained, strict=True)]
        if self.losses and any(sums) and _is_nonlinear(op, sums):
            raise _Mixed
        if any(of_products) or (known and _sums_over_both(op, reads)):
            self.products.update(out.ref() for out in op.outputs)
        if self.statistics and any(meets) and any(reads):
            raise _Mixed
        orders = {
            self.order.get(t.ref(), ()) for t, axes in zip(op.inputs, reads, strict=True) if axes
        }
        moves = known and any(reads) and self._moves(op, reads)
        if len(orders) > 1 and not (moves and op.type == "ConcatV2"):
            raise _Mixed
        for number, out in enumerate(op.outputs):
            axes = (self._axes(op, out, reads) if known else None) if any(reads) else _NONE
            if axes is None:
                continue
            if len(axes) > 1:
                raise _Mixed
            if axes:
                self.of[out.ref()] = axes
                order = next(iter(orders))
                self.order[out.ref()] = (*order, self._way(op, number)) if moves else order
            elif out.dtype.is_floating:
                self.reduced.add(out.ref())

    def _axes(self, op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
        """Axes of the examples in a result; ``None``: they are not known."""
        if op.type in _BY_NUMBERS:
            given = self.numbers.get(self.ops.value(op.inputs[1]))
            return _BY_NUMBERS[op.type](op, out, reads, given)
        return _RULES.get(op.type, _kept)(op, out, reads)

    def _moves(self, op: tf.Operation, reads: Sequence[Axes]) -> bool:
        """Return whether ``op`` gives examples in another order than it reads them.

        Raises if it makes each of them from those before it, or ranks them.
        """
        if op.type in _CUMULATIVE and self._touches(op, reads[0], 0, 1):
            raise _Mixed
        if op.type == "TopKV2" and op.inputs[0].shape.rank - 1 in reads[0]:
            raise _Mixed
        if op.type == "StridedSlice":
            return any(
                source in reads[0] and not dropped and not self._is_whole(op, entry, source)
                for entry, source, _, dropped in _sliced(op)
            )
        if op.type == "Slice":
            return any(not self._is_whole(op, axis, axis) for axis in reads[0])
        if op.type not in _MOVES:
            return False
        given, by = _MOVES[op.type]
        if op.type == "GatherV2" and reads[0] and op.get_attr("batch_dims") > min(reads[0]):
            return False
        axes = _NONE.union(*reads) if op.type == "ConcatV2" else reads[given]
        return 0 in axes if by is None else self._touches(op, axes, given, by)

    def _touches(self, op: tf.Operation, axes: Axes, given: int, by: int) -> bool:
        """Return whether one of the axes that input ``by`` names holds the examples of ``given``."""
        named = self.numbers.get(self.ops.value(op.inputs[by]))
        rank = op.inputs[given].shape.rank
        return named is not None and any(int(axis) % rank in axes for axis in named.ravel())

    def _is_whole(self, op: tf.Operation, entry: int | None, axis: int) -> bool:
        """Return whether a slice takes all of an axis; ``entry``: its place in what is given."""
        if entry is None:
            return True
        begin, end = (self.numbers.get(self.ops.value(op.inputs[k])) for k in (1, 2))
        size = _numbers(op.inputs[0])[axis]
        if op.type == "Slice":
            if begin is None or end is None:
                return False
            return begin[entry] == 0 and end[entry] in (-1, size)
        masks = [op.get_attr(f"{name}_mask") >> entry & 1 for name in ("begin", "end")]
        first = masks[0] or (begin is not None and begin[entry] == 0)
        last = masks[1] or (end is not None and end[entry] >= size)
        step = self.numbers.get(self.ops.value(op.inputs[3]))
        return bool(first and last and step is not None and step[entry] == 1)

    def _way(self, op: tf.Operation, output: int) -> object:
        """Return what is the same for ops that put examples into the same order."""
        if op.type in ("ConcatV2", "RandomShuffle"):
            return op.name
        given = _MOVES.get(op.type, (0, None))[0]
        others = [self.ops.value(t) for k, t in enumerate(op.inputs) if k != given]
        said = []
        for value in others:
            number = self.numbers.get(value)
            maker = int(self.ops.producer[value])
            place = value - int(self.ops.first_value[maker])
            same = (self._twins.get(maker, maker), place)
            said.append(same if number is None else (number.shape, number.tobytes()))
        masks = op.type == "StridedSlice" and [op.get_attr(f"{m}_mask") for m in ("begin", "end")]
        return (op.type, output, *said, str(masks))


def _elementwise(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Axes are aligned at the end."""
    if op.type in _ALONG_LAST and out.shape.rank - 1 in reads[0]:
        raise _Mixed
    found: set[int] = set()
    for tensor, axes in zip(op.inputs, reads, strict=True):
        found |= {axis + out.shape.rank - tensor.shape.rank for axis in axes}
    return frozenset(found)


def _kept(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Of an op that is not known: an axis stays where it is, if there is one as long, and if all
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
    """Of what makes axes longer or shorter, and leaves them where they are."""
    found = [
        axes for t, axes in zip(op.inputs, reads, strict=True) if t.shape.rank == out.shape.rank
    ]
    return _NONE.union(*found)


def _product(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """``[..., rows, inner] @ [..., inner, columns]``."""
    found: set[int] = set()
    for k, (tensor, axes, inner) in enumerate(zip(op.inputs, reads, _summed(op), strict=True)):
        last = tensor.shape.rank - 1
        for axis in axes - inner:
            found.add(
                axis + out.shape.rank - 1 - last if axis < last - 1 else out.shape.rank - 2 + k
            )
    return frozenset(found)


def _einsum(op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
    """Labels; where there is an ellipsis, the op is taken for one that is not known."""
    terms, result = _labels(op)
    if "." in result:
        return _kept(op, out, reads)
    seen = {term[axis] for term, axes in zip(terms, reads, strict=True) for axis in axes}
    return frozenset(result.index(label) for label in seen if label in result)


def _labels(op: tf.Operation) -> tuple[list[str], str]:
    terms, _, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
    return terms.split(","), result


def _summed(op: tf.Operation) -> list[Axes]:
    """For each factor of a product the axes that it sums over."""
    if op.type == "Einsum":
        terms, result = _labels(op)
        if "." in result:
            return [_NONE for _ in terms]
        return [frozenset(k for k, label in enumerate(t) if label not in result) for t in terms]
    turned = [bool(op.get_attr(name)) for name in _PRODUCTS[op.type]]
    last = [tensor.shape.rank - 1 for tensor in op.inputs]
    return [frozenset({last[0] - turned[0]}), frozenset({last[1] - (not turned[1])})]


def _sums_over_both(op: tf.Operation, reads: Sequence[Axes]) -> bool:
    """Whether ``op`` is a product of examples of one factor with those of the other, summed up."""
    if op.type != "Einsum" and op.type not in _PRODUCTS:
        return False
    return len(reads) > 1 and all(
        axes & inner for axes, inner in zip(reads, _summed(op), strict=True)
    )


def _is_linear(op: tf.Operation, depends: Sequence[bool]) -> bool:
    """Whether ``op`` is linear in what depends on the batch; ``depends``: which inputs do."""
    if op.type in ("Mul", "RealDiv", "Div", "MatMul"):
        return sum(depends) < 2 and (op.type in ("Mul", "MatMul") or not depends[1])
    return op.type in _LINEAR


def _is_nonlinear(op: tf.Operation, depends: Sequence[bool]) -> bool:
    """Return whether ``op`` is known not to be linear in the inputs of which ``depends`` says so."""
    if op.type in _SELECTIONS:
        return depends[0]
    if op.type in _QUOTIENTS:
        return depends[1]
    known = op.type in _PRODUCTS or _RULES.get(op.type) is _elementwise
    return known and not _is_linear(op, depends)


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
    """The axis with as many elements before it: also where it was joined with those behind it."""
    before, after = _numbers(op.inputs[0]), _numbers(out)
    ways = {math.prod(after[:k]): k for k in range(len(after)) if after[k] != 1}
    found = [ways.get(math.prod(before[:axis])) for axis in reads[0]]
    return None if None in found else frozenset(axis for axis in found if axis is not None)


def _numbers(tensor: tf.Tensor) -> list[int]:
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
    """Of a strided slice, as its masks say: axes are added and dropped."""
    return frozenset(
        place for _, source, place, dropped in _sliced(op) if source in reads[0] and not dropped
    )


def _sliced(op: tf.Operation) -> Iterator[tuple[int | None, int, int, bool]]:
    """Yield, for each axis of what a strided slice cuts: the number of its entry in what is given
    (``None``: it is not given, and stays whole), the axis, its place in the result, and whether it
    is dropped."""
    masks = [op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis")]
    given = op.inputs[1].shape.num_elements() or 0
    entries = [tuple(bool(mask >> k & 1) for mask in masks) for k in range(given)]
    if not masks[0]:
        # All axes behind those that are given stay.
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
    """Of sums over segments: the axes of the segments' numbers become one."""
    covered = op.inputs[1].shape.rank
    return frozenset(axis - covered + 1 for axis in reads[0] if axis >= covered)


_RULES: dict[str, Callable[[tf.Operation, tf.Tensor, Sequence[Axes]], Axes | None]] = {
    **dict.fromkeys((op_types.FORWARDING | _COMPARISONS) - _OF_ROWS, _elementwise),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_LONGER_OR_SHORTER, _same_rank),
    "Einsum": _einsum,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Pack": _pack,
    "Unpack": _unpack,
    "StridedSlice": _slice,
    **dict.fromkeys(_SEGMENTS, _segments),
}
#: Those that go by the numbers in their second input, where these do not depend on data.
_BY_NUMBERS: dict[
    str, Callable[[tf.Operation, tf.Tensor, Sequence[Axes], Numbers | None], Axes | None]
] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "Transpose": _transpose,
    "ConjugateTranspose": _transpose,
    "ExpandDims": _expand,
}
