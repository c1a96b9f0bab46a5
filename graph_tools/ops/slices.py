"""The number of rows of a slice whose ends are computed.

``x[16 * k : 16 * k + 16]`` has 16 rows for any k, but its shape does not say so. Both ends are sums
of multiples of the same integers: their difference is a number. O(ops that compute the ends).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = ["slice_length"]

#: Fact: attributes of slices whose bits mark places without a begin or end, or dropped dimensions.
_MASKS = ("begin_mask", "end_mask", "shrink_axis_mask")


def slice_length(op: tf.Operation) -> int | None:
    """Return the most rows that a ``StridedSlice`` takes along the one unknown dimension of its
    output; ``None``: its ends do not determine the number.

    Examples
    --------
    >>> import tensorflow as tf
    >>> @tf.function
    ... def part(x, k):
    ...     return x[16 * k : 16 * (k + 1)]
    >>> traced = part.get_concrete_function(tf.TensorSpec([64, 3]), tf.TensorSpec([], tf.int32))
    >>> found = [op for op in traced.graph.get_operations() if op.outputs and op.outputs[0].shape]
    >>> [slice_length(op) for op in found if op.type == "StridedSlice"]
    [16]
    """
    out = op.outputs[0].shape
    if op.type != "StridedSlice" or out.rank is None or out.as_list().count(None) != 1:
        return None
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return None
    masks = {name: op.get_attr(name) for name in _MASKS}
    begins, ends, steps = (_parts(tensor) for tensor in op.inputs[1:4])
    if begins is None or ends is None or steps is None:
        return None
    rank = op.inputs[0].shape.rank
    kept = [k for k in range(rank or 0) if not masks["shrink_axis_mask"] >> k & 1]
    place = out.as_list().index(None)
    place = kept[place] if place < len(kept) else len(begins)
    if place >= len(begins) or (masks["begin_mask"] | masks["end_mask"]) >> place & 1:
        return None
    if _sum([(steps[place], 1)]) != {None: 1}:
        return None
    length = _sum([(ends[place], 1), (begins[place], -1)])
    return length[None] if length.keys() == {None} and length[None] > 0 else None


#: An integer: a tensor, or a number.
_Integer: TypeAlias = "tf.Tensor | int"


def _parts(tensor: tf.Tensor) -> list[_Integer] | None:
    """Return the numbers in a vector; ``None``: they are not computed one by one."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return [int(number) for number in value]
    return list(tensor.op.inputs) if tensor.op.type == "Pack" else None


def _sum(parts: Iterable[tuple[_Integer, int]]) -> dict[object, int]:
    """Return a sum of integers with factors, as a linear combination. Its keys are references to
    tensors that are no such sums themselves, and ``None`` for the constant."""
    found: Counter[object] = Counter()
    #: By creation index; the last is taken first, so that all readers of an op come before it.
    waiting: dict[int, tuple[tf.Tensor, int]] = {}

    def add(part: _Integer, times: int) -> None:
        value = part if isinstance(part, int) else tf.get_static_value(part)
        if isinstance(part, int) or value is not None:
            found[None] += times * int(value)
            return
        place = graphs.creation_index(part.op)
        known = waiting.get(place, (part, 0))
        if known[0] is not part:
            found[part.ref()] += times
        else:
            waiting[place] = part, known[1] + times

    for part, times in parts:
        add(part, times)
    while waiting:
        tensor, times = waiting.pop(max(waiting))
        inputs, kind = tensor.op.inputs, tensor.op.type
        factors = [tf.get_static_value(t) for t in inputs] if kind == "Mul" else []
        if kind in ("Identity", "Cast") and inputs[0].dtype.is_integer:
            add(inputs[0], times)
        elif kind in ("Add", "AddV2", "Sub"):
            add(inputs[0], times)
            add(inputs[1], -times if kind == "Sub" else times)
        elif any(factor is not None for factor in factors):
            which = factors[0] is None
            add(inputs[not which], times * int(factors[which]))
        else:
            found[tensor.ref()] += times
    return {part: number for part, number in found.items() if number}
