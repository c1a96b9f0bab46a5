"""The bytes alive while TensorFlow's executor runs all that a traced function does."""

from __future__ import annotations

import tensorflow as tf

from graph_tools.graph.capture import OpGraph, capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.memory.timeline import Timeline
from graph_tools.ops.devices import Home
from graph_tools.tf_private import autodiff

__all__ = ["simulate_function"]


def simulate_function(
    graph: tf.Graph, batch: int, home: Home | None = None
) -> tuple[OpGraph, Timeline]:
    """Return the captured ops of a function, and its worst run, with the results held to the end.

    Parameters
    ----------
    graph
        The graph of a function that was traced to its end.
    batch
        The size to assume for an unknown batch dimension.
    home
        The device to capture for, if several compute; ``None``: all devices, as one.

    Raises
    ------
    GraphError
        If an op cannot be captured, such as a loop of TF1.

    Examples
    --------
    >>> import tensorflow as tf
    >>> step = tf.function(lambda x: tf.sin(x) * tf.cos(x))
    >>> graph = step.get_concrete_function(tf.TensorSpec([256])).graph
    >>> ops, run = simulate_function(graph, batch=1)
    >>> len(ops.ops), run.peak
    (5, 2048)
    """
    ops = capture(autodiff.ends_of(graph), home=home)
    held = [ops.value(tensor) for tensor in autodiff.outputs_of(graph)]
    return ops, simulate_execution(ops, batch=batch, held=held)[0]
