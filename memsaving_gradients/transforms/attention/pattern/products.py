"""Products of matrices with an index for each axis, whichever op computes them.

``MatMul``, its batched kin and an ``Einsum`` of two operands say the same thing in different ways:
which axes of the operands are one axis, and which of them are summed over. Attention and its
gradient are recognized by these axes alone: transposing an operand, or having heads before or after
positions, makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

import tensorflow as tf

__all__ = ["Axes", "Axis", "Product", "aligned"]

#: The name of an axis.
Axis = int | str
Axes = tuple[Axis, ...]

#: Attributes that say whether an operand is transposed.
_TRANSPOSED = {
    "MatMul": ("transpose_a", "transpose_b"),
    "BatchMatMul": ("adj_x", "adj_y"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
}


@dataclass(frozen=True, eq=False)
class Product:
    """The product of two tensors.

    Attributes
    ----------
    op
        The op that computes it.
    operands
        The axes of each operand.
    result
        The axes of the result.
    broadcasts
        Whether an axis of one operand may have length 1 where the other operand's is longer.
    """

    op: tf.Operation
    operands: tuple[Axes, Axes]
    result: Axes
    broadcasts: bool

    @staticmethod
    def of(op: tf.Operation) -> Product | None:
        """Return ``op`` as a product.

        ``None``: it is no product, its shapes are unknown, or it does more than multiply and sum.
        """
        ranks = [t.shape.rank for t in op.inputs]
        if len(ranks) != 2 or None in ranks:
            return None
        if op.type in _TRANSPOSED and ranks[0] == ranks[1]:
            return _of_matrices(op, ranks[0])
        return _of_equation(op, ranks) if op.type == "Einsum" else None

    def where(self, tensor: tf.Tensor) -> list[int]:
        """Return the places at which ``tensor`` is an operand."""
        return [k for k, operand in enumerate(self.op.inputs) if operand is tensor]

    def renamed(self, known: Mapping[Axis, Axis]) -> tuple[Axes, Axes, Axes] | None:
        """Return the axes of operands and result by other names; ``None``: one is not ``known``."""
        found = []
        for axes in (*self.operands, self.result):
            if any(axis not in known for axis in axes):
                return None
            found.append(tuple(known[axis] for axis in axes))
        return found[0], found[1], found[2]


def aligned(*pairs: tuple[Sequence[Axis], Sequence[Axis]]) -> dict[Axis, Axis] | None:
    """Return, for each name in the first sequences, the name at its place in the second ones.

    ``None``: the names are not one to one.
    """
    known: dict[Axis, Axis] = {}
    for ours, theirs in pairs:
        if len(ours) != len(theirs):
            return None
        for mine, other in zip(ours, theirs, strict=True):
            if known.setdefault(mine, other) != other:
                return None
    return known if len(set(known.values())) == len(known) else None


def _of_matrices(op: tf.Operation, rank: int) -> Product:
    lead = tuple(range(rank - 2))
    left, right = ("row", "sum"), ("sum", "column")
    transposed = [op.get_attr(name) for name in _TRANSPOSED[op.type]]
    left = left[::-1] if transposed[0] else left
    right = right[::-1] if transposed[1] else right
    return Product(op, ((*lead, *left), (*lead, *right)), (*lead, "row", "column"), True)


def _of_equation(op: tf.Operation, ranks: Sequence[int]) -> Product | None:
    equation = op.get_attr("equation").decode().replace(" ", "")
    given, arrow, wanted = equation.partition("->")
    operands = given.split(",")
    if not arrow or len(operands) != 2:
        return None
    spare = [letter for letter in ascii_letters if letter not in equation]
    axes = []
    dots = []
    for labels, rank in zip(operands, ranks, strict=True):
        count = rank - len(labels.replace("...", ""))
        if count < 0 or count > len(spare) or (count and "..." not in labels):
            return None
        dots.append(count)
        axes.append(labels.replace("...", "".join(spare[:count])))
    if "..." in wanted and dots[0] != dots[1]:
        return None
    result = wanted.replace("...", "".join(spare[: max(dots)]))
    if any(len(set(labels)) < len(labels) for labels in (*axes, result)):
        return None
    # An axis of only one operand that the result lacks is summed over first: no plain product.
    if set(axes[0]) ^ set(axes[1]) != (set(axes[0]) ^ set(axes[1])) & set(result):
        return None
    return Product(op, (tuple(axes[0]), tuple(axes[1])), tuple(result), "..." in equation)
