"""Recognition of causal masks, by which each query sees its own position and earlier ones only.

Half of the blocks need not be computed then. That holds only if the mask hides nothing else: with
another mask, a query may see no key, and plain attention gives it the mean of all values, later
ones included.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from memsaving_gradients.transforms.attention.pattern.elementwise import (
    Band,
    Count,
    Elementwise,
    Everywhere,
    Leaf,
    Part,
)

__all__ = ["is_causal"]

#: Fact: a score that is set to this number, or lowered by as much, is masked. It is the highest
#: number that models in use take (Hugging Face's ``TFGPT2Model``; others take -1e9, or -3e4 in
#: ``float16``). Its ``exp`` is zero in every dtype.
LOW = -1e4
#: Ops that keep each number where it is.
_SAME = frozenset({"Identity", "BroadcastTo", "ExpandDims", "StridedSlice"})
#: Comparisons, each with the equivalent comparison of exchanged operands.
_MIRRORED = {
    "GreaterEqual": "LessEqual",
    "LessEqual": "GreaterEqual",
    "Greater": "Less",
    "Less": "Greater",
}


def is_causal(between: Elementwise) -> bool:
    """Return whether each query sees its own position and earlier ones, and all other keys have no
    weight."""
    leaves = {tensor.ref(): leaf for tensor, leaf in between.leaves}
    op = between.result.op
    while op.type in ("Cast", "Identity") and op in between.of_scores:
        op = op.inputs[0].op
    if op.type != "SelectV2" or op not in between.of_scores:
        return False
    sees = _sees(op.inputs[0], leaves)
    if sees is None:
        return False
    seen, unseen = op.inputs[1:] if sees else op.inputs[:0:-1]
    depends = {t.ref() for o in between.of_scores for t in o.outputs} | {between.product.ref()}
    return seen.ref() in depends and (_is_low(unseen) or _is_lowered(unseen, seen))


def _is_low(tensor: tf.Tensor) -> bool:
    number = tf.get_static_value(tensor)
    return number is not None and np.size(number) == 1 and bool(np.all(number <= LOW))


def _is_lowered(tensor: tf.Tensor, seen: tf.Tensor) -> bool:
    op = tensor.op
    if op.type == "Sub" and op.inputs[0] is seen:
        number = tf.get_static_value(op.inputs[1])
        return number is not None and np.size(number) == 1 and bool(np.all(number >= -LOW))
    if op.type in ("Add", "AddV2"):
        return any(op.inputs[k] is seen and _is_low(op.inputs[1 - k]) for k in (0, 1))
    return False


def _sees(tensor: tf.Tensor, leaves: dict[object, Leaf]) -> bool | None:
    """Return whether ``tensor`` is true exactly where a key is not after the query.

    ``False``: it is true exactly where a key is after the query; ``None``: neither.
    """
    flipped = False
    while tensor.ref() not in leaves:
        op = tensor.op
        if op.type == "LogicalNot":
            flipped = not flipped
            tensor = op.inputs[0]
        elif op.type in _SAME or (op.type == "Cast" and tensor.dtype == tf.bool):
            tensor = op.inputs[0]
        elif op.type == "LogicalAnd":
            others = [t for t in op.inputs if not _is_everywhere(t, leaves, 1)]
            if len(others) != 1:
                return None
            (tensor,) = others
        else:
            found = _compared(op, leaves)
            return None if found is None else found != flipped
    leaf = leaves[tensor.ref()]
    if isinstance(leaf, Band) and (leaf.lower, leaf.upper) == (-1, 0) and leaf.number:
        return not flipped
    return None


def _compared(op: tf.Operation, leaves: dict[object, Leaf]) -> bool | None:
    if op.type not in _MIRRORED:
        return None
    left, right = (leaves.get(t.ref()) for t in op.inputs)
    kind = op.type
    if isinstance(left, Count) and isinstance(right, Count):
        if left.number != right.number or left.number <= 0 or left.axis == right.axis:
            return None
        kind = kind if left.axis == -2 else _MIRRORED[kind]
        return {"GreaterEqual": True, "Less": False}.get(kind)
    if isinstance(left, Band) and kind == "Greater" and _is_everywhere(op.inputs[1], leaves, 0):
        return True if (left.lower, left.upper) == (-1, 0) and left.number > 0 else None
    return None


def _is_everywhere(tensor: tf.Tensor, leaves: dict[object, Leaf], number: int) -> bool:
    """Return whether each entry of ``tensor`` is ``number``."""
    leaf = leaves.get(tensor.ref())
    known = leaf.number if isinstance(leaf, Everywhere) else None
    if isinstance(leaf, Part) and tensor.shape.num_elements() == 1:
        known = tf.get_static_value(tensor)
    return known is not None and bool(np.all(known == number))
