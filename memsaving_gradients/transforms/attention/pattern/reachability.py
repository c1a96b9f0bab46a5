"""The edges of a graph as an exchange of tensors would leave it, and exchanges without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graph_tools.graph.topology import Edges, ancestors

__all__ = ["Exchanged", "plain_as_well"]


class Exchanged(Edges):
    """The edges of a graph in which other tensors are read instead of some.

    Parameters
    ----------
    plain
        The edges of the graph as it is.
    replaced
        For each tensor that is replaced, by reference, the tensors that are read instead.
    """

    def __init__(self, plain: Edges, replaced: Mapping[Any, Sequence[tf.Tensor]]) -> None:
        super().__init__()
        self._plain = plain
        self._instead = {_place(old.deref()): [*map(_place, new)] for old, new in replaced.items()}

    def __missing__(
        self, op: tf.Operation
    ) -> tuple[list[tuple[tf.Operation, int]], list[tf.Operation]]:
        reads, waits = self._plain[op]
        found = [new for read in reads for new in self._instead.get(read, [read])], waits
        self[op] = found
        return found


def _place(tensor: tf.Tensor) -> tuple[tf.Operation, int]:
    return tensor.op, tensor.value_index


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
    roots = [end if isinstance(end, tf.Operation) else end.op for end in ends]
    needed = {op.name for op in ancestors(roots, Edges())}
    return [name for name in names if name in needed]
