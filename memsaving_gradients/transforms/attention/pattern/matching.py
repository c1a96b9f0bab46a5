"""Scaled dot-product attention in a traced graph, and in the gradient that TensorFlow built for it.

Plain attention is two products with a softmax between them. The search begins at the softmax: it
goes up to the product of queries and keys, through all ops that treat scores one by one
(`memsaving_gradients.transforms.attention.pattern.elementwise`), and down to the product with
values. Ops are recognized by their computation, never by their names.

The gradient is found by the rules for differentiating products, not by its arithmetic. The product
of the weights and the upstream gradient is the gradient for values. The product of the upstream
gradient and the values leads on to products with keys and with queries, which are the gradients for
queries and keys. Once these ends are replaced, no op that is left may need the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from memsaving_gradients.transforms.attention.pattern.elementwise import (
    Elementwise,
    Unclear,
    elementwise,
)
from memsaving_gradients.transforms.attention.pattern.products import Axes, Product, aligned

__all__ = ["Found", "Gradient", "found_in", "gradient_of", "is_attention_like"]

#: Ops between the softmax and the product with values.
_PASSED = frozenset({"Cast", "Identity", "StopGradient"})
#: Ops that lead from weights to values in attention that cannot be computed in blocks (dropout).
_CHANGED = _PASSED | {"Mul", "RealDiv", "SelectV2", "AddV2", "Reshape"}
#: The most ops between a softmax and its product with values: three ops pass weights on, six drop
#: some. A higher limit would walk from the softmax of a classifier through its loss.
MOST_STEPS = 12
#: The axis that the product of queries and keys sums over, and the last axis of values.
_WIDTH, _OF_VALUES = "width", "of values"

#: A tensor, and its axes.
Named = tuple[tf.Tensor, Axes]
Readers = Callable[[tf.Tensor], Iterable[tf.Operation]]


@dataclass(frozen=True, eq=False)
class Found:
    """One attention of a graph. The axes of scores have numbers: batches and heads, queries, keys.

    Attributes
    ----------
    softmax
        The softmax op.
    between
        The ops from the product of queries and keys to the softmax.
    passed
        The ops from the softmax to the product with values.
    weights
        The operand of the product with values.
    query, key, value, output
        Tensors, and their axes.
    broadcasts
        Whether an axis of an input may have length 1 where the axis of scores is longer.
    """

    softmax: tf.Operation
    between: Elementwise
    passed: tuple[tf.Operation, ...]
    weights: tf.Tensor
    query: Named
    key: Named
    value: Named
    output: Named
    broadcasts: bool

    @cached_property
    def scores(self) -> Axes:
        """The axes of scores."""
        return tuple(range(self.between.product.shape.rank))

    @cached_property
    def orders(self) -> tuple[Axes, Axes, Axes]:
        """The order in which blocks take the axes of queries, keys and values."""
        *lead, row, column = self.scores
        return (*lead, row, _WIDTH), (*lead, column, _WIDTH), (*lead, column, _OF_VALUES)

    @cached_property
    def output_order(self) -> Axes:
        """The order of the axes of the output of blocks."""
        *lead, row, _ = self.scores
        return *lead, row, _OF_VALUES

    @cached_property
    def ops(self) -> list[tf.Operation]:
        """The ops that hold a number for each pair, and the op of the output."""
        first = self.between.product.op
        between = self.between.of_scores
        return [first, *between, self.softmax, *self.passed, self.output[0].op]


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of one attention.

    Attributes
    ----------
    upstream
        The gradient for the output, with the output's axes; ``None``: there is none.
    of_query, of_key, of_value
        The gradients for queries, keys and values, with their axes.
    ops
        The ops between ``upstream`` and the gradients.
    """

    upstream: tf.Tensor | None = None
    of_query: list[Named] = field(default_factory=list)
    of_key: list[Named] = field(default_factory=list)
    of_value: list[Named] = field(default_factory=list)
    ops: list[tf.Operation] = field(default_factory=list)


def is_attention_like(softmax: tf.Operation) -> bool:
    """Return whether a softmax leads to a product that sums over its last axis, as weights do."""
    return any(True for _ in _products_below(softmax, _CHANGED))


def found_in(softmax: tf.Operation) -> Found:
    """Return the attention to which a softmax belongs.

    Raises
    ------
    Unclear
        If it belongs to no attention that can be computed in blocks.
    """
    below = list(_products_below(softmax, _PASSED))
    if not below:
        raise Unclear("its weights are changed before they multiply the values (dropout?)")
    if len(below) > 1:
        raise Unclear("its weights are read more than once")
    if 1 in softmax.outputs[0].shape[-2:].as_list():
        raise Unclear("it has one query or one key")
    ((weights, product, passed),) = below
    if any("_gradient_op_type" in op.node_def.attr for op in (softmax, product.op, *passed)):
        raise Unclear("one of its ops has a custom gradient")
    between = elementwise(softmax.inputs[0])
    return _joined(softmax, between, passed, weights, product)


def _products_below(
    softmax: tf.Operation, through: Collection[str]
) -> Iterator[tuple[tf.Tensor, Product, tuple[tf.Operation, ...]]]:
    stack: list[tuple[tf.Tensor, tuple[tf.Operation, ...]]] = [(softmax.outputs[0], ())]
    rank = softmax.outputs[0].shape.rank
    while stack:
        tensor, way = stack.pop()
        for reader in tensor.consumers():
            product = Product.of(reader)
            if product is not None:
                if any(_sums_over_last(product, k) for k in product.where(tensor)):
                    yield tensor, product, way
            elif reader.type in through and len(way) < MOST_STEPS:
                stack += [(t, (*way, reader)) for t in reader.outputs if t.shape.rank == rank]


def _sums_over_last(product: Product, place: int) -> bool:
    """Return whether a product sums over the last axis of the operand at ``place``."""
    return bool(product.operands[place]) and product.operands[place][-1] not in product.result


def _joined(
    softmax: tf.Operation,
    between: Elementwise,
    passed: tuple[tf.Operation, ...],
    weights: tf.Tensor,
    below: Product,
) -> Found:
    above = Product.of(between.product.op)
    assert above is not None
    if "_gradient_op_type" in above.op.node_def.attr:
        raise Unclear("one of its ops has a custom gradient")
    axes: Axes = tuple(range(len(above.result)))
    query, key = _query_and_key(above, axes)
    value, output = _value_and_output(below, weights, axes)
    shape = between.product.shape.as_list()
    for tensor, named in (query, key, value):
        for length, axis in zip(tensor.shape.as_list(), named, strict=True):
            whole = shape[axis] if axis in axes[:-2] else None
            if whole is not None and length not in (1, None, whole):
                raise Unclear("its inputs are broadcast")
    broadcasts = above.broadcasts or below.broadcasts
    return Found(softmax, between, passed, weights, query, key, value, output, broadcasts)


def _query_and_key(above: Product, axes: Axes) -> tuple[Named, Named]:
    """Return the operands of the product whose result has the axes of scores."""
    known = aligned((above.result, axes))
    summed = [a for a in above.operands[0] if a not in above.result]
    if known is None or len(summed) != 1:
        raise Unclear("its scores are sums over more than one axis")
    renamed = above.renamed({**known, summed[0]: _WIDTH})
    assert renamed is not None
    *lead, row, column = axes
    sides = [set(renamed[0]), set(renamed[1])]
    wanted = [{*lead, row, _WIDTH}, {*lead, column, _WIDTH}]
    if sides not in (wanted, wanted[::-1]):
        raise Unclear(
            "its queries and keys do not share all axes before the last two of its scores"
        )
    at = 0 if sides == wanted else 1
    inputs = above.op.inputs
    return (inputs[at], renamed[at]), (inputs[1 - at], renamed[1 - at])


def _value_and_output(below: Product, weights: tf.Tensor, axes: Axes) -> tuple[Named, Named]:
    """Return the other operand of the product with ``weights``, and its result."""
    *lead, row, column = axes
    place = below.where(weights)[0]
    names = aligned((below.operands[place], axes))
    others = [a for a in below.operands[1 - place] if names is None or a not in names]
    seen = None
    if names is not None and len(others) == 1:
        seen = below.renamed({**names, others[0]: _OF_VALUES})
    if seen is None:
        raise Unclear("the axes of its values are not those of its keys and one more")
    if set(seen[1 - place]) != {*lead, column, _OF_VALUES}:
        raise Unclear("its values do not share all axes of its keys")
    if set(seen[2]) != {*lead, row, _OF_VALUES}:
        raise Unclear("its output does not have all axes of its queries")
    return (below.op.inputs[1 - place], seen[1 - place]), (below.op.outputs[0], seen[2])


def gradient_of(found: Found, readers: Readers) -> Gradient:
    """Return the ops that TensorFlow built to differentiate an attention.

    Parameters
    ----------
    readers
        ``readers(tensor)``: the backward ops that read a tensor and that a gradient needs.

    Raises
    ------
    Unclear
        If the output has more than one gradient.
    """
    upstream, of_value = _of_values(found, readers)
    first = []
    for op in _products_of_values(found, readers):
        product = Product.of(op)
        assert product is not None
        for place in product.where(found.value[0]):
            if _renamed(product, place, found.value[1], found.output[1]) == found.scores:
                upstream[op.inputs[1 - place].ref()] = op.inputs[1 - place]
                first.append(op)
                break
    if len(upstream) > 1:
        raise Unclear("its output has more than one gradient")
    gradient = Gradient(next(iter(upstream.values()), None), of_value=of_value, ops=first)
    _follow(found, gradient, readers)
    return gradient


def _of_values(found: Found, readers: Readers) -> tuple[dict[object, tf.Tensor], list[Named]]:
    """Return gradients for the output, and their products with the weights.

    The gradients are given by reference, the products with their axes.
    """
    upstream: dict[object, tf.Tensor] = {}
    results = []
    for reader in readers(found.weights):
        if (product := Product.of(reader)) is None:
            continue
        for place in product.where(found.weights):
            axes = _renamed(product, place, found.scores, found.output[1])
            if axes is not None and set(axes) == set(found.value[1]):
                upstream[reader.inputs[1 - place].ref()] = reader.inputs[1 - place]
                results.append((reader.outputs[0], axes))
    return upstream, results


def _products_of_values(found: Found, readers: Readers) -> list[tf.Operation]:
    """Return the products of values and the upstream gradient, whose results meet the weights."""
    met: dict[tf.Operation, None] = {}
    for reader in readers(found.softmax.outputs[0]):
        for tensor in reader.inputs:
            op, steps = tensor.op, 0
            while op.type in ("Cast", "Identity", "Sum", "Reshape") and steps < MOST_STEPS:
                op, steps = op.inputs[0].op, steps + 1
            if any(t is found.value[0] for t in op.inputs) and Product.of(op) is not None:
                met[op] = None
    return list(met)


def _follow(found: Found, gradient: Gradient, readers: Readers) -> None:
    """Add the ops that the gradient for weights leads to, and the gradients at their ends."""
    stack = list(gradient.ops)
    seen = set(stack)
    while stack:
        for tensor in stack.pop().outputs:
            for reader in readers(tensor):
                if reader in seen or _is_end(found, gradient, tensor, reader):
                    continue
                seen.add(reader)
                gradient.ops.append(reader)
                stack.append(reader)


def _is_end(found: Found, gradient: Gradient, tensor: tf.Tensor, reader: tf.Operation) -> bool:
    product = Product.of(reader)
    if product is None:
        return False
    for place in product.where(tensor):
        other = reader.inputs[1 - place]
        for (read, axes), (_, expected), ends in (
            (found.key, found.query, gradient.of_query),
            (found.query, found.key, gradient.of_key),
        ):
            if other is not read:
                continue
            made = _renamed(product, place, found.scores, axes)
            if made is not None and set(made) == set(expected):
                if all(reader.outputs[0] is not end for end, _ in ends):
                    ends.append((reader.outputs[0], made))
                return True
    return False


def _renamed(product: Product, place: int, axes: Axes, others: Axes) -> Axes | None:
    """Return the axes of a product's result, or ``None`` where operands do not agree.

    The operand at ``place`` has ``axes``, the other operand has ``others``.
    """
    names = aligned((product.operands[place], axes), (product.operands[1 - place], others))
    seen = None if names is None else product.renamed(names)
    return None if seen is None else seen[2]
