"""Gradients of replicas: under a strategy of ``tf.distribute``, a graph contains the same step once
for each device, or each worker runs the step.

A replica's gradients are planned for its own device, where it is alone. The memory of other devices
does not count, and ops are recomputed, or wait, on that device only. Collectives, where devices
wait for one another, keep their places and their order.

TensorFlow traces replicas one after the other, each in a thread of its own, and lets them take
turns where they meet. So ops of other replicas may be between the first and the last op of a
replica's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.notes import notes
from graph_tools.ops.devices import Home
from memsaving_gradients.engine.site.request import Request, request_of
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.reports.plan import Plan

__all__ = ["Shared", "home_of", "in_sync", "per_replica", "shared", "unsupported"]


@dataclass(eq=False)
class Shared:
    """The request of equal computations, such as the replicas of a step, and the plan that the last
    of them follows."""

    request: Request
    plan: Plan | None = field(default=None)


class _OfGraph(list[Shared]):
    """The `Shared` values of the replicas in a graph, one for each step."""


def _strategy() -> Any:
    """Return the strategy of a replica that is being traced now; ``None``: none is."""
    if not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None:
        return None
    return tf.distribute.get_strategy()


def home_of(ys: Sequence[tf.Tensor]) -> Home | None:
    """Return the device of the replica that computes ``ys`` and is being traced; ``None``: none is,
    or ``ys`` are not all on one named device."""
    placed = {y.op.device for y in ys}
    if _strategy() is None or len(placed) != 1 or placed == {""}:
        return None
    return Home(placed.pop())


def in_sync() -> bool:
    """Return whether replicas will add up the gradients that are asked for now. All gradients of a
    replica are alive together then."""
    strategy = _strategy()
    return strategy is not None and strategy.num_replicas_in_sync > 1


def per_replica(batch: int, strategy: tf.distribute.Strategy) -> int:
    """Return the most examples of a batch that one replica gets."""
    return -(-batch // strategy.num_replicas_in_sync)


def unsupported() -> str:
    """Return why gradients that are asked for now have to stay plain, or an empty string."""
    strategy = _strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return (
            f"{type(strategy).__name__} is not supported: the ops that hold recomputation back are"
            " not known to work on TPUs"
        )
    return ""


def shared(site: Site) -> Shared | None:
    """Return what ``site`` shares with the replicas of its step that have the same options;
    ``None``: it has no replicas."""
    if site.home is None or site.options.plan:
        return None
    try:
        request = request_of(site, site.capture())
    except GraphError:
        return None
    known = notes(site.graph, _OfGraph)
    for one in known:
        if one.request == request:
            return one
    known.append(Shared(request))
    return known[-1]
