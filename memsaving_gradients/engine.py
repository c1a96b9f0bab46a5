"""Capture, plan, rewrite, remember: what happens between TensorFlow's gradients and the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_tools import _tf, _tf_autodiff
from memsaving_gradients import guard, registry
from memsaving_gradients.options import Options
from memsaving_gradients.planning import (
    LIMITED,
    Outcome,
    Site,
    by_limits,
    by_mode,
    by_saved_plan,
    warn_nothing_saved,
)
from memsaving_gradients.rewrite import rewrite

__all__ = ["save_memory"]

guard.install()


def save_memory(
    graph: tf.Graph,
    first_backward: int,
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    mode: str,
    kept: Sequence[tf.Tensor],
    options: Options,
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Rewire the backward ops of ``graph`` so that they hold less memory.

    Parameters
    ----------
    graph
        The graph that ``grads`` were just built in.
    first_backward
        How many ops the graph had before.
    ys, xs, grads
        What was differentiated, with respect to what, and the result.
    mode
        ``"memory"``, ``"speed"``, ``"collection"`` or ``"named"``; ``"budget"``, ``"slowdown"`` or ``"planner"``;
        ``"saved"``.
    kept
        Tensors to keep: named, or marked.
    options
        What else was asked for.

    Returns
    -------
    list
        The gradients, in which tensors that became chains of additions are replaced.
    """
    operations = graph.get_operations()
    flat = [t for t in _components(grads) if t.graph is graph]
    if not flat or len(operations) <= first_backward:
        return list(grads)
    data_gates = _tf_autodiff.compiled_by_xla() if options.xla is None else options.xla
    if data_gates and _tf_autodiff.vectorized():
        warn_nothing_saved(
            graph, "XLA cannot compile the vectorized form of what holds recomputation back"
        )
        return list(grads)
    site = Site(graph, first_backward, ys, flat, kept, options, data_gates)
    try:
        outcome = _planned(site, mode)
    except BaseException:
        site.abandon()
        raise
    if outcome is None:
        site.unpack()
        return list(grads)
    guard.remember(graph, site.masks.rewiring)
    step = outcome.step
    unread = (op for op in operations[first_backward:] if op.name not in step.source.position)
    registry.idle(graph).update(map(_tf.creation_index, unread))
    if outcome.plain:
        registry.record(graph, outcome.plan)
        return list(grads)
    proposal = outcome.proposal
    result = rewrite(step, proposal.schedule, proposal.simulation, data_gates=data_gates)
    guard.remember(graph, result.rewiring)
    registry.record(graph, outcome.plan)
    grads = [_replace(grad, result.replaced) for grad in grads]
    if result.readers_of:
        grads = [
            _after(grad, result.readers_of, _tf_autodiff.tensors_in(graph, [x]))
            for grad, x in zip(grads, xs, strict=True)
        ]
    if data_gates:
        # XLA runs no executor: its own scheduler orders one program.
        before, after = simulate(step.graph, plain(step.graph)), proposal.simulation
    else:
        ends = [y for y in ys if isinstance(y, tf.Tensor) and y.graph is graph]
        flat = [t for t in _components(grads) if t.graph is graph]
        ops = capture(flat, besides=ends, late=border)
        held = [ops.value(t) for t in flat] if options.hold_gradients else []
        after = _execution(ops, held, options, proposal.extra_seconds)
    registry.record(graph, _describe(step, mode, proposal, data_gates, before, after))
    return grads


def _planned(site: Site, mode: str) -> Outcome | None:
    if mode == "saved":
        return by_saved_plan(site)
    return by_limits(site, mode) if mode in LIMITED else by_mode(site, mode)


def _components(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor]:
    flat: list[tf.Tensor] = []
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            flat += [t for t in (grad.values, grad.indices, grad.dense_shape) if t is not None]
        elif grad is not None:
            flat.append(grad)
    return flat


def _replace(grad: Any, replaced: dict[object, tf.Tensor]) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values = replaced.get(grad.values.ref(), grad.values)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad if grad is None else replaced.get(grad.ref(), grad)


def _after(
    grad: Any, readers_of: dict[tf.Operation, list[tf.Operation]], x: list[tf.Tensor]
) -> Any:
    """``grad``, available only when the clones that read the reference variable ``x`` have run."""
    clones = readers_of.get(x[0].op) if x else None
    if not clones or grad is None:
        return grad
    with tf.control_dependencies(clones):
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)
        return tf.identity(grad)
