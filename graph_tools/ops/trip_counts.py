"""How often a loop runs, as far as the graph shows.

A bound is a ``maximum_iterations``, or a counter that a condition compares with a number that is
known before the loop runs: a constant, a dimension, what a function is called with, or how often
another loop runs. The rest of a condition can only end a loop sooner. What is known otherwise is
noted on the loop. Of loops that show nothing, somebody may tell the most steps (`tell_steps`).
O(ops of the condition), and once for each graph its calls.
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
    "steps_of",
    "tell_steps",
    "told_steps",
    "trip_count",
    "whole_steps",
]

#: Stands in for the number of steps of a loop where nothing is known of it.
UNKNOWN_STEPS = 256
_STEPS = "_graph_tools_steps"
#: Of what is not folded while a graph is built, what numbers of steps are computed by.
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
    """How often a loop runs at most, if its condition says so before it runs.

    Known are ``maximum_iterations``, and conditions that compare a counter of the loop with a
    constant, alone or together with others.

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
    """How often a loop runs at most while a comparison holds, if that is known before it runs."""
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
    """The ``value`` of a tensor of a loop's function, if it is one before the loop runs."""
    if not tensor.dtype.is_integer:
        return None
    for i, arg in enumerate(arguments):
        if arg is tensor:
            body = loops.body_of(op)
            passed_on = behind_identities(body.outputs[i]) is body.inputs[i]
            return value(op.inputs[i]) if passed_on else None
    return value(tensor)


def _most(tensor: tf.Tensor) -> Any:
    """The value of an integer scalar; where it is how often another loop runs, or the least of
    several numbers, the most it can be."""
    known = _value(tensor)
    source = _source(tensor)
    if known is None and source.op.type == "Minimum":
        return min((end for t in source.op.inputs if (end := _value(t)) is not None), default=None)
    if known is None and source.op.type in loops.LOOPS and source.value_index == 0:
        return trip_count(source.op)
    return known


def _is_conjunction(branches: tf.Operation) -> bool:
    """Whether what two branches give is true only if their predicate is: AutoGraph writes ``p and
    q`` as ``q if p else p``."""
    bodies = loops.bodies(branches)
    if len(bodies) != 2 or None in bodies or branches.inputs[0].dtype != tf.bool:
        return False
    otherwise = behind_identities(bodies[1].outputs[branches.outputs[0].value_index])
    given = zip(bodies[1].inputs, branches.inputs[1:], strict=True)
    return any(arg is otherwise and t is branches.inputs[0] for arg, t in given)


def _increment(op: tf.Operation, body: Any, number: int) -> int | None:
    """What a step adds to an integer loop variable, if that is a constant."""
    made = behind_identities(body.outputs[number]).op
    if made.type not in ("Add", "AddV2"):
        return None
    for one, other in (made.inputs, reversed(made.inputs)):
        if behind_identities(one) is body.inputs[number]:
            value = _constant(behind_identities(other), body.inputs, op, _value)
            return None if value is None else int(value)
    return None


def _value(tensor: tf.Tensor) -> Any:
    """The value of an integer scalar, if it follows from constants and known shapes; ``None``: it
    does not."""
    tensor = _source(tensor)
    known = tf.get_static_value(tensor)
    if known is not None or tensor.op.type not in (*_FOLDED, "StridedSlice"):
        return known
    inputs = [_value(t) for t in tensor.op.inputs]
    if any(value is None for value in inputs):
        return None
    if tensor.op.type == "StridedSlice":
        # Of a shape, one dimension.
        parts, begin = (np.ravel(value) for value in inputs[:2])
        return parts[int(begin[0])] if _takes_one(tensor.op) else None
    return np.asarray(_FOLDED[tensor.op.type](*inputs)).astype(tensor.dtype.as_numpy_dtype)


def _takes_one(op: tf.Operation) -> bool:
    """Whether a slice takes one element of a vector."""
    masks = ("begin_mask", "ellipsis_mask", "new_axis_mask")
    return (
        op.inputs[0].shape.rank == 1
        and op.get_attr("shrink_axis_mask") == 1
        and not any(op.get_attr(mask) for mask in masks)
    )


class _Calls(dict[int, list[tf.Operation]]):
    """The calls in a graph, by the graph (its id) of the function that they call."""

    seen = 0


def _calls_of(graph: Any) -> list[tf.Operation]:
    """The ops that call the function of a graph, in the graph around it."""
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
    """What ``tensor`` is the same as, also outside of a function that is called once, or inside of
    one whose result it is."""
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
    """``tensor``, or what it is the same as."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def note_steps(op: tf.Operation, steps: int) -> None:
    """Note how often a loop runs."""
    graphs.set_attribute(op, *noted_steps(steps))


def noted_steps(steps: int) -> tuple[str, Any]:
    """The attribute by which `note_steps` notes that, and its value."""
    return _STEPS, tf.compat.v1.AttrValue(i=steps)


@dataclass(eq=False)
class _Told:
    """The most steps of a graph's loops that do not show how many they take, as somebody told;
    ``None``: nobody did."""

    steps: int | None = None


def tell_steps(graph: Any, steps: int | None) -> None:
    """Note the most steps of loops in ``graph``, and in functions that it runs, of which nothing
    else is known; ``None``: what was told of ``graph`` before. O(ops of all of them)."""
    told = notes(graph, _Told)
    told.steps = told.steps if steps is None else steps
    found, stack = {id(graph)}, [graph]
    while stack:
        around = stack.pop()
        notes(around, _Told).steps = told.steps
        for op in around.get_operations():
            if op.type in op_types.FUNCTIONAL:
                for body in loops.bodies(op):
                    if body is not None and id(body) not in found:
                        found.add(id(body))
                        stack.append(body)


def told_steps(graph: Any) -> int | None:
    """Return what `tell_steps` noted of a graph, or of the nearest one around it."""
    told = nearest_notes(graph, _Told)
    return None if told is None else told.steps


def known_steps(op: tf.Operation) -> int | None:
    """Return how often a loop runs at most: as noted on it, known from its condition, or told;
    ``None`` where nothing is known."""
    if _STEPS in op.node_def.attr:
        return int(op.node_def.attr[_STEPS].i)
    steps = trip_count(op)
    return told_steps(op.graph) if steps is None else steps


def whole_steps(op: tf.Operation) -> int:
    """Return how often a loop runs at most, as it was before it was replayed: `UNKNOWN_STEPS` where
    nothing is known."""
    steps = trip_count(op)
    steps = told_steps(op.graph) if steps is None else steps
    return UNKNOWN_STEPS if steps is None else steps


def steps_of(op: tf.Operation) -> int:
    """Return `known_steps`, or `UNKNOWN_STEPS` where nothing is known."""
    steps = known_steps(op)
    return UNKNOWN_STEPS if steps is None else steps
