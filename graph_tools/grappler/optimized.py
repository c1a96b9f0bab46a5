"""The ops that grappler leaves of a graph, and what they read.

Constants move (:mod:`~graph_tools.grappler.constant_folding`), equal ops become one
(:mod:`~graph_tools.grappler.common_subexpressions`), as do sums
(:mod:`~graph_tools.grappler.merged_sums`), and readers bypass splits. O(ops + edges).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graph_tools.graph.capture import OpGraph
from graph_tools.grappler.common_subexpressions import equal_ops, results_as_one
from graph_tools.grappler.constant_folding import folded
from graph_tools.grappler.merged_sums import merged_sums
from graph_tools.ops import op_types

__all__ = ["Optimized", "optimized"]


@dataclass(frozen=True, eq=False)
class Optimized:
    """A graph as grappler leaves it.

    Attributes
    ----------
    reads
        The values that each op reads.
    same
        For each op that equals an earlier one, that op.
    one
        For each value that equals an earlier one, that value.
    gone
        The ops that do not run.
    bypassed
        The ops whose readers read their inputs instead; their outputs have no buffers.
    """

    reads: Sequence[Sequence[int]]
    same: Mapping[int, int]
    one: Mapping[int, int]
    gone: frozenset[int]
    bypassed: frozenset[int]


def optimized(ops: OpGraph, held: Collection[int]) -> Optimized:
    """Return a graph as grappler leaves it; ``held``: values that are read after the last op.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     graph = capture([tf.sin(x) + tf.sin(x)])
    >>> [graph.ops[i].name for i in optimized(graph, ()).gone]
    ['Sin_1']
    """
    same = equal_ops(ops)
    one = results_as_one(ops, same)
    moved = folded(ops)
    gone = moved.gone | same.keys()
    bypassed = [i for i, op in enumerate(ops.ops) if op_types.is_split(op)]
    reads = [[one.get(v, v) for v in values] for values in _past(bypassed, ops, moved.reads)]
    for i, addends in merged_sums(ops, reads, gone, held).items():
        reads[i] = addends
        gone |= frozenset() if addends else {i}
    return Optimized(reads, same, one, gone, frozenset(bypassed))


def _past(
    split: Iterable[int], ops: OpGraph, reads: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return ``reads`` with the ops of ``split`` bypassed; these ops themselves read nothing."""
    first = ops.first_value.tolist()
    past: dict[int, int] = {}
    found = list(reads)
    for i in split:
        past.update((first[i] + k, past.get(v, v)) for k, v in enumerate(reads[i]))
        found[i] = ()
    return [[past.get(v, v) for v in values] for values in found] if past else found
