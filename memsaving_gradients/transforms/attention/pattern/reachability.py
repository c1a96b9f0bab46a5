"""What tensors need of a graph, were some of them others: how an exchange turns out before it is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Needs", "plain_as_well"]


class Needs:
    """What tensors need; TensorFlow is asked once for what an op reads."""

    def __init__(self) -> None:
        self._edges: dict[tf.Operation, tuple[list[tf.Tensor], list[tf.Operation]]] = {}

    def of(
        self,
        targets: Iterable[tf.Tensor],
        replaced: Mapping[Any, Sequence[tf.Tensor]] | None = None,
        also: Iterable[tf.Operation] = (),
    ) -> set[tf.Operation]:
        """The ops that ``targets`` and ``also`` need, if what reads a tensor of ``replaced`` reads others instead."""
        replaced = replaced or {}
        seen = {*also, *(t.op for t in targets)}
        stack = list(seen)
        while stack:
            op = stack.pop()
            if op not in self._edges:
                self._edges[op] = list(op.inputs), list(op.control_inputs)
            tensors, controls = self._edges[op]
            read = [new.op for t in tensors for new in replaced.get(t.ref(), (t,))]
            for before in (*read, *controls):
                if before not in seen:
                    seen.add(before)
                    stack.append(before)
        return seen


def plain_as_well(names: Collection[str], ends: Iterable[tf.Tensor | tf.Operation]) -> list[str]:
    """Those softmaxes that ``ends``, all that a complete graph is run for, need nevertheless: readers came after the exchange."""
    ends = list(ends)
    tensors = [end for end in ends if isinstance(end, tf.Tensor)]
    operations = [end for end in ends if isinstance(end, tf.Operation)]
    needed = {op.name for op in Needs().of(tensors, also=operations)}
    return [name for name in names if name in needed]
