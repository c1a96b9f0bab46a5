"""Constants that grappler moves through trees of additions or multiplications.

``c * (x * y)`` becomes ``x * (c * y)`` where the product in parentheses has no other reader
(``ConstantPushDown`` in TensorFlow's ``constant_folding.cc``, 2.16 to 2.21). So constants meet and
are folded. Names decide which factor is x: grappler first sorts the inputs of commutative ops
(`input_name`, ``canonicalizer.cc``). In functions, where it knows which sizes are equal, it then
regroups each tree of products, the smallest factors first (``MinimizeBroadcasts`` in
``arithmetic_optimizer.cc``): the result is ``(c * x) * y``. Three consequences matter when a graph
is edited. An op put between two ops of such a tree changes the last bits of the result. An op of
another name in the place of a factor may change them, too. And ``c * x`` is an op of its own, ready
as soon as x is, which may be long before y.

A division by a constant is a product with its reciprocal. Not covered: trees of products of which
some are broadcast, or in which one of several constants divides.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.graph.capture import LARGEST_FOLDED_BY_GRAPPLER, OpGraph
from graph_tools.ops import op_types
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs

__all__ = [
    "Folded",
    "folded",
    "folded_in_turn",
    "input_name",
    "losing",
    "moved_past",
    "takes_constant",
]

#: Fact: with so many constants in one tree, the order in which they meet matters; the second number
#: is for trees with differences. Two constants have the same product or sum in either order, but
#: differences are then written in another way. From random trees, TensorFlow 2.21.
MANY, MANY_WITH_DIFFERENCES = 3, 2
#: Products, and quotients, which become products with the reciprocal where a constant divides.
_, PRODUCTS = op_types.FOLDED_TOGETHER


def input_name(tensor: tf.Tensor) -> str:
    """Return the name of a tensor in the list of an op's inputs in a serialized graph."""
    return f"{tensor.op.name}:{tensor.value_index}" if tensor.value_index else str(tensor.op.name)


def takes_constant(ops: OpGraph) -> npt.NDArray[np.bool_]:
    """Return, for each op, whether it combines a value with a constant: its own, or one that its
    only reader has.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.sin(tf.sin(x) * x) * (tf.cos(x) * x * 0.5)])
    >>> [op.name for op, takes in zip(graph.ops, takes_constant(graph)) if takes]
    ['mul_1', 'mul_2']
    """
    takes = np.zeros(len(ops.ops), np.bool_)
    for i in range(len(ops.ops) - 1, -1, -1):
        kind = ops.ops[i].type
        if not any(kind in family for family in op_types.FOLDED_TOGETHER):
            continue
        takes[i] = ops.reads_constant(i) or _tree_of(ops, i, takes) is not None
    return takes


def _tree_of(ops: OpGraph, position: int, takes: npt.NDArray[np.bool_]) -> int | None:
    """Return the only reader of an op, if both are in one tree that takes a constant; ``takes``:
    the result of `takes_constant`, for later ops at least."""
    readers = ops.readers[position]
    if len(readers) != 1 or not takes[readers[0]]:
        return None
    kinds = ops.ops[position].type, ops.ops[readers[0]].type
    return readers[0] if op_types.fold_together(*kinds) else None


def moved_past(ops: OpGraph, takes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return, for each op, whether a constant of its only reader may move past it; an additional
    reader would prevent that.

    Parameters
    ----------
    ops
        A captured graph.
    takes
        The result of `takes_constant` for it.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.sin(x) * x * 0.1])
    >>> past = moved_past(graph, takes_constant(graph))
    >>> [op.name for op, inner in zip(graph.ops, past) if inner]
    ['mul']
    """
    past = np.zeros(len(ops.ops), np.bool_)
    for i in np.flatnonzero(takes).tolist():
        past[i] = _tree_of(ops, i, takes) is not None
    return past


def folded_in_turn(ops: OpGraph, takes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return, for each op, whether constants that move past it would meet in another order if an op
    waited for it by a control edge.

    An op that others wait for releases its constant later than the rest of its tree: in
    ``((x * a) * b) * c``, b would meet c before a.

    Parameters
    ----------
    ops
        A captured graph.
    takes
        The result of `takes_constant` for it.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([x * 0.1 * 0.2 * 0.3, tf.sin(x) * 0.1 * 0.2])
    >>> in_turn = folded_in_turn(graph, takes_constant(graph))
    >>> [op.name for op, inner in zip(graph.ops, in_turn) if inner]
    ['mul', 'mul_1']
    """
    inner = np.zeros(len(ops.ops), np.bool_)
    root: dict[int, int] = {}
    constants, differences = Counter[int](), set[int]()
    for i in reversed(np.flatnonzero(takes).tolist()):
        reader = _tree_of(ops, i, takes)
        inner[i] = reader is not None
        root[i] = i if reader is None else root[reader]
        constants[root[i]] += ops.reads_constant(i)
        if ops.ops[i].type == "Sub":
            differences.add(root[i])
    for i, top in root.items():
        few = constants[top] < (MANY_WITH_DIFFERENCES if top in differences else MANY)
        inner[i] &= not few
    return inner


@dataclass(frozen=True)
class Folded:
    """The values that ops read after constants have moved.

    Attributes
    ----------
    reads
        The values that each op reads, except constants that have moved.
    gone
        Ops that then read constants alone, and become constants themselves; they still wait for the
        same ops.
    """

    reads: list[tuple[int, ...]]
    gone: frozenset[int]


def folded(ops: OpGraph) -> Folded:
    """Return the values that each op reads after constants have moved: ``c * (x * y)`` reads x and
    ``c * y``, which reads y alone.

    In functions, it reads ``c * x`` and y if x and y are equally large.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     y = tf.compat.v1.placeholder(tf.float32, [4])
    ...     product = tf.sin(x) * tf.sin(y)
    ...     graph = capture([0.5 * product])
    >>> inner = graph.position[product.op.name]
    >>> [graph.ops[graph.producer[v]].name for v in folded(graph).reads[inner]]
    ['Sin_1']
    """
    trees = _Trees(ops)
    trees.push_down()
    if ops.ops and graphs.is_function(ops.ops[0].graph):
        trees.regroup()
        trees.push_down()
    reads = list(ops.inputs)
    for i in trees.changed:
        operands = () if i in trees.gone else trees.operands[i]
        reads[i] = tuple(v for v in operands if not ops.constant[v])
    return Folded(reads, frozenset(trees.gone))


def losing(ops: OpGraph) -> frozenset[int]:
    """Return the ops that read a constant in place of a value after constants have moved, even if
    ops wait for them. An op that waits for one of these does not wait for that value.

    Such an op is ``x * y`` or ``c * x`` whose only reader has a constant. In longer trees an op may
    also read one value in place of another: that is not covered.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.sin(x) * 0.1 * 0.2, tf.cos(x) * x * 0.3])
    >>> sorted(graph.ops[i].name for i in losing(graph))
    ['mul', 'mul_2']
    """
    trees = _Trees(ops, fold_large=True)
    trees.push_down()
    return frozenset(filter(trees.loses, trees.changed))


class _Trees:
    """Sums and products of two operands each, as grappler regroups them.

    ``fold_large``: whether two constants also meet in place of a large value, as they sometimes do.

    Attributes
    ----------
    operands
        For each of these ops, the two values that it combines, in order.
    changed
        The ops whose operands have changed.
    gone
        The ops that combine constants, each with the bytes of the largest constant: the result is
        assumed to be no larger.
    """

    def __init__(self, ops: OpGraph, *, fold_large: bool = False) -> None:
        self.ops = ops
        self.most = math.inf if fold_large else LARGEST_FOLDED_BY_GRAPPLER
        self.producer = ops.producer.tolist()
        self.operands = {
            i: ops.inputs[i]
            for i, op in enumerate(ops.ops)
            if len(ops.inputs[i]) == 2
            and any(op.type in family for family in op_types.FOLDED_TOGETHER)
            and not graphs.is_protected(op)
        }
        self.changed: set[int] = set()
        self.gone: dict[int, tuple[int, int]] = {}
        self.readers = {i: ops.readers[i] for i in self.operands}
        self.controlling = {other for controls in ops.controls for other in controls}

    def is_constant(self, value: int) -> bool:
        return bool(self.ops.constant[value]) or self.producer[value] in self.gone

    def loses(self, position: int) -> bool:
        """Return whether an op combines more constants than at first."""
        before, now = self.ops.inputs[position], self.operands[position]
        return len([*filter(self.is_constant, now)]) > len([*filter(self.is_constant, before)])

    def push_down(self) -> None:
        """Exchange the constant of each op with the first operand of the op that makes its other
        operand.

        Before that, the operands of commutative ops are sorted by name.
        """
        for i, operands in self.operands.items():
            if op_types.is_commutative(self.ops.ops[i]):
                first, second = sorted(operands, key=lambda v: input_name(self.ops.tensor(v)))
                self.operands[i] = (first, second)
        todo = list(self.operands)
        while todo:
            moved = {op for i in todo for op in self._pushed(i)}
            todo = sorted(moved)

    def _pushed(self, i: int) -> tuple[int, ...]:
        """Move the constant of an op down by one op if possible; return both ops, or none. Control
        edges from the lower op do not matter."""
        operands = self.operands[i]
        if not any(map(self.is_constant, operands)):
            return ()
        value, constant = sorted(operands, key=self.is_constant)
        child = self.producer[value]
        if (
            child not in self.operands
            or self.readers[child] != [i]
            or not op_types.fold_together(self.ops.ops[i].type, self.ops.ops[child].type)
        ):
            return ()
        first, second = sorted(self.operands[child], key=self.is_constant)
        if self.is_constant(first):
            return ()
        if self.is_constant(second):
            if tensor_bytes(self.ops.tensor(value)).fixed > self.most:
                return ()
        elif self._bytes(constant) > self._bytes(first):
            return ()
        self._combine(i, first, value)
        self._combine(child, constant, second)
        return i, child

    def regroup(self) -> None:
        """Regroup products of constants and of factors of one shape, the smallest first."""
        taken: set[int] = set()
        for root in reversed(self.operands):
            if root in taken or not self._is_product(root):
                continue
            members, leaves = self._tree(root, taken)
            taken |= {root, *members}
            shape = self.ops.tensor(int(self.ops.first_value[root])).shape
            others = [v for v in leaves if not self.is_constant(v)]
            if (
                not members
                or len(others) == len(leaves)
                or shape.rank is None
                or any(self.ops.tensor(v).shape.as_list() != shape.as_list() for v in others)
            ):
                continue
            self._build(root, members, leaves)

    def _tree(self, root: int, taken: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the products that only ``root`` or another of them reads, and the values that they
        combine, both from left to right."""
        members: list[int] = []
        leaves: list[int] = []
        stack = [(root, v) for v in reversed(self.operands[root])]
        while stack:
            reader, value = stack.pop()
            op = self.producer[value]
            if (
                self._is_product(op)
                and op not in taken
                and self.readers[op] == [reader]
                and op not in self.controlling
                and not self.ops.controls[op]
                and self.ops.ops[op].device == self.ops.ops[root].device
            ):
                members.append(op)
                stack += [(op, v) for v in reversed(self.operands[op])]
            else:
                leaves.append(value)
        return members, leaves

    def _build(self, root: int, members: list[int], leaves: list[int]) -> None:
        """Combine ``leaves`` in pairs: constants first, then the others in order, an odd one
        last."""
        sizes = {value: self._bytes(value) for value in leaves}
        left = deque(sorted(leaves, key=sizes.__getitem__))
        last = left.pop() if len(left) % 2 else None
        while len(left) > 1:
            op = members.pop() if members else root
            self._combine(op, left.popleft(), left.popleft())
            made = int(self.ops.first_value[op])
            # The new product counts for no more than a scalar.
            sizes[made] = (0, 1)
            rises = len(left) > 1 and sizes[left[0]] < sizes[left[1]]
            (left.appendleft if rises else left.append)(made)
        if last is not None:
            self._combine(root, left.popleft(), last)

    def _combine(self, op: int, one: int, other: int) -> None:
        self.operands[op] = (one, other)
        self.changed.add(op)
        for read in (self.producer[one], self.producer[other]):
            if len(self.readers.get(read, ())) == 1:
                self.readers[read] = [op]
        if self.is_constant(one) and self.is_constant(other):
            self.gone[op] = max(self._bytes(one), self._bytes(other))

    def _is_product(self, op: int) -> bool:
        """Return whether an op is a product; a division by a constant is one, by the reciprocal."""
        if op not in self.operands or op in self.gone:
            return False
        kind, (first, second) = self.ops.ops[op].type, self.ops.inputs[op]
        divides = kind in PRODUCTS and self.ops.constant[second] and not self.ops.constant[first]
        return kind == "Mul" or bool(divides)

    def _bytes(self, value: int) -> tuple[int, int]:
        """Return a sort key for the size of a value: the bytes per example, then the fixed bytes. A
        batch is assumed to be large."""
        made = self.gone.get(self.producer[value])
        if made is not None:
            return made
        fixed, per_example = tensor_bytes(self.ops.tensor(value))
        return per_example, fixed
