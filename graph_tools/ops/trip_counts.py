"""The number of steps of a loop, as far as the graph shows it.

A bound is ``maximum_iterations``, or a counter that the condition compares with a number that is
known before the loop runs. That number may be a constant, a dimension, an argument of a function,
or the number of steps of another loop. The rest of a condition can only end a loop sooner. Numbers
from other sources are noted on the loop (`note_steps`). If a loop shows no bound, a caller may give
one (`set_unknown_steps`). O(ops of the condition), plus one scan of each graph for its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.notes import nearest_notes, notes
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs, loops

__all__ = [
    "UNKNOWN_STEPS",
    "behind_identities",
    "known_steps",
    "note_steps",
    "noted_steps",
    "set_unknown_steps",
    "steps_of",
    "trip_count",
    "unknown_steps",
    "whole_steps",
]

#: The number of steps to assume for a loop if nothing is known of it.
UNKNOWN_STEPS = 256
_STEPS = "_graph_tools_steps"
#: Functions of ops that compute numbers of steps and that graph construction may leave unfolded.
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda x: x,
    "Cast": lambda x: x,
    "Max": lambda x, axes: np.max(x, tuple(np.atleast_1d(axes))),
    "Min": lambda x, axes: np.min(x, tuple(np.atleast_1d(axes))),
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "Squeeze": np.squeeze,
}


def trip_count(op: tf.Operation) -> int | None:
    """Return the most steps of a loop, if they are known before it runs; ``None`` otherwise.

    The bounds used are ``maximum_iterations`` and conditions that compare a counter of the loop
    with a known number, alone or in a conjunction.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     _, y = tf.while_loop(lambda i, y: i < 12, lambda i, y: (i + 1, y * y), [2, 0.5])
    >>> trip_count(y.op.inputs[0].op)
    10
    """
    most = _value(op.inputs[1])
    bounds = [int(most) if most is not None and most >= 0 else None]
    condition, body = loops.condition_of(op), loops.body_of(op)
    tests = [] if condition is None or body is None else [condition.outputs[0]]
    while tests:
        test = behind_identities(tests.pop()).op
        if test.type == "LogicalAnd":
            tests += test.inputs
        elif test.type in loops.BRANCHES and _is_conjunction(test):
            tests.append(test.inputs[0])
        elif test.type in ("Less", "LessEqual"):
            bounds.append(_most_steps(op, test, condition, body))
    return min((bound for bound in bounds if bound is not None), default=None)


def _most_steps(op: tf.Operation, test: tf.Operation, condition: Any, body: Any) -> int | None:
    """Return the most steps of a loop while a comparison holds, if known before it runs."""
    counter, limit = (behind_identities(t) for t in test.inputs)
    number = next((i for i, arg in enumerate(condition.inputs) if arg is counter), None)
    end = _constant(limit, condition.inputs, op, _most)
    if number is None or end is None:
        return None
    begin = _value(op.inputs[number])
    step = _increment(op, body, number)
    if begin is None or step is None or step <= 0:
        return None
    return max(0, -(-(int(end) + (test.type == "LessEqual") - int(begin)) // step))


def _constant(
    tensor: tf.Tensor,
    arguments: Sequence[tf.Tensor],
    op: tf.Operation,
    value: Callable[[tf.Tensor], Any],
) -> Any:
    """Return the ``value`` of a tensor in a loop's function, if known before the loop runs."""
    if not tensor.dtype.is_integer:
        return None
    for i, arg in enumerate(arguments):
        if arg is tensor:
            body = loops.body_of(op)
            passed_on = behind_identities(body.outputs[i]) is body.inputs[i]
            return value(op.inputs[i]) if passed_on else None
    return value(tensor)


def _most(tensor: tf.Tensor) -> Any:
    """Return the value of an integer scalar; its maximum, if it is the number of steps of another
    loop or the least of several numbers."""
    known = _value(tensor)
    source = _source(tensor)
    if known is None and source.op.type == "Minimum":
        return min((end for t in source.op.inputs if (end := _value(t)) is not None), default=None)
    if known is None and source.op.type in loops.LOOPS and source.value_index == 0:
        return trip_count(source.op)
    return known


def _is_conjunction(branches: tf.Operation) -> bool:
    """Return whether the result of two branches is true only if their predicate is true. AutoGraph
    writes ``p and q`` as ``q if p else p``."""
    bodies = loops.bodies(branches)
    if len(bodies) != 2 or None in bodies or branches.inputs[0].dtype != tf.bool:
        return False
    otherwise = behind_identities(bodies[1].outputs[branches.outputs[0].value_index])
    given = zip(bodies[1].inputs, branches.inputs[1:], strict=True)
    return any(arg is otherwise and t is branches.inputs[0] for arg, t in given)


def _increment(op: tf.Operation, body: Any, number: int) -> int | None:
    """Return the number that a step adds to an integer loop variable, if it is a constant."""
    made = behind_identities(body.outputs[number]).op
    if made.type not in ("Add", "AddV2"):
        return None
    for one, other in (made.inputs, reversed(made.inputs)):
        if behind_identities(one) is body.inputs[number]:
            value = _constant(behind_identities(other), body.inputs, op, _value)
            return None if value is None else int(value)
    return None


def _value(tensor: tf.Tensor) -> Any:
    """Return the value of an integer scalar, if it follows from constants and known shapes;
    ``None``: it does not."""
    tensor = _source(tensor)
    known = tf.get_static_value(tensor)
    if known is not None or tensor.op.type not in (*_FOLDED, "StridedSlice"):
        return known
    inputs = [_value(t) for t in tensor.op.inputs]
    if any(value is None for value in inputs):
        return None
    if tensor.op.type == "StridedSlice":
        # One dimension of a shape.
        parts, begin = (np.ravel(value) for value in inputs[:2])
        return parts[int(begin[0])] if _takes_one(tensor.op) else None
    return np.asarray(_FOLDED[tensor.op.type](*inputs)).astype(tensor.dtype.as_numpy_dtype)


def _takes_one(op: tf.Operation) -> bool:
    """Return whether a slice takes one element of a vector."""
    masks = ("begin_mask", "ellipsis_mask", "new_axis_mask")
    return (
        op.inputs[0].shape.rank == 1
        and op.get_attr("shrink_axis_mask") == 1
        and not any(op.get_attr(mask) for mask in masks)
    )


class _Calls(dict[int, list[tf.Operation]]):
    """The calls in a graph, by the id of the graph of the called function."""

    seen = 0


def _calls_of(graph: Any) -> list[tf.Operation]:
    """Return the ops that call the function of a graph, in the graph around it."""
    around = getattr(graph, "outer_graph", None)
    if around is None:
        return []
    known, operations = notes(around, _Calls), around.get_operations()
    for op in operations[known.seen :]:
        for body in loops.bodies(op) if op.type in loops.CALLS else ():
            known.setdefault(id(body), []).append(op)
    known.seen = len(operations)
    return known.get(id(graph), [])


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Return the first tensor that has the value of ``tensor``: through identities, out of
    functions that are called once, and into functions that return it."""
    while True:
        tensor = behind_identities(tensor)
        op = tensor.op
        if op.type in loops.CALLS:
            (body,) = loops.bodies(op)
            if body is None:
                return tensor
            tensor = body.outputs[tensor.value_index]
        elif op.type == "Placeholder" and len(calls := _calls_of(op.graph)) == 1:
            number = next((i for i, arg in enumerate(op.graph.inputs) if arg is tensor), None)
            if number is None:
                return tensor
            tensor = calls[0].inputs[number]
        else:
            return tensor


def behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Return ``tensor``, or the tensor behind it if it comes from identities."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def note_steps(op: tf.Operation, steps: int) -> None:
    """Note the number of steps on a loop."""
    graphs.set_attribute(op, *noted_steps(steps))


def noted_steps(steps: int) -> tuple[str, Any]:
    """Return the name of the attribute that `note_steps` sets, and its value."""
    return _STEPS, tf.compat.v1.AttrValue(i=steps)


@dataclass(eq=False)
class _UnknownSteps:
    """The most steps that `set_unknown_steps` noted for a graph; ``None``: it noted none."""

    steps: int | None = None


def set_unknown_steps(graph: Any, steps: int | None) -> None:
    """Note the most steps of loops without a known bound in ``graph`` and in the functions that it
    runs; ``None``: the number noted for ``graph`` before. O(ops of all of them)."""
    noted = notes(graph, _UnknownSteps)
    noted.steps = noted.steps if steps is None else steps
    found, stack = {id(graph)}, [graph]
    while stack:
        around = stack.pop()
        notes(around, _UnknownSteps).steps = noted.steps
        for op in around.get_operations():
            if op.type in op_types.FUNCTIONAL:
                for body in loops.bodies(op):
                    if body is not None and id(body) not in found:
                        found.add(id(body))
                        stack.append(body)


def unknown_steps(graph: Any) -> int | None:
    """Return the number that `set_unknown_steps` noted for a graph or the nearest one around it."""
    noted = nearest_notes(graph, _UnknownSteps)
    return None if noted is None else noted.steps


def known_steps(op: tf.Operation) -> int | None:
    """Return the most steps of a loop: as noted on it, from its condition, or from
    `set_unknown_steps`; ``None`` if nothing is known."""
    if _STEPS in op.node_def.attr:
        return int(op.node_def.attr[_STEPS].i)
    steps = trip_count(op)
    return unknown_steps(op.graph) if steps is None else steps


def whole_steps(op: tf.Operation) -> int:
    """Return the most steps of a loop as it was before a replay, so without notes on it;
    `UNKNOWN_STEPS` if nothing is known."""
    steps = trip_count(op)
    steps = unknown_steps(op.graph) if steps is None else steps
    return UNKNOWN_STEPS if steps is None else steps


def steps_of(op: tf.Operation) -> int:
    """Return `known_steps`, or `UNKNOWN_STEPS` if nothing is known."""
    steps = known_steps(op)
    return UNKNOWN_STEPS if steps is None else steps
