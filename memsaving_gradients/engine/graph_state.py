"""The state of each graph: the plans used, the gradients built, the idle ops. It lives as long as
the graph, so that nothing has to be reset."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.notes import notes
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.reports.plan import Plan

__all__ = [
    "Watch",
    "differentiated",
    "earlier",
    "idle",
    "is_differentiated",
    "operations_since",
    "plans",
    "record",
    "retire",
    "returned",
    "warned",
    "watching",
]


@dataclass(eq=False)
class _State:
    """The state of one graph.

    Attributes
    ----------
    plans
        The plans used, each with its number in the order of all graphs' plans.
    warnings
        The messages of warnings and notes that were given.
    returned
        Names of the gradients that the user got, each with whether it lives until the end of the
        step.
    built
        The number of ops when the newest gradients were complete.
    idle
        See `idle`.
    differentiated
        Names of the ops of losses whose gradients exist already.
    """

    plans: list[tuple[int, Plan]] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    returned: list[tuple[str, bool]] = field(default_factory=list)
    built: int = 0
    idle: set[int] = field(default_factory=set)
    differentiated: set[str] = field(default_factory=set)


#: The graphs in which plans were used.
_planned: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
_count = 0


@dataclass(eq=False)
class Watch:
    """A record of a period: the plans used, newest last, and whether a warning was given."""

    plans: list[Plan] = field(default_factory=list)
    warned: bool = False


# Not a context variable: distribution strategies trace in threads of their own.
_watches: list[Watch] = []


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Note in ``watch`` the plans and warnings that are recorded inside."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def record(graph: tf.Graph, plan: Plan) -> None:
    """Note that ``plan`` was used for gradients built in ``graph``."""
    global _count
    _count += 1
    _planned.add(graph)
    notes(graph, _State).plans.append((_count, plan))
    for watch in _watches:
        watch.plans.append(plan)


def returned(graph: tf.Graph, grads: Sequence[tf.Tensor], held: bool) -> None:
    """Note that ``grads`` were built in ``graph`` and given to the user; ``held``: to live until
    the end of the step."""
    state = notes(graph, _State)
    state.returned.extend((tensor.name, held) for tensor in grads)
    state.built = len(graph.get_operations())


def earlier(graph: tf.Graph) -> list[tuple[tf.Tensor, bool]]:
    """Return the gradients built in ``graph`` so far, each with whether it lives until the end of
    the step."""
    given = notes(graph, _State).returned
    return [(graph.get_tensor_by_name(name), held) for name, held in given]


def differentiated(loss: tf.Tensor) -> None:
    """Note that the gradients of ``loss`` exist already, with the savings that were asked for."""
    notes(loss.graph, _State).differentiated.add(loss.op.name)


def is_differentiated(graph: tf.Graph, ys: Sequence[tf.Tensor]) -> bool:
    """Return whether ``ys`` are computed from a loss that was given to `differentiated`."""
    known = notes(graph, _State).differentiated
    if not known:
        return False
    seen, ahead = set(), [y.op for y in ys]
    while ahead:
        op = ahead.pop()
        if op.name in known:
            return True
        if op.name not in seen:
            seen.add(op.name)
            ahead += [tensor.op for tensor in op.inputs]
    return False


def operations_since(graph: tf.Graph) -> list[tf.Operation]:
    """Return the ops created in ``graph`` after the newest gradients."""
    return list(graph.get_operations()[notes(graph, _State).built :])


def idle(graph: tf.Graph) -> set[int]:
    """Return the creation indices of ops that gradient computations made and no gradient needs, a
    set that callers add to.

    TensorFlow also builds gradients with respect to constants and the like, and prunes them when
    the graph runs.
    """
    return notes(graph, _State).idle


def retire(graph: tf.Graph, ops: Iterable[tf.Operation]) -> None:
    """Note that no op will read ``ops``, which were built for gradients, any more, so that they are
    pruned."""
    for op in ops:
        graphs.unprotect(op)
        idle(graph).add(graphs.creation_index(op))


def warned(graph: tf.Graph, message: str) -> bool:
    """Return whether ``message`` was given for ``graph`` before, and note it."""
    known = notes(graph, _State).warnings
    seen = message in known
    known.add(message)
    for watch in _watches:
        watch.warned = True
    return seen


def plans(graph_or_function: Any) -> tuple[Plan, ...]:
    """Return the plans used in a graph or in any trace of a function, newest last; none if its
    gradients are plain.

    Parameters
    ----------
    graph_or_function
        A ``tf.Graph``, a ``tf.function`` (all its traces) or a ``ConcreteFunction``. Plans of
        functions that were traced inside of it are included. (For Keras' ``fit``, see
        ``MemorySavingGradients.plans``.)

    Raises
    ------
    ArgumentError
        If it is none of these.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> with tf.Graph().as_default() as graph:
    ...     x = y = tf.compat.v1.placeholder(tf.float32, [1024])
    ...     for _ in range(16):
    ...         y = tf.tanh(y)
    ...     grads = ms.gradients(y, x)
    >>> ms.plans(graph)[-1].peak < ms.plans(graph)[-1].peak_plain
    True
    """
    asked = autodiff.graphs_of(graph_or_function)
    if asked is None:
        raise ArgumentError(
            "graph_or_function",
            graph_or_function,
            "give a tf.Graph, a tf.function or a ConcreteFunction; for Keras' fit, read the"
            " callback's plans",
        )
    wanted = {id(graph) for graph in asked}
    found = [
        entry
        for graph in _planned
        if any(id(outer) in wanted for outer in autodiff.enclosing_graphs(graph))
        for entry in notes(graph, _State).plans
    ]
    return tuple(plan for _, plan in sorted(found, key=lambda entry: entry[0]))
