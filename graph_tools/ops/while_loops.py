"""A while loop as what it computes: which loop variables are its state, which never change, which
gather values for its gradient.

TensorFlow differentiates a loop by adding *accumulators* to it: tensor lists, one for each value of
the body that the gradient reads, to which every step appends. Its gradient is a second loop, which
takes them apart from the end. A loop may run again from the state that it had at any step; what
that takes is a part of its body: the ops behind the accumulated values, the state behind those, the
ops that bring that state forward, and so on. Ops that must run once are no part of it
(:meth:`Loop.part`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs, loops
from graph_tools.tf_private.autodiff import enclosing_graphs, home_of

__all__ = [
    "UNKNOWN_STEPS",
    "Loop",
    "Part",
    "behind_identities",
    "in_order",
    "is_pure",
    "note_steps",
    "noted_steps",
    "steps_of",
    "trip_count",
]

#: Stands in for the number of steps of a loop where nothing is known of it.
UNKNOWN_STEPS = 256
_STEPS = "_graph_tools_steps"

#: Stateful by their definition, but what they give is their input, and they have nothing to say
#: that they did not say before.
_CHECKS = frozenset("CheckNumerics CheckNumericsV2".split())
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


@dataclass(frozen=True, eq=False)
class Part:
    """What of a loop's body is run when its steps run again.

    Attributes
    ----------
    ops
        Ops of the body, in an order in which they can run.
    states
        The loop variables (numbers) that they read and that change from step to step.
    invariants
        The loop variables that they read and that never change.
    once
        Tensors of the body that come of ops which must not run again; their value of each step has
        to be kept.
    """

    ops: tuple[tf.Operation, ...]
    states: tuple[int, ...]
    invariants: tuple[int, ...]
    once: tuple[tf.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop that was differentiated.

    Attributes
    ----------
    op
        The loop. Variable 0 counts steps, variable 1 is the most of them (or -1), those from
        ``own`` on are accumulators.
    own
        How many loop variables it had before.
    settled
        Whether all that happens between the loop and its gradient is in the graph around both, and
        in the order of the program. If not, variables may be changed then, and what is read of them
        must be kept.
    until
        For the loop's graph and those around it, how many ops there were when the gradient was
        asked for; none: all.
    """

    op: tf.Operation
    own: int
    settled: bool = True
    until: tuple[tuple[tf.Graph, int], ...] = ()

    @property
    def body(self) -> Any:
        """The graph of the body, accumulators included."""
        return loops.body_of(self.op)

    @property
    def condition(self) -> Any:
        """The graph of the condition."""
        return loops.condition_of(self.op)

    @cached_property
    def accumulated(self) -> dict[int, tf.Tensor]:
        """For each accumulator (number of a loop variable), the tensor of the body that it gathers.

        Raises
        ------
        GraphError
            If a variable that gradients added is none, as in loops that are gradients themselves.
        """
        found = {}
        for i in range(self.own, len(self.body.outputs)):
            out = behind_identities(self.body.outputs[i])
            if out.op.type != "TensorListPushBack" or out.op.inputs[0] is not self.body.inputs[i]:
                raise GraphError(
                    f"loop variable {i} of {self.op.name!r} is no accumulator but {out.op.type}"
                )
            found[i] = out.op.inputs[1]
        return found

    @cached_property
    def invariants(self) -> frozenset[int]:
        """Loop variables that are passed on as they are."""
        pairs = zip(self.body.inputs, self.body.outputs, strict=True)
        return frozenset(
            i for i, (arg, out) in enumerate(pairs) if i and behind_identities(out) is arg
        )

    @cached_property
    def _arguments(self) -> dict[object, int]:
        return {arg.ref(): i for i, arg in enumerate(self.body.inputs)}

    @cached_property
    def _written(self) -> set[int]:
        """Loop variables that are handles of what the body changes, or something between the loop
        and its gradient."""
        unseen = not self.settled or self._runs_python()
        found = {
            i
            for i, handle in enumerate(self.op.inputs)
            if handle.dtype == tf.resource and (unseen or self._is_changed(handle))
        }
        for op in self.body.get_operations():
            for k in _changed_by(op):
                root = self._arguments.get(behind_identities(op.inputs[k]).ref())
                if root is not None:
                    found.add(root)
        return found

    def _between(self) -> Iterator[tuple[tf.Graph, float, float]]:
        """From the loop's graph outwards: ops created between these two run after the loop and
        before its gradient.

        In graphs around the loop's own that may be any, as far as they are run as one.
        """
        until = {id(graph): count for graph, count in self.until}
        home = home_of(self.op.graph)
        after = graphs.creation_index(self.op)
        for graph in enclosing_graphs(self.op.graph):
            operations = graph.get_operations()
            end = until.get(id(graph), len(operations))
            border = graphs.creation_index(operations[end]) if end < len(operations) else math.inf
            yield graph, after, border
            if graph is home:
                return
            after = -1

    def _runs_python(self) -> bool:
        """Whether Python may change any variable, in the body or between the loop and its
        gradient."""
        between = (
            op
            for graph, after, border in self._between()
            for op in graph.get_operations()
            if after < graphs.creation_index(op) < border
        )
        return any(
            not op_types.PYTHON.isdisjoint(_types_in(op))
            for op in (*self.body.get_operations(), *between)
        )

    def _is_changed(self, handle: tf.Tensor) -> bool:
        """Whether something changes what is behind ``handle`` after the loop, in its graph, or at
        any time in one around it."""
        for graph, after, border in self._between():
            for op in handle.consumers():
                between = after < graphs.creation_index(op) < border
                if between and any(op.inputs[k] is handle for k in _changed_by(op)):
                    return True
            outer = {inner.ref(): outer for outer, inner in getattr(graph, "captures", ())}
            captured = outer.get(handle.ref())
            if captured is None or not tf.is_symbolic_tensor(captured):
                return False
            handle = captured
        return False

    def part(self, tensors: Iterable[tf.Tensor]) -> Part:
        """What has to run again for the values of ``tensors``, which are of the body, at
        consecutive steps.

        Raises
        ------
        GraphError
            If something that must run once gives what cannot be kept.
        """
        ops: set[tf.Operation] = set()
        states: set[int] = set()
        invariants: set[int] = set()
        once: dict[object, tf.Tensor] = {}
        stack = list(tensors)
        while stack:
            tensor = stack.pop()
            number = self._arguments.get(tensor.ref())
            if number is not None:
                if number in self.invariants or number == 1:
                    invariants.add(number)
                elif number and number not in states:
                    states.add(number)
                    stack.append(self.body.outputs[number])
                continue
            if tensor.op in ops:
                continue
            if self._may_run_again(tensor.op):
                ops.add(tensor.op)
                stack.extend(tensor.op.inputs)
            else:
                if tensor.dtype in (tf.variant, tf.resource):
                    raise GraphError(
                        f"{tensor.op.name!r} ({tensor.op.type}) must run once, and gives a"
                        f" {tensor.dtype.name}"
                    )
                once[tensor.ref()] = tensor
        return Part(
            ops=tuple(in_order(ops)),
            states=tuple(sorted(states)),
            invariants=tuple(sorted(invariants)),
            once=tuple(sorted(once.values(), key=lambda t: t.name)),
        )

    def _may_run_again(self, op: tf.Operation) -> bool:
        if op.type in op_types.READS:
            root = self._arguments.get(behind_identities(op.inputs[0]).ref())
            return root is not None and root not in self._written
        if op.type in op_types.FUNCTIONAL:
            handles = (
                self._arguments.get(behind_identities(t).ref())
                for t in op.inputs
                if t.dtype == tf.resource
            )
            return is_pure(op) and self._written.isdisjoint(handles)
        return not op_types.is_stateful(op) or op.type in _CHECKS

    @property
    def condition_is_pure(self) -> bool:
        """Whether the condition may be asked more than once."""
        return all(
            op.type in ("Placeholder", *op_types.READS)
            or (is_pure(op) if op.type in op_types.FUNCTIONAL else not op_types.is_stateful(op))
            for op in self.condition.get_operations()
        )


def _changed_by(op: tf.Operation) -> Iterator[int]:
    """The inputs of ``op`` that are handles of what it may change."""
    if op.type in op_types.READS or not op_types.is_stateful(op):
        return
    reads = loops.read_only_inputs(op) if op.type in op_types.FUNCTIONAL else frozenset()
    for k, tensor in enumerate(op.inputs):
        if tensor.dtype == tf.resource and k not in reads:
            yield k


def in_order(ops: Collection[tf.Operation]) -> list[tf.Operation]:
    """``ops`` in an order in which they can run, that of creation where possible; gradients add ops
    before older ones."""
    import networkx as nx

    found = nx.DiGraph()
    found.add_nodes_from(ops)
    found.add_edges_from(
        (before, op)
        for op in ops
        for before in (*(t.op for t in op.inputs), *op.control_inputs)
        if before in found
    )
    return list(nx.lexicographical_topological_sort(found, key=graphs.creation_index))


def is_pure(op: tf.Operation) -> bool:
    """Whether all that a loop, a branch or a call does is computing and reading variables."""
    return not any(
        kind not in op_types.READS | _CHECKS | op_types.FUNCTIONAL and loops.is_stateful_type(kind)
        for kind in _types_in(op)
    )


def _types_in(op: tf.Operation) -> Iterator[str]:
    """The types of an op and of those in functions that it runs, in whatever depth."""
    yield op.type
    if op.type not in op_types.FUNCTIONAL:
        return
    nodes = [node for _, nodes in loops.functions_in(op) for node in nodes]
    seen: set[str] = set()
    while nodes:
        node = nodes.pop()
        yield node.op
        if node.op in op_types.FUNCTIONAL:
            for name, inner in loops.functions_of(op.graph, node):
                if name not in seen:
                    seen.add(name)
                    nodes.extend(inner)


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
        elif test.type in ("Less", "LessEqual"):
            bounds.append(_most_steps(op, test, condition, body))
    return min((bound for bound in bounds if bound is not None), default=None)


def _most_steps(op: tf.Operation, test: tf.Operation, condition: Any, body: Any) -> int | None:
    """How often a loop runs at most while a comparison holds, if that is known before it runs."""
    counter, limit = (behind_identities(t) for t in test.inputs)
    number = next((i for i, arg in enumerate(condition.inputs) if arg is counter), None)
    end = _constant(limit, condition.inputs, op)
    if number is None or end is None:
        return None
    begin = _value(op.inputs[number])
    step = _increment(body, number)
    if begin is None or step is None or step <= 0:
        return None
    return max(0, -(-(int(end) + (test.type == "LessEqual") - int(begin)) // step))


def _constant(tensor: tf.Tensor, arguments: Sequence[tf.Tensor], op: tf.Operation) -> Any:
    """The value of a tensor of a loop's function, if it is one before the loop runs."""
    if not tensor.dtype.is_integer:
        return None
    for i, arg in enumerate(arguments):
        if arg is tensor:
            body = loops.body_of(op)
            passed_on = behind_identities(body.outputs[i]) is body.inputs[i]
            return _most(op.inputs[i]) if passed_on else None
    return _most(tensor)


def _most(tensor: tf.Tensor) -> Any:
    """The value of an integer scalar; where it is how often another loop runs, the most it can
    be."""
    known = _value(tensor)
    source = _source(tensor)
    if known is None and source.op.type in loops.LOOPS and source.value_index == 0:
        return trip_count(source.op)
    return known


def _increment(body: Any, number: int) -> int | None:
    """What a step adds to an integer loop variable, if that is a constant."""
    made = behind_identities(body.outputs[number]).op
    if made.type not in ("Add", "AddV2"):
        return None
    for one, other in (made.inputs, reversed(made.inputs)):
        if behind_identities(one) is body.inputs[number]:
            value = _value(other)
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


def note_steps(op: tf.Operation, steps: int | None) -> None:
    """Note how often a loop runs, ``None``: not known."""
    graphs.set_attribute(op, *noted_steps(steps))


def noted_steps(steps: int | None) -> tuple[str, Any]:
    """The attribute by which `note_steps` notes that, and its value."""
    return _STEPS, tf.compat.v1.AttrValue(i=UNKNOWN_STEPS if steps is None else steps)


def steps_of(op: tf.Operation) -> int:
    """Return how often a loop runs: as noted on it, or known from its condition; else
    `UNKNOWN_STEPS`."""
    if _STEPS in op.node_def.attr:
        return int(op.node_def.attr[_STEPS].i)
    steps = trip_count(op)
    return UNKNOWN_STEPS if steps is None else steps
