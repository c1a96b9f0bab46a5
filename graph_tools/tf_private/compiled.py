"""What XLA makes of a function's graph, asked for inside the process.

``tf.function`` has ``experimental_get_compiler_ir`` for traced functions. A graph that is being
traced has no function yet: one is made of it as it stands, and forgotten again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import ops

from graph_tools.tf_private.autodiff import captures_of, enclosing_graphs
from graph_tools.tf_private.graphs import variable_bytes

__all__ = ["optimized_program", "reads_new_variables"]

#: The stage after all passes, with the assignment of buffers (2.16 to 2.21).
_STAGE = "optimized_hlo_proto_serialized"


def optimized_program(graph: tf.Graph, batch: int) -> Any:
    """Return XLA's program for a function's graph as it stands: an ``HloProto``, with its schedule
    and its assignment of buffers.

    The class of the message is exported nowhere; nor can a ``ConcreteFunction`` be made of a graph
    by public means (2.16 to 2.21).

    Parameters
    ----------
    graph
        A function's graph, with its outputs.
    batch
        Stands in for dimensions that are unknown.

    Raises
    ------
    tf.errors.OpError, ValueError
        XLA cannot compile it, or not without a value that only the run knows.
    """
    name = f"__inspected_{graph.name}_{ops.uid()}"
    with tf.init_scope():
        # It lives as long as the variable.
        function = atomic_function.from_func_graph(name, graph, {})
        arguments = len(graph.inputs) - len(graph.captures)
        serialized = context.context().get_compiler_ir(
            device_name=tf.zeros([]).device,
            platform_name=None,
            function_name=function.name,
            flat_args=[_spec(tensor, batch) for tensor in graph.inputs[:arguments]],
            captured_inputs=[_captured(inner, batch) for _, inner in captures_of(graph)],
            stage=_STAGE,
        )
    return hlo_pb2.HloProto.FromString(serialized)


def reads_new_variables(graph: tf.Graph) -> bool:
    """Whether a function's graph reads variables that have no value yet.

    TensorFlow creates them in the first trace of a function, and traces it once more when they are
    initialized.
    """
    handles = [_around(inner) for _, inner in captures_of(graph) if variable_bytes(inner)]
    with tf.init_scope():
        return not all(
            bool(tf.raw_ops.VarIsInitializedOp(resource=handle))
            for handle in handles
            if not tf.is_symbolic_tensor(handle)
        )


def _spec(tensor: tf.Tensor, batch: int) -> tf.TensorSpec:
    if tensor.shape.rank is None:
        raise ValueError(f"{tensor.name} has no known rank")
    return tf.TensorSpec([batch if n is None else n for n in tensor.shape], tensor.dtype)


def _captured(tensor: Any, batch: int) -> Any:
    """The value of a tensor that a graph captures; zeros, if a graph around computes it."""
    tensor = _around(tensor)
    if not tf.is_symbolic_tensor(tensor):
        return tensor
    spec = _spec(tensor, batch)
    return tf.zeros(spec.shape, spec.dtype)


def _around(tensor: Any) -> Any:
    """What a captured tensor stands for in the outermost graph around."""
    for level in enclosing_graphs(tensor.graph):
        tensor = next((outer for outer, inner in captures_of(level) if inner is tensor), tensor)
    return tensor
