"""Loops that run one step at a time where a budget needs it.

TensorFlow starts up to ten steps of a ``tf.while_loop`` before the first one has ended
(``parallel_iterations``). The memory of these steps adds up. This matters in two kinds of loops:

- The body has a budget of its own, which counts a single step (`one_at_a_time`). In a loop that
  sums gradients of microbatches, for example, the steps have no other reason to wait.
- The loop is part of a training step with a budget, and the bytes of steps that run ahead
  (:mod:`graph_tools.costs.steps_ahead`) do not fit into it (`within`). Other loops stay as they
  are, since waiting takes time (6 % of an LSTM, measured on two cores).

No value changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.costs.steps_ahead import bytes_ahead
from graph_tools.graph.capture import OpGraph
from graph_tools.memory.timeline import Timeline
from graph_tools.notes import has_notes, notes
from graph_tools.tf_private import autodiff, graphs, hooks, loops

__all__ = ["ahead", "one_at_a_time", "within"]


@dataclass(eq=False)
class _Inside:
    """A note on a graph: the graphs directly inside of it that have or enclose a budget."""

    graphs: list[tf.Graph] = field(default_factory=list)


def one_at_a_time(graph: tf.Graph) -> None:
    """Make all loops around ``graph`` run one step at a time."""
    around = [*autodiff.enclosing_graphs(graph)]
    for inner, outer in itertools.pairwise(around):
        if graphs.is_function(outer):
            notes(outer, _Inside).graphs.append(inner)
    hooks.when_traced(_restrain)


def _restrain(graph: tf.Graph) -> None:
    """Make the loops around noted graphs wait, in a graph that was just traced to its end."""
    if not has_notes(graph, _Inside):
        return
    inside = {id(inner) for inner in notes(graph, _Inside).graphs}
    for op in _loops(graph):
        if id(loops.body_of(op)) in inside:
            _let_wait(op)


def ahead(graph: tf.Graph, batch: int) -> dict[tf.Operation, int]:
    """Return, for each loop of ``graph`` with steps that run ahead, the bytes that these steps hold
    at a batch of ``batch`` examples."""
    found = {op: bytes_ahead(op, batch) for op in _loops(graph)}
    return {op: held for op, held in found.items() if held}


def within(held: Mapping[tf.Operation, int], ops: OpGraph, run: Timeline, most: float) -> None:
    """Make the steps of a loop wait for one another where more than ``most`` bytes would be alive.

    Parameters
    ----------
    held
        For each loop, the bytes of the steps that run ahead (`ahead`).
    ops, run
        The training step that contains the loops, and its timeline if the loops' steps wait.
    """
    born = dict(zip(run.owner, run.buffers[0].tolist(), strict=False))
    for loop, size in held.items():
        if loop.name not in ops.position:
            continue
        places = [born[v] for v in map(ops.value, loop.outputs) if v in born]
        if any(run.bytes_alive[place] + size > most for place in places):
            _let_wait(loop)


def _loops(graph: tf.Graph) -> Iterator[tf.Operation]:
    return (op for op in graph.get_operations() if op.type in loops.LOOPS)


def _let_wait(loop: tf.Operation) -> None:
    graphs.set_attribute(loop, "parallel_iterations", tf.compat.v1.AttrValue(i=1))
