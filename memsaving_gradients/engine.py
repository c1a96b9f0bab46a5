"""Capture, plan, rewrite, remember: what happens between TensorFlow's gradients and the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_tools import _tf, _tf_autodiff
from memsaving_gradients import guard, registry
from memsaving_gradients.budgets import MANY_OPS, too_small
from memsaving_gradients.errors import BudgetError, PlanError
from memsaving_gradients.options import Options
from memsaving_gradients.planning import (
    LIMITED,
    Outcome,
    by_limits,
    by_mode,
    by_saved_plan,
    warn_nothing_saved,
    warn_stopped,
)
from memsaving_gradients.progress import showing
from memsaving_gradients.rewrite import Rewrite, rewrite
from memsaving_gradients.site import Site
from memsaving_gradients.whole_step import check_calls

__all__ = ["components", "save_memory"]

guard.install()

#: Plans that are rewritten and played until one keeps the budget, and the most that the next one gets of what this one had.
MOST_ATTEMPTS, MOST_SHARE = 8, 0.97
#: Where an attempt takes seconds (`MANY_OPS`), there are fewer, and the first one leaves room for what the executor adds.
FEW_ATTEMPTS, FIRST_SHARE = 5, 0.96


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
    flat = components(grads, graph)
    if not flat or len(operations) <= first_backward:
        return list(grads)
    data_gates = _tf_autodiff.compiled_by_xla() if options.xla is None else options.xla
    if data_gates and _tf_autodiff.vectorized():
        warn_nothing_saved(
            graph, "XLA cannot compile the vectorized form of what holds recomputation back"
        )
        return list(grads)
    site = Site(graph, first_backward, ys, flat, kept, options, data_gates)
    with showing(options.progress) as site.progress:
        followed = _followed(site, mode)
    if followed is None:
        site.unpack()
        return list(grads)
    outcome, result = followed
    guard.remember(graph, site.masks.rewiring)
    position = outcome.step.source.position
    unread = (op for op in operations[first_backward:] if op.name not in position)
    registry.idle(graph).update(map(_tf.creation_index, unread))
    registry.record(graph, outcome.plan)
    if outcome.stopped:
        warn_stopped(outcome.plan, outcome.stopped)
    found = list(grads)
    if result is not None:
        guard.remember(graph, result.rewiring)
        found = [_replace(grad, result.replaced) for grad in grads]
        if result.readers_of:
            found = [
                _after(grad, result.readers_of, _tf_autodiff.tensors_in(graph, [x]))
                for grad, x in zip(found, xs, strict=True)
            ]
    if outcome.plan.budget is not None:
        check_calls(site, outcome.plan.budget, components(found, graph))
    return found


def _followed(site: Site, mode: str) -> tuple[Outcome, Rewrite | None] | None:
    """A plan and the rewrite that follows it, so that the step keeps the budget as it will run; ``None``: nothing can be saved.

    How the executor runs a step is known when the step is rewritten. Where that breaks the promise, the rewrite is taken back, and
    a plan is made for less; at last the plan of least memory, which names the least budget if that is not enough either.
    """
    try:
        large = len(site.operations) > MANY_OPS
        share, below, broke = FIRST_SHARE if large else 1.0, None, 0
        attempts = FEW_ATTEMPTS if large else MOST_ATTEMPTS
        for attempt in range(attempts if mode == "budget" else 1):
            try:
                outcome = _planned(site, mode, share, below)
            except BudgetError as error:
                if site.stopped == "interrupted":
                    # Plans that broke the budget as they ran are no smaller than it.
                    raise _no_smaller(error, broke, site) from None
                break
            if outcome is None or outcome.plain:
                return None if outcome is None else (outcome, None)
            planned = outcome.need
            outcome, result = _rewritten(site, outcome)
            budget, need = outcome.plan.budget, outcome.need
            if budget is None or need <= budget:
                return outcome, result
            site.take_back(result)
            if mode == "saved":
                raise _no_longer_kept(outcome)
            broke = min(broke or need, need)
            # What the executor adds to one plan it adds to the next, about. Holes between chunks need not shrink with the
            # plan: each step down is a larger one.
            share = min(planned / need, share * MOST_SHARE) * MOST_SHARE**attempt
            below = None if large else planned
        outcome = _planned(site, mode, 0.0)
        if outcome is None:
            return None
        outcome, result = _rewritten(site, outcome)
        goal = site.goal
        if goal is not None and outcome.need > goal.budget:
            site.take_back(result)
            raise too_small(goal, min(outcome.need, goal.plain_need), site.stopped)
        return outcome, result
    except BaseException:
        site.abandon()
        raise


def _rewritten(site: Site, outcome: Outcome) -> tuple[Outcome, Rewrite]:
    """The graph made to follow a plan, and the plan described by what the executor will make of it."""
    proposal = outcome.proposal
    result = rewrite(
        outcome.step, proposal.schedule, proposal.simulation, data_gates=site.data_gates
    )
    if not site.data_gates:
        outcome = outcome.as_it_runs(site.play_rewritten(result, proposal.extra_seconds))
    return outcome, result


def _no_smaller(error: BudgetError, broke: int, site: Site) -> BudgetError:
    """``error``, but naming no budget below the least that a plan needed as it ran (0: none did run)."""
    if site.goal is None or error.least >= broke:
        return error
    return too_small(site.goal, min(broke, site.goal.plain_need), site.stopped)


def _no_longer_kept(outcome: Outcome) -> PlanError:
    given = outcome.given or outcome.plan
    return PlanError(
        "plan",
        given.file or given,
        f"would need {outcome.need:,} bytes here, more than its budget of {given.budget:,}: hold_gradients, xla or the "
        "device are others than it was made for; plan anew with budget=",
    )


def _planned(site: Site, mode: str, share: float, below: int | None = None) -> Outcome | None:
    if mode == "saved":
        return by_saved_plan(site)
    return by_limits(site, mode, share, below) if mode in LIMITED else by_mode(site, mode)


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
