"""XLA's program for a function's graph, compiled inside the process.

``tf.function`` has ``experimental_get_compiler_ir`` for traced functions. A graph that is being
traced has no function yet: a temporary one is made of the graph in its current state.
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

#: The compiler stage after all passes, with the buffer assignment (2.16 to 2.21).
_STAGE = "optimized_hlo_proto_serialized"


def optimized_program(graph: tf.Graph, batch: int) -> Any:
    """Return XLA's program for a function's graph in its current state: an ``HloProto`` with its
    schedule and its buffer assignment.

    The class of the message is exported nowhere, and there is no public way to make a
    ``ConcreteFunction`` of a graph (2.16 to 2.21).

    Parameters
    ----------
    graph
        A function's graph, with its outputs.
    batch
        The size to assume for unknown dimensions.

    Raises
    ------
    tf.errors.OpError, ValueError
        XLA cannot compile the graph, or needs a value that is known only at run time.
    """
    name = f"__inspected_{graph.name}_{ops.uid()}"
    with tf.init_scope():
        # The function lives in TensorFlow as long as this variable.
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
    """Return whether a function's graph reads variables that have no value yet.

    TensorFlow creates variables in the first trace of a function, and traces it once more when they
    are initialized.
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
    """Return the value of a tensor that a graph captures; zeros, if an outer graph computes it."""
    tensor = _around(tensor)
    if not tf.is_symbolic_tensor(tensor):
        return tensor
    spec = _spec(tensor, batch)
    return tf.zeros(spec.shape, spec.dtype)


def _around(tensor: Any) -> Any:
    """Return the tensor that a captured tensor represents in the outermost graph."""
    for level in enclosing_graphs(tensor.graph):
        tensor = next((outer for outer, inner in captures_of(level) if inner is tensor), tensor)
    return tensor
