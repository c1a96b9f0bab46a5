"""The rest of a step, after its gradients: ops that need no gradient wait for one.

A plan is made before the optimizer's ops exist, unless it has a budget
(:mod:`~memsaving_gradients.engine.step_budget`). When TensorFlow has traced a function to its end,
ops that need no gradient get control edges that make them wait for one
(:mod:`~memsaving_gradients.rewriting.optimizer_ops`). Under a strategy of ``tf.distribute``, they
wait on each device by itself.

Where TensorFlow does not report the end of a trace, as in a ``tf.Graph``, each call with a budget
is planned by itself. The step is simulated with the gradients of earlier calls. A warning says if
the calls break the budget together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.notes import has_notes, notes
from graph_tools.ops.devices import Home
from graph_tools.tf_private import autodiff, graphs, hooks
from graph_tools.warn import warn
from memsaving_gradients.budget import exact_bytes, format_bytes, safe_bytes
from memsaving_gradients.engine import graph_state, replicas
from memsaving_gradients.engine.site.simulations import simulate_together
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetWarning, NothingSavedWarning
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.rewriting.optimizer_ops import Updates
from memsaving_gradients.transforms.attention.pattern.reachability import plain_as_well

__all__ = [
    "added_up",
    "check_attention",
    "consumed_at_once",
    "is_consumed_at_once",
    "note",
    "note_added_up",
    "rest_of",
    "will_be_reduced",
]


@dataclass(eq=False)
class _Step:
    """The gradients that were built in a graph during its trace, and the state of those that a loop
    has added up.

    Attributes
    ----------
    sites
        The computations whose plans are followed.
    added_up
        Whether a loop has added gradients up.
    deferred
        Whether later ops wait for these already.
    """

    sites: list[Site] = field(default_factory=list)
    added_up: bool = False
    deferred: bool = False


_consumed: ContextVar[bool] = ContextVar("memsaving_gradients_consumed", default=False)


def _traced(graph: tf.Graph) -> None:
    """Check attention and defer ops in a step that was just traced to its end."""
    if not has_notes(graph, _Step):
        return
    step = notes(graph, _Step)
    sites, step.sites = step.sites, []
    if sites:
        check_attention(graph, sites)
        # XLA chooses its own order for a step.
        if not _consumed.get() and not sites[0].xla:
            _defer(graph, sites[0].call.first_operation, [site.home for site in sites])
    elif step.added_up and not step.deferred:
        step.deferred = True
        grads = [tensor.op for tensor, _ in graph_state.earlier(graph)]
        devices = dict.fromkeys(op.device for op in grads if op.device)
        homes = [*map(Home, devices)] if len(devices) > 1 else [None]
        _defer(graph, min(grads, key=graphs.creation_index), homes)


@contextmanager
def consumed_at_once() -> Iterator[None]:
    """Assume that callers consume each result of functions traced inside as it comes, so that
    results are not held to the end."""
    token = _consumed.set(True)
    try:
        yield
    finally:
        _consumed.reset(token)


def is_consumed_at_once() -> bool:
    """Return whether `consumed_at_once` is in force."""
    return _consumed.get()


def will_be_reduced() -> bool:
    """Return whether gradients asked for now will all live until replicas add them up."""
    return replicas.in_sync() and not _consumed.get()


def note_added_up(grads: Sequence[tf.Tensor]) -> None:
    """Note gradients that a loop in the current graph has added up, for which later ops of the step
    are to wait."""
    graph = tf.compat.v1.get_default_graph()
    if not autodiff.compiled_by_xla():
        hooks.when_traced(_traced)
        notes(graph, _Step).added_up = True
        graph_state.returned(graph, grads, held=False)


def added_up(graph: tf.Graph) -> list[tf.Tensor]:
    """Return the gradients that loops in a graph have added up."""
    there = has_notes(graph, _Step) and notes(graph, _Step).added_up
    return [tensor for tensor, _ in graph_state.earlier(graph)] if there else []


def _defer(graph: tf.Graph, first: tf.Operation, homes: Sequence[Home | None]) -> None:
    """Let later ops that need no gradient wait for one, on each of these devices. ``first``: the
    first op of the gradients."""
    grads = {tensor.op for tensor, _ in graph_state.earlier(graph)}
    updates = rest_of(graph, graph_state.operations_since(graph), grads, first)
    for home in dict.fromkeys(homes):
        updates.defer(home)


def rest_of(
    graph: tf.Graph,
    later: Sequence[tf.Operation],
    grads: Collection[tf.Operation],
    first: tf.Operation,
) -> Updates:
    """Return the updates with gradients that ``grads`` make: the ops created ``later``, of a graph
    that was traced to its end. ``first``: the first op of the backward pass."""
    return Updates(later, grads, autodiff.ends_of(graph), graphs.creation_index(first))


def note(site: Site, plan: Plan, grads: Sequence[tf.Tensor]) -> None:
    """Note a site that follows a plan, whose gradients the user got as ``grads``; warn if they
    break the budget together with earlier ones."""
    if plan.budget is not None:
        _check_calls(site, plan.budget, grads)
    if graphs.is_function(site.graph):
        hooks.when_traced(_traced)
        notes(site.graph, _Step).sites.append(site)


def check_attention(graph: tf.Graph, sites: Sequence[Site]) -> None:
    """Warn of attention in blocks that is computed plainly as well, because ops that were built
    since read it."""
    done = [site.attention for site in sites]
    names = dict.fromkeys(name for one in done if one is not None for name in one.names)
    both = plain_as_well(names, autodiff.ends_of(graph)) if names else []
    if both:
        warn(
            f"the attention of {', '.join(map(repr, both))} is computed in blocks and plainly as"
            " well, which keeps all scores in memory: its output is returned, or was first read"
            " after the call for gradients. Read the output before that call, or return a tensor"
            " that was computed from it before.",
            NothingSavedWarning,
        )


def _check_calls(site: Site, budget: int, grads: Sequence[tf.Tensor]) -> None:
    """Warn of a step that breaks a budget that each of its calls for gradients keeps by itself."""
    simulated = simulate_together(site, grads)
    need = 0 if simulated is None else safe_bytes(simulated, site.gating)
    if need > budget:
        warn(
            f"each call for gradients keeps its budget of {exact_bytes(budget)} by itself, but with"
            f" the gradients of earlier calls the step may take {need:,} ({format_bytes(need)});"
            " give smaller budgets, or compute these gradients in steps (traced functions) of"
            " their own.",
            BudgetWarning,
        )
