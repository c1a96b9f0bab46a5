"""The loop variables of a while loop by their use: state, invariants, and values gathered for its
gradient.

TensorFlow differentiates a loop by adding *accumulators* to it: tensor lists, one for each value of
the body that the gradient reads, to which every step appends. The gradient is a second loop, which
takes the lists apart from the end. A loop may run again from its state at any step. Running it
again needs a part of its body: the ops that compute the accumulated values, the state that these
read, the ops that advance that state, and so on. Ops that must run once are left out
(:meth:`Loop.part`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.ops import op_types
from graph_tools.ops.trip_counts import behind_identities
from graph_tools.tf_private import graphs, loops
from graph_tools.tf_private.autodiff import enclosing_graphs, home_of

__all__ = ["Loop", "Part", "in_order"]

#: Ops that are stateful by definition but may run again: they return their input, and a second run
#: reports nothing new.
_CHECKS = frozenset("CheckNumerics CheckNumericsV2".split())


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a loop's body that runs when its steps run again.

    Attributes
    ----------
    ops
        Ops of the body, in an order in which they can run.
    states
        The loop variables (numbers) that `ops` read and that change from step to step.
    invariants
        The loop variables that `ops` read and that never change.
    once
        Tensors of the body whose ops must not run again: their values of every step must be kept.
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
        The loop. Variable 0 counts the steps, variable 1 is the maximum of steps (or -1), and the
        variables from ``own`` on are accumulators.
    own
        The number of loop variables before the gradient added accumulators.
    settled
        Whether all ops that run between the loop and its gradient are in the graph around both, in
        the order of the program. If not, variables may change in between, and values read from them
        must be kept.
    until
        For the loop's graph and the graphs around it, the number of ops when the gradient was
        requested; for a graph without an entry, all ops count.
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
            If a variable that gradients added is no accumulator, as in loops that are gradients.
        """
        found = {}
        for i in range(self.own, len(self.body.outputs)):
            out = behind_identities(self.body.outputs[i])
            if out.op.type != "TensorListPushBack" or out.op.inputs[0] is not self.body.inputs[i]:
                raise GraphError(
                    f"loop variable {i} of {self.op.name!r} is not an accumulator: a"
                    f" {out.op.type} op computes it"
                )
            found[i] = out.op.inputs[1]
        return found

    @cached_property
    def invariants(self) -> frozenset[int]:
        """The loop variables that every step passes on unchanged."""
        pairs = zip(self.body.inputs, self.body.outputs, strict=True)
        return frozenset(
            i for i, (arg, out) in enumerate(pairs) if i and behind_identities(out) is arg
        )

    @cached_property
    def _arguments(self) -> dict[object, int]:
        return {arg.ref(): i for i, arg in enumerate(self.body.inputs)}

    @cached_property
    def _written(self) -> set[int]:
        """The loop variables that are handles of resources that may be changed by the body, or by
        ops between the loop and its gradient."""
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
        """Yield, from the loop's graph outwards, each graph and two creation indices: ops between
        these may run after the loop and before its gradient.

        In graphs around the loop's own, up to its home, there is no lower limit.
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
        """Return whether an op that calls Python, which may change any variable, runs in the body
        or between the loop and its gradient."""
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
        """Return whether an op may change the resource of ``handle``, after the loop in its graph
        or at any time in a graph around it."""
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
        """Return the part that must run again to compute ``tensors`` of the body at consecutive
        steps.

        Raises
        ------
        GraphError
            If an op that must run once gives a variant or a resource, which cannot be kept.
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
                        f"{tensor.op.name!r} ({tensor.op.type}) must run only once, but its output"
                        f" is a {tensor.dtype.name}, which the loop cannot store"
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
        """Whether the condition may be computed more than once."""
        return all(
            op.type in ("Placeholder", *op_types.READS)
            or (is_pure(op) if op.type in op_types.FUNCTIONAL else not op_types.is_stateful(op))
            for op in self.condition.get_operations()
        )


def _changed_by(op: tf.Operation) -> Iterator[int]:
    """Yield the inputs of ``op`` that are handles of resources that it may change."""
    if op.type in op_types.READS or not op_types.is_stateful(op):
        return
    reads = loops.read_only_inputs(op) if op.type in op_types.FUNCTIONAL else frozenset()
    for k, tensor in enumerate(op.inputs):
        if tensor.dtype == tf.resource and k not in reads:
            yield k


def in_order(ops: Collection[tf.Operation]) -> list[tf.Operation]:
    """Return ``ops`` in an order in which they can run: by creation, except where a gradient added
    an op that older ops read."""
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
    """Return whether a loop, a branch or a call only computes and reads variables."""
    return not any(
        kind not in op_types.READS | _CHECKS | op_types.FUNCTIONAL and loops.is_stateful_type(kind)
        for kind in _types_in(op)
    )


def _types_in(op: tf.Operation) -> Iterator[str]:
    """Yield the types of an op and of the ops in functions that it runs, at any depth."""
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
