"""XLA's compiled program of a function's graph, without running a step."""

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
        The time that XLA took to compile.
    """

    module: Module
    assignment: Assignment
    seconds: float


def compiled(graph: tf.Graph, batch: int) -> Program:
    """Compile a function's graph in its current state by XLA, and return the program.

    XLA compiles the graph as in the first call of the function, but discards the result: the call
    compiles once more.

    Parameters
    ----------
    graph
        The graph of a function that was traced to its end.
    batch
        The size to assume for unknown dimensions.

    Raises
    ------
    GraphError
        XLA cannot compile the graph, or needs a value that is known only at run time.

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
        raise GraphError(f"XLA cannot compile {graph.name} before it runs: {reason}") from error
    seconds = time.perf_counter() - start
    module = module_of(proto.hlo_module)
    return Program(module, assignment_of(proto.buffer_assignment, module), seconds)
