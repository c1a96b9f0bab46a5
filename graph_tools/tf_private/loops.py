"""Every private TensorFlow call around loops, in one place.

Each comment says why there is no public way. Seen in TensorFlow 2.16 to 2.21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, func_graph, op_def_registry, ops
from tensorflow.python.ops import control_flow_util_v2, handle_data_util

__all__ = [
    "BRANCHES",
    "CALLS",
    "LOOPS",
    "bodies",
    "body_of",
    "condition_of",
    "copy_op",
    "function_graph",
    "functions_in",
    "functions_of",
    "is_stateful_type",
    "note_own_outputs",
    "read_only_inputs",
    "traced_like",
]

#: The types of ops that a ``tf.while_loop`` becomes.
LOOPS = ("While", "StatelessWhile")
#: The types of ops that a ``tf.cond``, a ``tf.case`` or a ``tf.switch_case`` becomes.
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
#: The types of ops that a call of a function becomes.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")

#: Fact: the attributes of ops that hold the functions they run, without a loop's condition.
_BODIES = {
    **dict.fromkeys(LOOPS, ("body",)),
    **dict.fromkeys(BRANCHES[:2], ("then_branch", "else_branch")),
    **dict.fromkeys(BRANCHES[2:], ("branches",)),
    **dict.fromkeys(CALLS, ("f",)),
}


def body_of(loop: tf.Operation) -> Any:
    """Return the graph of a loop's body as traced, with the accumulators that gradients added.

    TensorFlow keeps it only on the op (2.16 to 2.21). The result is ``None`` for loops that were
    imported.
    """
    return getattr(loop, "_body_graph", None)


def condition_of(loop: tf.Operation) -> Any:
    """Return the graph of a loop's condition (see `body_of`)."""
    return getattr(loop, "_cond_graph", None)


def function_graph(op: tf.Operation, attribute: str) -> Any:
    """Return the graph of the function that an attribute of ``op`` holds; ``None`` if unknown.

    (It differs from `body_of` if the function was replaced. Functions of a graph are not public,
    2.16 to 2.21.)
    """
    return _graph(op.graph, function_name(op, attribute))


def bodies(op: tf.Operation) -> list[Any]:
    """Return the graphs of the functions that ``op`` runs (for a loop, only of its body); ``None``
    for each unknown one (see `function_graph`)."""
    values = (op.get_attr(attribute) for attribute in _BODIES[op.type])
    functions = (f for value in values for f in (value if isinstance(value, list) else [value]))
    return [_graph(op.graph, function.name) for function in functions]


def function_name(op: tf.Operation, attribute: str) -> str:
    """Return the name of the function that an attribute of ``op`` holds."""
    return str(op.get_attr(attribute).name)


def functions_in(op: tf.Operation) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield ``(name, nodes)`` of each function that ``op`` runs and that its graph knows.

    An attribute names the function; or, if ``Defun`` made it, the type of ``op`` is its name.

    ``tf.Graph`` lists its functions only as a serialized whole (2.16 to 2.21).
    """
    return functions_of(op.graph, op.node_def)


def functions_of(graph: tf.Graph, node: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield as `functions_in`, for a node of ``graph`` or of a function that is called in it."""
    names = [node.op]
    for value in node.attr.values():
        names += [value.func.name] if value.HasField("func") else []
        names += [func.name for func in value.list.func]
    for name in names:
        function = _function(graph, name)
        if function is not None:
            yield name, function.cached_definition.node_def


def _graph(graph: Any, name: str) -> Any:
    return getattr(_function(graph, name), "graph", None)


def _function(graph: Any, name: str) -> Any:
    while graph is not None:
        found = graph._get_function(name)
        if found is not None:
            return found
        graph = getattr(graph, "outer_graph", None)
    return None


def is_stateful_type(kind: str) -> bool:
    """Return whether ops of type ``kind`` are stateful by definition, or are not registered (the
    registry is not public, 2.16 to 2.21)."""
    definition = op_def_registry.get(kind)
    return definition is None or bool(definition.is_stateful)


def read_only_inputs(op: tf.Operation) -> frozenset[int]:
    """Return the inputs that are handles of variables that a loop, a branch or a call only reads.

    TensorFlow notes them on each such op for its automatic control dependencies (2.16 to 2.21).
    """
    attribute = op.node_def.attr.get(auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR)
    return frozenset(() if attribute is None else attribute.list.i)


def note_own_outputs(loop: tf.Operation, own: int) -> None:
    """Make gradients treat ``loop`` as one with only ``own`` outputs, without accumulators (by a
    private attribute; 2.16 to 2.21)."""
    loop._set_attr("_num_original_outputs", tf.compat.v1.AttrValue(i=own))


def copy_op(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    wait_for: Sequence[tf.Operation] = (),
    **attributes: tf.compat.v1.AttrValue,
) -> tf.Operation:
    """Return a copy of ``op`` in the current graph, with other ``attributes``. The functions that
    it calls are added to the graph; ``op`` may be in another graph.

    Private as `graph_tools.tf_private.graphs.create_in`. A function can be added to a graph
    publicly only if it is a concrete function. The handle data of variables and lists are not
    public at all (2.16 to 2.21).
    """
    graph = tf.compat.v1.get_default_graph()
    for name, _ in functions_in(op):
        graph._add_function_recursive(_function(op.graph, name))
    kept = {key: value for key, value in op.node_def.attr.items() if key != "_class"}
    with tf.control_dependencies(wait_for):
        copy = graph._create_op_internal(
            op.type,
            list(inputs),
            [out.dtype for out in op.outputs],
            name=op.name,
            attrs=kept | attributes,
            op_def=op.op_def,
        )
    if op.device:
        copy._set_device(op.device)
    for theirs, ours in zip(op.outputs, copy.outputs, strict=True):
        ours.set_shape(theirs.shape)
        handle_data_util.copy_handle_data(theirs, ours)
    return copy


def traced_like(
    loop: tf.Operation, own: int, suffix: str, function: Callable[..., Sequence[tf.Tensor]]
) -> tf.compat.v1.AttrValue:
    """Trace ``function`` with the signature of the body of ``loop``, and add it to the loop's
    graph. Return the value for an attribute that names it.

    The first ``own`` arguments have the handle data (variables, lists) of the body's arguments.

    ``tf.function`` cannot make a graph that TensorFlow treats as the body of a loop. TensorFlow
    makes the functions of its own loops by these calls (2.16 to 2.21).
    """
    outer, body = loop.graph, body_of(loop)
    name = f"{function_name(loop, 'body')}_{suffix}_{ops.uid()}"

    def traced(*args: tf.Tensor) -> list[tf.Tensor]:
        for theirs, ours in zip(body.inputs[:own], args[:own], strict=True):
            handle_data_util.copy_handle_data(theirs, ours)
        return list(function(*args))

    with outer.as_default():
        graph = func_graph.func_graph_from_py_func(
            name,
            traced,
            [],
            {},
            signature=[tf.TensorSpec(t.shape, t.dtype) for t in body.inputs],
            func_graph=control_flow_util_v2.WhileBodyFuncGraph(
                name, collections=outer._collections
            ),
            add_control_dependencies=outer._add_control_dependencies,
        )
        assert not graph.external_captures, graph.external_captures
        registered = control_flow_util_v2.create_new_tf_function(graph)
    value = tf.compat.v1.AttrValue()
    value.func.name = registered
    return value
