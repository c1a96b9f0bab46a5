"""What a whole step takes, beside the gradients that a budget was planned for.

**Several calls for gradients** in one step are planned each by itself; when one is done, the step
is simulated with the gradients of the calls before it, and it is said if they do not keep the
budget together.

**The optimizer**: a budget is planned for before the optimizer's ops exist. When TensorFlow has
traced a function to its end, those that need no gradient are told to wait for one
(:mod:`~memsaving_gradients.rewriting.optimizer_ops`), and the step is simulated as a whole. If that
breaks the budget, a plan for less is followed; if none helps, it is said.

Under a strategy of ``tf.distribute`` all of that is done for each device by itself, as if there
were no others.

TensorFlow says when a trace is complete (`graph_tools.tf_private.hooks.when_traced`). Costs a
capture of the graph and the simulations for each plan with a budget, about as much as an attempt at
a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.notes import has_notes, notes
from graph_tools.ops.devices import Home
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.ops.trip_counts import behind_identities
from graph_tools.tf_private import autodiff, graphs, hooks
from graph_tools.warn import warn
from memsaving_gradients.budget import exact_bytes, format_bytes, safe_bytes
from memsaving_gradients.engine import graph_state, inner_calls, replicas
from memsaving_gradients.engine.driver.attempt import Followed
from memsaving_gradients.engine.driver.following import Following
from memsaving_gradients.engine.notices import warn_stopped
from memsaving_gradients.engine.site import Site
from memsaving_gradients.errors import BudgetWarning, NothingSavedWarning
from memsaving_gradients.planners.proposal import SLACK
from memsaving_gradients.rewriting.optimizer_ops import Updates
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.transforms.attention.pattern.reachability import plain_as_well

__all__ = ["added_up", "consumed_at_once", "note", "note_added_up", "will_be_reduced"]


@dataclass(frozen=True, eq=False)
class _Built:
    """Gradients that were built, what they follow, the tensors that the user got, and the bytes
    that a warning said the step may take (0: there was none)."""

    following: Following
    followed: Followed
    grads: Sequence[tf.Tensor]
    said: int


@dataclass(eq=False)
class _Step:
    """The gradients that were built in a graph that is being traced, and what becomes of those that
    a loop has added up."""

    built: list[_Built] = field(default_factory=list)
    added_up: bool = False
    deferred: bool = False


_consumed: ContextVar[bool] = ContextVar("memsaving_gradients_consumed", default=False)


def _traced(graph: tf.Graph) -> None:
    """Look at a step, which was just traced to its end."""
    inner_calls.plan_alone(graph)
    if not has_notes(graph, _Step):
        return
    step = notes(graph, _Step)
    built, step.built = step.built, []
    if built:
        _check_attention(graph, built)
        if not _consumed.get():
            for entries in _by_device(built):
                _finish(graph, entries)
    elif step.added_up and not step.deferred:
        step.deferred = True
        _defer(graph)


@contextmanager
def consumed_at_once() -> Iterator[None]:
    """What functions return that are traced inside is consumed as it comes by who calls them, not
    held to their end."""
    token = _consumed.set(True)
    try:
        yield
    finally:
        _consumed.reset(token)


def will_be_reduced() -> bool:
    """Whether gradients that are asked for now are all there until replicas add theirs up."""
    return replicas.in_sync() and not _consumed.get()


def note_added_up(grads: Sequence[tf.Tensor]) -> None:
    """Note gradients that a loop in the current graph has added up, for which what is done with
    them is to wait."""
    graph = tf.compat.v1.get_default_graph()
    if not autodiff.compiled_by_xla():
        hooks.when_traced(_traced)
        notes(graph, _Step).added_up = True
        graph_state.returned(graph, grads, held=False)


def added_up(graph: tf.Graph) -> list[tf.Tensor]:
    """The gradients that loops in a graph have added up."""
    there = has_notes(graph, _Step) and notes(graph, _Step).added_up
    return [tensor for tensor, _ in graph_state.earlier(graph)] if there else []


def _defer(graph: tf.Graph) -> None:
    """Let what follows a loop wait for the gradients that it gives."""
    grads = {tensor.op for tensor, _ in graph_state.earlier(graph)}
    ends = [getattr(end, "op", end) for end in autodiff.ends_of(graph)]
    border = min(map(graphs.creation_index, grads))
    updates = Updates(graph_state.operations_since(graph), grads, ends, border)
    devices = dict.fromkeys(op.device for op in grads if op.device)
    for home in map(Home, devices) if len(devices) > 1 else (None,):
        updates.defer(home)


def _by_device(built: Sequence[_Built]) -> list[list[_Built]]:
    """Gradients that were built, those of each device together."""
    found: dict[str, list[_Built]] = {}
    for entry in built:
        home = entry.following.site.home
        found.setdefault("" if home is None else home.device, []).append(entry)
    return list(found.values())


def note(following: Following, followed: Followed, grads: Sequence[tf.Tensor]) -> None:
    """Note gradients that were built, and that the user gets as ``grads``; warn if they break the
    budget with those before."""
    budget = followed.outcome.plan.budget
    said = 0 if budget is None else _check_calls(following.site, budget, grads)
    graph = following.site.graph
    if graphs.is_function(graph):
        hooks.when_traced(_traced)
        notes(graph, _Step).built.append(_Built(following, followed, grads, said))


def _check_attention(graph: tf.Graph, built: Sequence[_Built]) -> None:
    """Warn of attention in blocks that is computed plainly as well, for who reads it since."""
    done = [entry.following.site.attention for entry in built]
    names = dict.fromkeys(name for one in done if one is not None for name in one.names)
    both = plain_as_well(names, autodiff.ends_of(graph)) if names else []
    if both:
        warn(
            f"the attention of {', '.join(map(repr, both))} is computed in blocks and plainly as"
            " well, which holds all scores: its output is returned, or was read first after"
            " gradients were asked for. Read it before, or return what was computed from it"
            " before.",
            NothingSavedWarning,
        )


def _finish(graph: tf.Graph, built: Sequence[_Built]) -> None:
    """Order the rest of a step, which was just traced to its end, and let its gradients on one
    device leave room for it."""
    following, followed = built[-1].following, built[-1].followed
    site = following.site
    if site.data_gates:
        # XLA orders a step as it sees fit.
        return
    simulate = _Simulated(site)
    try:
        ends = [getattr(end, "op", end) for end in autodiff.ends_of(graph)]
        grads = {tensor.op for tensor, _ in graph_state.earlier(graph)}
        border = graphs.creation_index(built[0].following.site.first_operation)
        updates = Updates(graph_state.operations_since(graph), grads, ends, border)
        budget = followed.outcome.plan.budget
        if budget is None:
            updates.defer(site.home)
            return
        if updates.take_memory(autodiff.outputs_of(graph), site.options.batch) < budget * SLACK:
            return
        worst = following.attempts.worst(followed, simulate)
        if worst > budget and updates.defer(site.home):
            simulate.simulated.clear()
            worst = following.attempts.worst(followed, simulate)
    except GraphError:
        # Something besides the gradients that cannot be captured, such as a loop of TF1.
        return
    plan, stopped = followed.outcome.plan, site.stopped
    if worst > budget and len(built) == 1:
        followed = following.lower(followed, simulate, _ends(built[0], updates))
        plan = followed.outcome.plan
    need = safe_bytes(simulate(followed), site.gating)
    if followed is not built[-1].followed and need <= budget:
        plan = followed.outcome.as_it_runs(simulate(followed)).plan
    if site.stopped != stopped:
        warn_stopped(plan, site.stopped)
    graph_state.amend(graph, built[-1].followed.outcome.plan, replace(plan, whole_step=need))
    if need > max(budget, *(entry.said for entry in built)):
        warn(
            f"gradients keep their budget of {exact_bytes(budget)}, but with what the rest of the"
            f" step does, such as the optimizer, it may take {need:,} ({format_bytes(need)}), and"
            " no plan with which it takes less than the budget was found;"
            f" {_way_out(graph, grads, following.site, budget)}.",
            BudgetWarning,
        )


def _way_out(graph: tf.Graph, grads: Collection[tf.Operation], site: Site, budget: int) -> str:
    """What can be done about a step that takes more than its budget."""
    smaller = "if that is too much, take a smaller batch"
    if site.holds_gradients:
        return smaller
    # TensorFlow hands what a function returns through identities.
    given = [
        tensor for tensor in autodiff.outputs_of(graph) if behind_identities(tensor).op in grads
    ]
    held = sum(tensor_bytes(tensor).at(site.options.batch) for tensor in given)
    if held < budget * SLACK:
        return smaller
    return (
        f"{len(given)} gradients that the function returns ({format_bytes(int(held))}) are all"
        " there at its end: ask with hold_gradients=True, so that plans, and the least budget that"
        f" an error names, count them, or consume them in the function; {smaller}"
    )


def _ends(built: _Built, updates: Updates) -> dict[str, list[tf.Operation]]:
    """By name of a gradient's op, as it was built, what ends the use of the gradient."""
    site, rewiring = built.following.site, Rewiring()
    updates.split(rewiring)
    original_view.remember(site.graph, rewiring)
    ends = updates.ends()
    pairs = zip(site.grads, built.grads, strict=True)
    return {grad.op.name: ends[given.op] for grad, given in pairs if given.op in ends}


class _Simulated:
    """What the executor makes of a whole step, by what its gradients follow; each is simulated
    once."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.simulated: dict[Followed, Simulation] = {}

    def __call__(self, followed: Followed) -> Simulation:
        if followed not in self.simulated:
            self.simulated[followed] = self.site.simulate_traced()
        return self.simulated[followed]


def _check_calls(site: Site, budget: int, grads: Sequence[tf.Tensor]) -> int:
    """Warn of a step that does not keep a budget that each of its calls for gradients keeps by
    itself; the bytes that it may take then, else 0."""
    simulated = site.simulate_together(grads)
    need = 0 if simulated is None else safe_bytes(simulated, site.gating)
    if need > budget:
        warn(
            f"each call for gradients keeps its budget of {exact_bytes(budget)} by itself, but with"
            f" the gradients of earlier calls the step may take {need:,} ({format_bytes(need)});"
            " give smaller budgets, or compute these gradients in steps (traced functions) of"
            " their own.",
            BudgetWarning,
        )
    return need if need > budget else 0
