"""Find losses that compare examples, which microbatches cannot do, in the graph of a microbatch.

A contrastive loss multiplies all examples with all examples (van den Oord et al. 2018; Chen et al.
2020), a redundancy loss all features with all features over the examples (Zbontar et al. 2021).
Some losses normalize by a statistic of the batch. In a microbatch each example meets fewer others,
so that its gradients are not the gradients of the batch.

The module follows the axes of the examples, and their order, through the ops behind the results. An
op mixes examples if

- its output has two axes of examples;
- it combines examples in different orders: shifted, reversed, chosen, cut or shuffled ones;
- it cumulates or ranks examples;
- it combines examples with a tensor that was reduced over examples;
- it is not linear in a product that sums over the examples of both factors;
- it is part of a loss, and not linear in a tensor that was reduced over examples and depends on
  variables. (Other results of a step may have such ops: a root mean square, a perplexity.)

Sums and means add up. So do gradients, which are such products and enter linear ops only. The cost
is linear in the number of ops. An unknown op is assumed to leave axes in place, and the axes of an
output may be unknown: mixing may be missed.
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
#: Ops that cumulate along an axis, their second input.
_CUMULATIVE = frozenset("Cumsum Cumprod CumulativeLogsumexp".split())
#: Fact: ops that put examples into another order, with the input that holds the examples and the
#: input that names the axis; ``None``: the first axis.
_MOVES: dict[str, tuple[int, int | None]] = {
    "ConcatV2": (0, -1),
    "GatherV2": (0, 2),
    "RandomShuffle": (0, None),
    "ReverseV2": (0, 1),
    "Roll": (0, 2),
    "Split": (1, 0),
    "SplitV": (0, 2),
}
#: Ops that read the shapes of their inputs only.
_SHAPES = op_types.SHAPE_READERS | {"BroadcastGradientArgs"}


def mixing_op(
    results: Sequence[tf.Tensor],
    batch: Sequence[tf.Tensor],
    *,
    stop: Sequence[tf.Tensor] = (),
    statistics: bool = True,
    losses: Sequence[tf.Tensor] = (),
) -> tf.Operation | None:
    """Return the first op behind ``results`` that mixes examples; ``None``: there is none.

    Parameters
    ----------
    results
        Tensors of one graph.
    batch
        Tensors whose first axis is the axis of the examples.
    stop
        Tensors at which the search ends: gradients, which are sums of products over the examples.
    statistics
        Whether an op mixes examples if it combines them with a tensor that was reduced over
        examples.
    losses
        The ``results`` that are differentiated: behind them, an op mixes examples if it is not
        linear in a sum over examples.

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
    """The axes of the examples in each tensor, by reference.

    ``reduced``: tensors without such an axis that were reduced over examples; ``trained``: tensors
    that depend on variables; ``products``: sums of products of examples of both factors, and
    tensors that are linear in them; ``order``: for tensors of examples, a key of each op that
    changed their order.
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
        """Note the axes of the outputs of ``op``; raise `MixedError` if it mixes examples."""
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
        """Return the axes of the examples in an output; ``None``: they are not known."""
        if op.type in BY_NUMBERS:
            given = self.numbers.get(self.ops.value(op.inputs[1]))
            return BY_NUMBERS[op.type](op, out, reads, given)
        return RULES.get(op.type, kept)(op, out, reads)

    def _moves(self, op: tf.Operation, reads: Sequence[Axes]) -> bool:
        """Return whether ``op`` changes the order of the examples that it reads.

        Raise `MixedError` if it cumulates or ranks them.
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
        """Return whether input ``by`` names one of ``axes``, the axes of the examples in input
        ``given``."""
        named = self.numbers.get(self.ops.value(op.inputs[by]))
        rank = op.inputs[given].shape.rank
        return named is not None and any(int(axis) % rank in axes for axis in named.ravel())

    def _is_whole(self, op: tf.Operation, entry: int | None, axis: int) -> bool:
        """Return whether a slice takes all of an axis; ``entry``: its place in begin and end."""
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
        """Return a key that is equal for ops that put examples into the same order."""
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
    """Return whether ``op`` is linear in the inputs that depend on the batch: ``depends``."""
    if op.type in ("Mul", "RealDiv", "Div", "MatMul"):
        return sum(depends) < 2 and (op.type in ("Mul", "MatMul") or not depends[1])
    return op.type in _LINEAR


def _is_nonlinear(op: tf.Operation, depends: Sequence[bool]) -> bool:
    """Return whether ``op`` is known to be nonlinear in the inputs that ``depends`` marks."""
    if op.type in _SELECTIONS:
        return depends[0]
    if op.type in _QUOTIENTS:
        return depends[1]
    known = op.type in PRODUCTS or RULES.get(op.type) is elementwise
    return known and not _is_linear(op, depends)
