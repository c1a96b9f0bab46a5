"""Capture, plan, rewrite, remember: what happens between TensorFlow's gradients and the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.engine import graph_state, replicas, whole_step
from memsaving_gradients.engine.driver.following import Following
from memsaving_gradients.engine.notices import note_unused, warn_nothing_saved, warn_stopped
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.site import Site
from memsaving_gradients.rewriting.clones import Rewrite
from memsaving_gradients.transforms.attention.pattern.substitution import Substituted

__all__ = ["components", "observing", "save_memory"]

#: Innermost last. Not a context variable: distribution strategies trace in threads of their own.
_observers: list[Callable[[Site], None]] = []


@contextmanager
def observing(observer: Callable[[Site], None]) -> Iterator[None]:
    """Gradients built inside are shown to ``observer``, and stay as TensorFlow built them."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def save_memory(
    graph: tf.Graph,
    first_backward: int,
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    mode: str,
    kept: Sequence[tf.Tensor],
    options: Options,
    encode: Mapping[Any, str],
    in_blocks: Substituted | None = None,
    operations: Sequence[tf.Operation] | None = None,
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
        ``"memory"``, ``"speed"``, ``"collection"`` or ``"named"``; ``"budget"``, ``"slowdown"`` or
        ``"planner"``; ``"saved"``.
    kept
        Tensors to keep: named, or marked.
    options
        What else was asked for.
    encode
        Encodings of tensors that were named, by reference.
    in_blocks
        What became of attention that was found, if it was looked for.
    operations
        Those of the graph when ``grads`` were built; all of them if not given.

    Returns
    -------
    list
        The gradients, in which tensors that became chains of additions are replaced.
    """
    operations = graph.get_operations() if operations is None else operations
    flat = components(grads, graph)
    if not flat or len(operations) <= first_backward:
        return list(grads)
    if why := replicas.unsupported():
        warn_nothing_saved(graph, why)
        return list(grads)
    data_gates = autodiff.compiled_by_xla() if options.xla is None else options.xla
    if data_gates and autodiff.vectorized():
        warn_nothing_saved(
            graph, "XLA cannot compile the vectorized form of what holds recomputation back"
        )
        return list(grads)
    site = Site(
        graph,
        first_backward,
        ys,
        flat,
        kept,
        options,
        data_gates,
        attention=in_blocks,
        encode=encode,
        home=replicas.home_of([y for y in ys if isinstance(y, tf.Tensor) and y.graph is graph]),
        reduced=whole_step.will_be_reduced(),
    )
    # What cannot be used is an error now, and not when there is a plan.
    _ = site.host
    if _observers:
        _observers[-1](site)
        return list(grads)
    following = Following(site, mode, replicas.shared(site, mode))
    followed = following.follow()
    if followed is None:
        site.treat_loops(None)
        return list(grads)
    outcome, result = followed.outcome, followed.result
    original_view.remember(graph, site.packed.rewiring)
    position = outcome.step.source.position
    # Other replicas may have had their turn meanwhile.
    unread = (
        op for op in operations[first_backward:] if op.name not in position and site.is_here(op)
    )
    graph_state.idle(graph).update(map(graphs.creation_index, unread))
    graph_state.record(graph, outcome.plan)
    note_unused(outcome.plan, [reference.deref().name for reference in encode])
    if outcome.stopped:
        warn_stopped(outcome.plan, outcome.stopped)
    found = list(grads)
    if result is not None:
        original_view.remember(graph, result.rewiring)
        found = [_stand_in(grad, result) for grad in grads]
        if result.readers_of:
            found = [
                _after(grad, result.readers_of, autodiff.tensors_in(graph, [x]))
                for grad, x in zip(found, xs, strict=True)
            ]
    whole_step.note(following, followed, components(found, graph))
    return found


def components(
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None], graph: tf.Graph
) -> list[tf.Tensor]:
    """The tensors of ``graph`` that gradients consist of."""
    flat: list[tf.Tensor] = []
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            flat += [t for t in (grad.values, grad.indices, grad.dense_shape) if t is not None]
        elif grad is not None:
            flat.append(grad)
    return [t for t in flat if t.graph is graph]


def _stand_in(grad: Any, result: Rewrite) -> Any:
    """What the user gets for a gradient that another tensor took the place of: where it became a
    chain of additions, the chain's end; under XLA, a result of a region.

    It stays what it is when the plan is taken back, and another one followed. To whoever
    differentiates, tapes included, it is the plain gradient.
    """
    if isinstance(grad, tf.IndexedSlices):
        parts = (grad.values, grad.indices, grad.dense_shape)
        return tf.IndexedSlices(*(_stand_in(part, result) for part in parts))
    if grad is None or grad.ref() not in result.replaced:
        return grad
    with graphs.outside_scopes(grad.graph):
        stands = tf.identity(grad, name=grad.op.name + "_held")
    graphs.protect(stands.op)
    result.rewiring.point(stands.op, 0, result.replaced[grad.ref()])
    return stands


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
