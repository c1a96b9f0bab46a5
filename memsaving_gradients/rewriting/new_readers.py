"""The order of new reads of a variable, and of the updates that a step makes later.

TensorFlow orders the ops of a function on the same variable while it traces them. Ops that a
rewrite adds afterwards, such as replayed loops, need control edges of their own.
"""

from __future__ import annotations

import tensorflow as tf

from graph_tools.graph.topology import Edges, ancestors
from graph_tools.tf_private import graphs

__all__ = ["let_readers_be_first"]


def let_readers_be_first(graph: tf.Graph, first: tf.Operation, known: int) -> None:
    """Let ops that were built after the first ``known`` ones, such as replayed loops, read
    variables before later ops of the step change them.

    TensorFlow's automatic control dependencies, which order the ops of a function while it is
    traced, do not see these ops. They run among the gradients, of which ``first`` is the first op.
    So only updates that were built after ``first`` have to wait.
    """
    built = graph.get_operations()
    readers: dict[object, list[tf.Operation]] = {}
    for op in built[known:]:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                readers.setdefault(tensor.ref(), []).append(op)
    if not readers:
        return
    edges, begins = Edges(), graphs.creation_index(first)
    for op in built[:known]:
        if graphs.creation_index(op) < begins:
            continue
        found = dict.fromkeys(
            reader for handle in graphs.written_by(op) for reader in readers.get(handle.ref(), ())
        )
        before = [reader for reader in found if op not in ancestors([reader], edges)]
        if before:
            graphs.add_control_inputs(op, before)
