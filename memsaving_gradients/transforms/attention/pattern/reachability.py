"""The ancestors of tensors, in a graph as it is or as an exchange of tensors would leave it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Ancestors", "plain_as_well"]


class Ancestors:
    """A search for ancestors that asks TensorFlow only once for the inputs of each op."""

    def __init__(self) -> None:
        self._edges: dict[tf.Operation, tuple[list[tf.Tensor], list[tf.Operation]]] = {}

    def of(
        self,
        targets: Iterable[tf.Tensor],
        replaced: Mapping[Any, Sequence[tf.Tensor]] | None = None,
        also: Iterable[tf.Operation] = (),
    ) -> set[tf.Operation]:
        """Return ``targets``' ops, ``also``, and the ops before them.

        An op that reads a key of ``replaced`` counts as reading the tensors there instead.
        """
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
    """Return the softmaxes that a complete graph computes in spite of their exchange.

    Their outputs got readers after the exchange.

    Parameters
    ----------
    names
        The names of exchanged softmaxes.
    ends
        All tensors and ops that the graph is run for.
    """
    ends = list(ends)
    tensors = [end for end in ends if isinstance(end, tf.Tensor)]
    operations = [end for end in ends if isinstance(end, tf.Operation)]
    needed = {op.name for op in Ancestors().of(tensors, also=operations)}
    return [name for name in names if name in needed]
