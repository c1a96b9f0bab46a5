"""What XLA makes of a function's graph, without a step being run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.tf_private.compiled import optimized_program
from graph_tools.xla.buffers import Assignment, assignment_of
from graph_tools.xla.hlo import Module, module_of

__all__ = ["Program", "compiled"]


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes
    ----------
    module
        Its instructions.
    assignment
        Its buffers.
    seconds
        How long XLA compiled.
    """

    module: Module
    assignment: Assignment
    seconds: float


def compiled(graph: tf.Graph, batch: int) -> Program:
    """Return what XLA makes of a function's graph as it stands.

    XLA compiles it as it does when the function is called for the first time, and forgets the
    result: the call compiles once more.

    Parameters
    ----------
    graph
        The graph of a function that was traced to its end.
    batch
        Stands in for dimensions that are unknown.

    Raises
    ------
    GraphError
        XLA cannot compile it, or not without a value that only the run knows.

    Examples
    --------
    >>> import tensorflow as tf
    >>> step = tf.function(lambda x: tf.reduce_sum(tf.sin(x) @ x), jit_compile=True)
    >>> found = compiled(step.get_concrete_function(tf.TensorSpec([256, 256])).graph, batch=1)
    >>> found.assignment.temporaries >= 256 * 256 * 4
    True
    """
    start = time.perf_counter()
    try:
        proto = optimized_program(graph, batch)
    except (tf.errors.OpError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise GraphError(f"XLA compiles {graph.name} only as it runs: {reason}") from error
    seconds = time.perf_counter() - start
    module = module_of(proto.hlo_module)
    return Program(module, assignment_of(proto.buffer_assignment, module), seconds)
