"""Steps of a loop whose body keeps a budget run one at a time.

TensorFlow starts up to ten steps of a ``tf.while_loop`` before the first one has ended
(``parallel_iterations``), and what each of them holds is there together. The steps of a loop that
adds gradients of microbatches up have nothing else to wait for. A budget is that of one step, so
the loop gets one at a time. No value changes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.notes import has_notes, notes
from graph_tools.tf_private import autodiff, graphs, hooks, loops

__all__ = ["one_at_a_time"]


@dataclass(eq=False)
class _Inside:
    """Graphs that were traced inside of another one, and keep a budget somewhere inside."""

    graphs: list[tf.Graph] = field(default_factory=list)


def one_at_a_time(graph: tf.Graph) -> None:
    """Let all loops run one step at a time in whose steps ``graph`` runs."""
    around = [*autodiff.enclosing_graphs(graph)]
    for inner, outer in itertools.pairwise(around):
        if graphs.is_function(outer):
            notes(outer, _Inside).graphs.append(inner)
    hooks.when_traced(_restrain)


def _restrain(graph: tf.Graph) -> None:
    """Look at the loops of a graph that was just traced to its end."""
    if not has_notes(graph, _Inside):
        return
    inside = {id(inner) for inner in notes(graph, _Inside).graphs}
    for op in graph.get_operations():
        if op.type in loops.LOOPS and id(loops.body_of(op)) in inside:
            one = tf.compat.v1.AttrValue(i=1)
            graphs.set_attribute(op, "parallel_iterations", one)
