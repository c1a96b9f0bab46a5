"""A graph's elementwise ops on scores, run on one block of scores.

Some ops between the product of queries and keys and the softmax treat each pair of a query and a
key by itself: scaling, masks, biases, casts. `Elementwise` runs copies of them on a block of pairs.
Their other inputs are cut to the block. An input with an entry for each pair may itself be computed
pair by pair, such as a mask made of smaller ones. It is then computed for the block only, so that
no op needs it whole. The numbers equal the plain graph's, and so does the derivative, which
TensorFlow computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.tf_private import graphs
from memsaving_gradients.transforms.attention.blocks import BlockedAxis
from memsaving_gradients.transforms.attention.pairs import Place, padded
from memsaving_gradients.transforms.attention.pattern.products import Product

__all__ = [
    "Band",
    "Count",
    "Elementwise",
    "Everywhere",
    "Leaf",
    "Part",
    "Unclear",
    "elementwise",
]

#: Ops that treat entries one by one, with shapes broadcast.
ELEMENTWISE = frozenset(
    """Mul RealDiv Div AddV2 Add Sub Neg SelectV2 Cast Identity StopGradient Maximum Minimum Abs
    Sign Tanh Sigmoid Square Exp Softplus SquaredDifference Pow LogicalAnd LogicalOr LogicalNot
    Greater GreaterEqual Less LessEqual Equal NotEqual FloorMod FloorDiv""".split()
)
#: Ops whose result is their first input, except for axes that broadcasting adds anyway.
_BROADCASTS = frozenset({"BroadcastTo"})
#: Ops that may do nothing but add axes.
_EXPANDS = frozenset({"ExpandDims", "StridedSlice"})
_ONES, _ZEROS = "OnesLike", "ZerosLike"
#: The most ops between a product and a softmax. Every block runs copies of all of them, and a
#: search from the softmax of a classifier would otherwise cross the whole elementwise part of a
#: network.
MOST_OPS = 200


class Unclear(Exception):
    """The error for a softmax of no attention that blocks can compute; its message says why."""


class Leaf(ABC):
    """An input of elementwise ops."""

    def prepared(self, rows: BlockedAxis, columns: BlockedAxis) -> Any:
        """Return the tensor that blocks take their parts from, or ``None``."""
        return None

    @abstractmethod
    def block(self, prepared: Any, place: Place) -> tf.Tensor:
        """Return the part of the input for the block at ``place``."""


@dataclass(frozen=True, eq=False)
class Part(Leaf):
    """A tensor of which each block takes its part."""

    tensor: tf.Tensor

    def prepared(self, rows: BlockedAxis, columns: BlockedAxis) -> tf.Tensor:
        if not self.tensor.shape.rank:
            return self.tensor
        # Padded with ones, so that no number is divided by zero.
        return padded(self.tensor, rows, columns, 1)

    def block(self, prepared: tf.Tensor, place: Place) -> tf.Tensor:
        return place.part(prepared)


@dataclass(frozen=True, eq=False)
class Everywhere(Leaf):
    """One number for all pairs."""

    number: Any
    dtype: tf.DType

    def block(self, prepared: None, place: Place) -> tf.Tensor:
        return tf.constant(self.number, self.dtype)


@dataclass(frozen=True, eq=False)
class Count(Leaf):
    """The cumulative sums of one number along the positions of queries or keys."""

    axis: int
    number: Any
    dtype: tf.DType

    def block(self, prepared: None, place: Place) -> tf.Tensor:
        positions = tf.cast(place.positions(self.axis), self.dtype)
        return (positions + 1) * tf.constant(self.number, self.dtype)


@dataclass(frozen=True, eq=False)
class Band(Leaf):
    """One number where queries and keys are near, zero elsewhere."""

    lower: int
    upper: int
    number: Any
    dtype: tf.DType

    def block(self, prepared: None, place: Place) -> tf.Tensor:
        behind = place.positions(-2) - place.positions(-1)
        near = tf.constant(True)
        if self.lower >= 0:
            near = tf.logical_and(near, behind <= self.lower)
        if self.upper >= 0:
            near = tf.logical_and(near, -behind <= self.upper)
        number = tf.constant(self.number, self.dtype)
        return tf.where(near, number, tf.zeros([], self.dtype))


@dataclass(frozen=True, eq=False)
class Elementwise:
    """The ops from a product to a softmax.

    Attributes
    ----------
    product, result
        The tensors that the ops begin and end with.
    ops
        The ops, in an order in which each op reads only earlier ones.
    leaves
        The other inputs of the ops.
    """

    product: tf.Tensor
    result: tf.Tensor
    ops: tuple[tf.Operation, ...]
    leaves: tuple[tuple[tf.Tensor, Leaf], ...]

    @cached_property
    def of_scores(self) -> list[tf.Operation]:
        """The ops that depend on the product."""
        reached = {self.product.ref()}
        found = []
        for op in self.ops:
            if any(t.ref() in reached for t in op.inputs):
                reached.update(t.ref() for t in op.outputs)
                found.append(op)
        return found

    def prepared(self, rows: BlockedAxis, columns: BlockedAxis) -> list[Any]:
        """Return the tensors that blocks take their parts from, or ``None``, for each leaf."""
        return [leaf.prepared(rows, columns) for _, leaf in self.leaves]

    def block(self, prepared: Sequence[Any], place: Place, product: tf.Tensor) -> tf.Tensor:
        """Return the result of the ops for a block of the product."""
        graph = tf.compat.v1.get_default_graph()
        values = {self.product.ref(): product}
        for (tensor, leaf), whole in zip(self.leaves, prepared, strict=True):
            values[tensor.ref()] = leaf.block(whole, place)
        for op in self.ops:
            (output,) = op.outputs
            inputs = [values[t.ref()] for t in op.inputs if t.ref() in values]
            if op.type in _BROADCASTS:
                values[output.ref()] = inputs[0]
            elif op.type in _EXPANDS:
                values[output.ref()] = _expanded(inputs[0], op)
            else:
                copy = graphs.create_in(
                    graph, op.type, inputs, [output.dtype], dict(op.node_def.attr), op.op_def
                )
                values[output.ref()] = copy.outputs[0]
        return values[self.result.ref()]


def elementwise(result: tf.Tensor) -> Elementwise:
    """Return the ops that lead to ``result`` from a product with the same axes.

    Raises
    ------
    Unclear
        If there is no such product, if there is more than one, or if some op cannot run on blocks.
    """
    rank = result.shape.rank
    if rank is None or rank < 2:
        raise Unclear("the shape of its scores is unknown")
    products: dict[Any, tf.Tensor] = {}
    leaves: dict[Any, tuple[tf.Tensor, Leaf]] = {}
    ops: dict[tf.Operation, None] = {}
    stack = [result]
    seen = set()
    while stack:
        tensor = stack.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        op = tensor.op
        if _is_of_pairs(tensor) and Product.of(op) is not None and tensor.dtype.is_floating:
            products[tensor.ref()] = tensor
        elif (found := _computed(tensor)) is not None:
            leaves[tensor.ref()] = tensor, found
        elif _is_of_pairs(tensor) and (reads := _inputs(op)) is not None:
            if len(ops) > MOST_OPS:
                raise Unclear(f"more than {MOST_OPS} ops compute its scores from a product")
            ops[op] = None
            stack += reads
        else:
            leaves[tensor.ref()] = tensor, Part(tensor)
    if not products:
        raise Unclear("its scores do not come from a product")
    if len(products) > 1:
        raise Unclear("more than one product adds to its scores")
    (product,) = products.values()
    if product.shape.rank != rank:
        raise Unclear("its scores have other axes than the product that they come from")
    order = sorted(ops, key=graphs.creation_index)
    of_all = {result.ref()}
    for op in reversed(order):
        # An op that adds an axis shifts its input's axes: only its result is checked on all axes.
        if op.outputs[0].ref() in of_all and op.type not in _EXPANDS:
            of_all.update(t.ref() for t in op.inputs)
    for tensor in (*(tensor for tensor, _ in leaves.values()), *(op.outputs[0] for op in order)):
        _check(tensor, product, None if tensor.ref() in of_all else 2)
    return Elementwise(product, result, tuple(order), tuple(leaves.values()))


def _is_of_pairs(tensor: tf.Tensor) -> bool:
    """Return whether ``tensor`` may have an entry for each pair."""
    rank = tensor.shape.rank
    return rank is not None and rank >= 2 and 1 not in tensor.shape.as_list()[-2:]


def _inputs(op: tf.Operation) -> list[tf.Tensor] | None:
    """Return the inputs of an op that can run on a block; ``None``: it cannot."""
    if op.type in ELEMENTWISE and not op.control_inputs:
        return list(op.inputs)
    if op.type in _BROADCASTS or (op.type in _EXPANDS and _added_axes(op) is not None):
        return [op.inputs[0]]
    return None


def _added_axes(op: tf.Operation) -> list[int] | None:
    """Return the axes that an op adds before the last two, counted from the end.

    ``None``: the op does something else.
    """
    rank = op.outputs[0].shape.rank
    if rank is None or op.inputs[0].shape.rank is None:
        return None
    if op.type == "ExpandDims":
        axis = tf.get_static_value(op.inputs[1])
        added = None if axis is None else [int(axis) - (rank if axis >= 0 else 0)]
    else:
        places = _new_axes(op, op.inputs[0].shape.rank)
        added = None if places is None else [place - rank for place in places]
    return added if added is not None and all(axis <= -3 for axis in added) else None


def _new_axes(op: tf.Operation, rank: int) -> list[int] | None:
    """Return the new axes in a slice of a whole tensor; ``None``: the slice is another one."""
    strides = tf.get_static_value(op.inputs[3])
    if strides is None or op.get_attr("shrink_axis_mask"):
        return None
    begins, ends, news, dots = (
        op.get_attr(f"{name}_mask") for name in ("begin", "end", "new_axis", "ellipsis")
    )
    count = sum(not (news | dots) >> k & 1 for k in range(len(strides)))
    found: list[int] = []
    place = 0
    for k, stride in enumerate(strides):
        if dots >> k & 1:
            place += rank - count
        elif news >> k & 1:
            found.append(place)
            place += 1
        elif stride == 1 and begins >> k & 1 and ends >> k & 1:
            place += 1
        else:
            return None
    return found


def _expanded(x: tf.Tensor, op: tf.Operation) -> tf.Tensor:
    for axis in sorted(_added_axes(op) or (), reverse=True):
        # A tensor that lacks the axes after this one broadcasts without this one, too.
        if x.shape.rank >= -axis - 1:
            x = tf.expand_dims(x, axis)
    return x


def _computed(tensor: tf.Tensor) -> Leaf | None:
    """Return a tensor of pairs as a leaf, if positions alone determine it; else ``None``."""
    if not _is_of_pairs(tensor):
        return None
    op = tensor.op
    if (number := _one_number(tensor)) is not None:
        return Everywhere(number, tensor.dtype)
    if op.type == "Cumsum" and not (op.get_attr("exclusive") or op.get_attr("reverse")):
        number, axis = _one_number(op.inputs[0]), tf.get_static_value(op.inputs[1])
        axis = None if axis is None else int(axis) - (tensor.shape.rank if axis >= 0 else 0)
        if number is not None and axis in (-2, -1):
            return Count(axis, number, tensor.dtype)
    if op.type in ("MatrixBandPart", "BatchMatrixBandPart"):
        number = _one_number(op.inputs[0])
        bounds = [tf.get_static_value(t) for t in op.inputs[1:]]
        if number is not None and None not in bounds:
            return Band(int(bounds[0]), int(bounds[1]), number, tensor.dtype)
    return None


def _one_number(tensor: tf.Tensor) -> Any:
    """Return the number that every entry of ``tensor`` has, if it is known."""
    op = tensor.op
    if op.type == "Const":
        proto = op.get_attr("value")
        array = tf.make_ndarray(proto)
        first = array.flat[0] if array.size else None
        return first if first is not None and bool(np.all(array == first)) else None
    if op.type == "Fill":
        return tf.get_static_value(op.inputs[1])
    if op.type in (_ONES, _ZEROS):
        return np.array(op.type == _ONES).astype(tensor.dtype.as_numpy_dtype)
    if op.type in _BROADCASTS:
        return _one_number(op.inputs[0])
    return None


def _check(tensor: tf.Tensor, product: tf.Tensor, last: int | None) -> None:
    """Raise if one of the ``last`` axes of ``tensor`` may be longer than in ``product``."""
    shape = tensor.shape
    if shape.rank is None or shape.rank > product.shape.rank:
        raise Unclear(f"it is unknown how {tensor.name!r} is broadcast to its scores")
    for axis in range(-min(last or shape.rank, shape.rank), 0):
        if shape.as_list()[axis] not in (1, None, product.shape.as_list()[axis]):
            raise Unclear(f"{tensor.name!r} of shape {shape} may have longer axes than its scores")
