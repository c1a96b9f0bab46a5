"""Calls for gradients inside of another one: what they build is differentiated once more.

A gradient penalty asks for the gradients of a critic, and a tape around that for those of the loss
that is made of them. To the outer call, all that the inner one builds are forward ops: its plan
recomputes them with the rest, and a budget is that of both. So a call with a budget is left plain
while another tape records what becomes of it. If that tape is asked for nothing until the function
has been traced (it may be one around the call of the function), the gradients are planned then, by
themselves.

Only tapes are known to record: of two calls of `tf.gradients`, the first knows nothing of the
second, and each is planned by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.notes import has_notes, notes
from graph_tools.tf_private import autodiff, graphs, hooks

__all__ = ["is_inner", "left", "plan_alone"]


@dataclass(frozen=True, eq=False)
class _Left:
    """Gradients that were left plain: what the user got for each part of them, and how they are
    planned."""

    given: Sequence[Any]
    plan: Callable[[], Sequence[Any]]


@dataclass(eq=False)
class _Waiting:
    """The calls of a graph that were left for one that is still to come."""

    calls: list[_Left] = field(default_factory=list)


def is_inner(graph: tf.Graph, ys: Sequence[tf.Tensor], tape: Any) -> bool:
    """Whether a tape other than ``tape`` records what is done with ``ys``; if not, the calls that
    were left before are left to this one."""
    if not graphs.is_function(graph):
        return False
    if ys and autodiff.is_recorded(ys, besides=tape):
        return True
    if has_notes(graph, _Waiting):
        notes(graph, _Waiting).calls.clear()
    return False


def left(graph: tf.Graph, grads: Sequence[Any], plan: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return what stands for ``grads``, which are left plain until ``plan`` makes others of them:
    when the function is traced, if no outer call has planned for them before."""
    parts = tf.nest.flatten(grads, expand_composites=True)
    given = [_stand_in(part, graph) for part in parts]
    hooks.when_traced(plan_alone)
    notes(graph, _Waiting).calls.append(_Left(given, plan))
    return list(tf.nest.pack_sequence_as(grads, given, expand_composites=True))


def _stand_in(part: Any, graph: tf.Graph) -> Any:
    """What the user gets for a part of a gradient, until it is known which tensor it is."""
    if not isinstance(part, tf.Tensor) or part.graph is not graph:
        return part
    with graphs.outside_scopes(graph):
        stands = tf.identity(part)
    graphs.protect(stands.op)
    return stands


def plan_alone(graph: tf.Graph) -> None:
    """Plan for what no outer call came for, in a function that was just traced to its end."""
    if not has_notes(graph, _Waiting):
        return
    waiting = notes(graph, _Waiting)
    calls, waiting.calls = waiting.calls, []
    for call in calls:
        with graph.as_default():
            found = tf.nest.flatten(call.plan(), expand_composites=True)
        rewiring = Rewiring()
        for stands, made in zip(call.given, found, strict=True):
            ours = isinstance(stands, tf.Tensor) and stands.graph is graph
            if ours and stands.op.inputs[0] is not made:
                rewiring.point(stands.op, 0, made)
        original_view.remember(graph, rewiring)
