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

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from graph_tools.costs.parameters import parameters
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.graph.topology import Edges, ancestors
from graph_tools.grappler.common_subexpressions import equal_ops
from graph_tools.ops import op_types
from memsaving_gradients.training.microbatches.example_axes import (
    BY_NUMBERS,
    NONE,
    PRODUCTS,
    RULES,
    UNKNOWN,
    Axes,
    MixedError,
    elementwise,
    kept,
    sizes_of,
    sliced,
    sums_over_both,
)

__all__ = ["mixing_op"]

_LINEAR = op_types.VIEWS | frozenset(
    """Add AddN AddV2 BiasAdd Cast ConcatV2 Mean Neg Pack Slice Split StridedSlice Sub Sum
    Transpose""".split()
)
_QUOTIENTS = frozenset("Div DivNoNan RealDiv".split())
_SELECTIONS = frozenset("Select SelectV2".split())
#: Ops along whose axis, the second input, each example adds to those before it.
_CUMULATIVE = frozenset("Cumsum Cumprod CumulativeLogsumexp".split())
#: Fact: ops that put examples into another order, with the input that holds the examples and the
#: one that says the axis; ``None``: the first axis.
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


def mixing_op(
    results: Sequence[tf.Tensor],
    batch: Sequence[tf.Tensor],
    *,
    stop: Sequence[tf.Tensor] = (),
    statistics: bool = True,
    losses: Sequence[tf.Tensor] = (),
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
        Those of ``results`` that are differentiated: what an op behind them makes of a sum over
        examples counts, unless it is linear.

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
    cut = {t.op for t in stop}
    found = _Axes(ops, batch, statistics, ancestors([t.op for t in losses], Edges(cut)))
    for op in ops.ops:
        if op in cut:
            continue
        try:
            found.follow(op)
        except MixedError:
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
        self,
        ops: OpGraph,
        batch: Sequence[tf.Tensor],
        statistics: bool,
        behind_losses: Collection[tf.Operation],
    ) -> None:
        self.of = {t.ref(): frozenset({0}) for t in batch if t.shape.rank}
        self.reduced: set[Any] = set()
        self.products: set[Any] = set()
        self.order: dict[Any, tuple[object, ...]] = {}
        self.trained: set[Any] = set()
        self.statistics, self.behind_losses = statistics, behind_losses
        self.ops, self.numbers = ops, parameters(ops, UNKNOWN)
        self._twins = equal_ops(ops)

    def follow(self, op: tf.Operation) -> None:
        """Note the axes of what ``op`` gives."""
        reads = [self.of.get(t.ref(), NONE) for t in op.inputs]
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
            raise MixedError
        sums = [alone and learns for alone, learns in zip(meets, trained, strict=True)]
        if any(sums) and op in self.behind_losses and _is_nonlinear(op, sums):
            raise MixedError
        if any(of_products) or (known and sums_over_both(op, reads)):
            self.products.update(out.ref() for out in op.outputs)
        if self.statistics and any(meets) and any(reads):
            raise MixedError
        orders = {
            self.order.get(t.ref(), ()) for t, axes in zip(op.inputs, reads, strict=True) if axes
        }
        moves = known and any(reads) and self._moves(op, reads)
        if len(orders) > 1 and not (moves and op.type == "ConcatV2"):
            raise MixedError
        for number, out in enumerate(op.outputs):
            axes = (self._axes(op, out, reads) if known else None) if any(reads) else NONE
            if axes is None:
                continue
            if len(axes) > 1:
                raise MixedError
            if axes:
                self.of[out.ref()] = axes
                order = next(iter(orders))
                self.order[out.ref()] = (*order, self._way(op, number)) if moves else order
            elif out.dtype.is_floating:
                self.reduced.add(out.ref())

    def _axes(self, op: tf.Operation, out: tf.Tensor, reads: Sequence[Axes]) -> Axes | None:
        """Axes of the examples in a result; ``None``: they are not known."""
        if op.type in BY_NUMBERS:
            given = self.numbers.get(self.ops.value(op.inputs[1]))
            return BY_NUMBERS[op.type](op, out, reads, given)
        return RULES.get(op.type, kept)(op, out, reads)

    def _moves(self, op: tf.Operation, reads: Sequence[Axes]) -> bool:
        """Return whether ``op`` gives examples in another order than it reads them.

        Raises if it makes each of them from those before it, or ranks them.
        """
        if op.type in _CUMULATIVE and self._touches(op, reads[0], 0, 1):
            raise MixedError
        if op.type == "TopKV2" and op.inputs[0].shape.rank - 1 in reads[0]:
            raise MixedError
        if op.type == "StridedSlice":
            return any(
                source in reads[0] and not dropped and not self._is_whole(op, entry, source)
                for entry, source, _, dropped in sliced(op)
            )
        if op.type == "Slice":
            return any(not self._is_whole(op, axis, axis) for axis in reads[0])
        if op.type not in _MOVES:
            return False
        given, by = _MOVES[op.type]
        if op.type == "GatherV2" and reads[0] and op.get_attr("batch_dims") > min(reads[0]):
            return False
        axes = NONE.union(*reads) if op.type == "ConcatV2" else reads[given]
        return 0 in axes if by is None else self._touches(op, axes, given, by)

    def _touches(self, op: tf.Operation, axes: Axes, given: int, by: int) -> bool:
        """Return whether one of the axes that input ``by`` names holds the examples of
        ``given``."""
        named = self.numbers.get(self.ops.value(op.inputs[by]))
        rank = op.inputs[given].shape.rank
        return named is not None and any(int(axis) % rank in axes for axis in named.ravel())

    def _is_whole(self, op: tf.Operation, entry: int | None, axis: int) -> bool:
        """Return whether a slice takes all of an axis; ``entry``: its place in what is given."""
        if entry is None:
            return True
        begin, end = (self.numbers.get(self.ops.value(op.inputs[k])) for k in (1, 2))
        size = sizes_of(op.inputs[0])[axis]
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


def _is_linear(op: tf.Operation, depends: Sequence[bool]) -> bool:
    """Whether ``op`` is linear in what depends on the batch; ``depends``: which inputs do."""
    if op.type in ("Mul", "RealDiv", "Div", "MatMul"):
        return sum(depends) < 2 and (op.type in ("Mul", "MatMul") or not depends[1])
    return op.type in _LINEAR


def _is_nonlinear(op: tf.Operation, depends: Sequence[bool]) -> bool:
    """Return whether ``op`` is known not to be linear in the inputs of which ``depends`` says
    so."""
    if op.type in _SELECTIONS:
        return depends[0]
    if op.type in _QUOTIENTS:
        return depends[1]
    known = op.type in PRODUCTS or RULES.get(op.type) is elementwise
    return known and not _is_linear(op, depends)
