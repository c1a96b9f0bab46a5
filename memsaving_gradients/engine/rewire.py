"""The way from TensorFlow's gradients to the user's: capture, plan, rewrite, remember."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.engine import replicas, whole_step
from memsaving_gradients.engine.call import Call, Gradient, components
from memsaving_gradients.engine.driver.driver import Driver
from memsaving_gradients.engine.feedback.notices import (
    warn_nothing_saved,
)
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.rewriting.clones import Rewrite

__all__ = ["is_observed", "observing", "rewire_now", "site_of"]

#: Innermost last. Not a context variable: distribution strategies trace in threads of their own.
_observers: list[Callable[[Site], None]] = []


@contextmanager
def observing(observer: Callable[[Site], None]) -> Iterator[None]:
    """Show gradients built inside to ``observer``, and leave them as TensorFlow built them."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def rewire_now(call: Call) -> list[Gradient]:
    """Rewire the backward ops of a call so that they hold less memory. Return its gradients, in
    which some tensors may be replaced."""
    site = site_of(call)
    if site is not None and _observers:
        _observers[-1](site)
        site = None
    if site is None:
        return list(call.grads)
    driver = Driver(site).follow()
    driver.settle()
    if driver.followed is None:
        return list(call.grads)
    grads = _results(call, driver.followed.result)
    whole_step.note(site, driver.followed.outcome.plan, components(grads, call.graph))
    return grads


def _results(call: Call, result: Rewrite | None) -> list[Gradient]:
    """Return the gradients of a call as the user gets them."""
    if result is None:
        return list(call.grads)
    grads = [_stand_in(grad, result) for grad in call.grads]
    if not result.readers_of:
        return grads
    return [
        _after(grad, result.readers_of, autodiff.tensors_in(call.graph, [x]))
        for grad, x in zip(grads, call.xs, strict=True)
    ]


def is_observed() -> bool:
    """Return whether `observing` is in force."""
    return bool(_observers)


def site_of(
    call: Call,
    given: Sequence[tf.Tensor] = (),
    without: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
) -> Site | None:
    """Return the gradient computation to plan for; ``None``, maybe after a warning: nothing can be
    rewired.

    For ``given`` and ``without``, see `Site`.
    """
    if not call.flat or not call.own:
        return None
    if why := replicas.unsupported():
        warn_nothing_saved(call.graph, why)
        return None
    if call.xla and autodiff.vectorized():
        warn_nothing_saved(
            call.graph,
            "XLA cannot compile the vectorized form of the ops that hold recomputation back",
        )
        return None
    site = Site(call, given=given, without=without or {})
    # An unusable ``offload`` raises an error now, and not when there is a plan.
    _ = site.call.host
    return site


def _stand_in(grad: Any, result: Rewrite) -> Any:
    """Return ``grad``, or an identity that reads its replacement, if it has one: the end of a chain
    of additions or, under XLA, a result of a region.

    The identity remains when the graph takes the plan back and follows another one. To later
    differentiation, tapes included, it is the plain gradient.
    """
    if isinstance(grad, tf.IndexedSlices):
        parts = (grad.values, grad.indices, grad.dense_shape)
        return tf.IndexedSlices(*(_stand_in(part, result) for part in parts))
    if grad is None or grad.ref() not in result.replaced:
        return grad
    stands = graphs.stand_in(grad, grad.op.name + "_held")
    graphs.protect(stands.op)
    result.rewiring.point(stands.op, 0, result.replaced[grad.ref()])
    return stands


def _after(
    grad: Any, readers_of: dict[tf.Operation, list[tf.Operation]], x: list[tf.Tensor]
) -> Any:
    """Return ``grad``, made to wait for the clones that read the reference variable ``x``."""
    clones = readers_of.get(x[0].op) if x else None
    if not clones or grad is None:
        return grad
    with tf.control_dependencies(clones):
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)
        return tf.identity(grad)
