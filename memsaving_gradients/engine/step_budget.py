"""Budgets of whole steps: calls for gradients with a budget are planned when their function has
been traced to its end.

Only then is the rest of the step known: other calls, the optimizer, the results. Until then the
gradients stay TensorFlow's. The user holds an identity of each gradient, which will read the tensor
that replaces it.

- A fraction refers to the bytes that the whole step takes in plain training. A plan keeps the
  budget if the whole step does.
- Calls share a forward pass if all their losses are computed before the first gradient. They are
  planned as one.
- Other calls follow one another. Independent calls take turns
  (:mod:`~memsaving_gradients.rewriting.turns`), or the executor would run them at once. If at most
  one call takes more than the budget, the largest call is planned for the whole step. Otherwise, or
  where that is not enough, each call is planned by itself. All of them are planned for fewer and
  fewer bytes until they keep the budget together.
- A call that another one differentiates (a gradient penalty) belongs to that one's forward pass.
  One plan covers both.

Calls of several replicas are planned for each device by itself. XLA chooses its own order for a
step: there, the bytes that it assigns to the compiled step keep the budget
(:mod:`~memsaving_gradients.engine.assigned`). Where XLA does not compile a function by itself,
calls are planned at once, except those that an outer tape may differentiate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.graph.capture import OpGraph
from graph_tools.graph.topology import Edges
from graph_tools.notes import has_notes, notes
from graph_tools.tf_private import autodiff, graphs, hooks
from memsaving_gradients.budget import Goal, plain_bytes, safe_bytes, too_small
from memsaving_gradients.capture.rest_of_step import Update, Whole
from memsaving_gradients.engine import graph_state, inner_functions, replicas, whole_step
from memsaving_gradients.engine.assigned.budgets import can_be_assigned, plan_assigned
from memsaving_gradients.engine.call import Call, components, joined
from memsaving_gradients.engine.driver.attempts import STEP_ROUNDS, no_longer_kept
from memsaving_gradients.engine.driver.driver import Driver
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.planning.within_limits import budget_of, unknown_to
from memsaving_gradients.engine.replicas import Shared
from memsaving_gradients.engine.rewire import is_observed, rewire_now, site_of
from memsaving_gradients.engine.site.request import Request
from memsaving_gradients.engine.site.simulations import simulate_all, simulate_traced
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.rewriting.added_gradients import add_one_by_one
from memsaving_gradients.rewriting.new_readers import let_readers_be_first
from memsaving_gradients.rewriting.ordering import HUGE_SHARE
from memsaving_gradients.rewriting.turns import Pass, take_turns
from memsaving_gradients.rewriting.update_order import (
    in_branch,
    in_turn,
    one_by_one,
)
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.transforms.loops.one_at_a_time import ahead, one_at_a_time, within

__all__ = ["cover_whole_step", "drop_inner", "is_inner", "let_wait", "waits_for_its_step"]

#: The `Update` of each gradient, by the name of the gradient's op.
_Updates: TypeAlias = Mapping[str, Update]


@dataclass(frozen=True, eq=False)
class _WaitingCall:
    """A call that waits for the end of its step, and the gradients that the user got for it."""

    call: Call
    given: Sequence[Any]


@dataclass(eq=False)
class _Waiting:
    """The waiting calls of a graph, and each op's control inputs when the last call was added."""

    calls: list[_WaitingCall] = field(default_factory=list)
    controls: dict[tf.Operation, list[tf.Operation]] = field(default_factory=dict)


def waits_for_its_step(call: Call) -> bool:
    """Return whether a call has to be planned with the whole step."""
    options = call.options
    promised = options.budget is not None or any(p.budget is not None for p in options.plan)
    alone = can_be_assigned(call) if call.xla else promised
    return alone and not is_observed() and _end_is_reported(call.graph)


def is_inner(graph: tf.Graph, options: Options, ys: Sequence[tf.Tensor], tape: Any) -> bool:
    """Return whether a tape other than ``tape`` records ops on ``ys``. Gradients with a budget then
    stay as TensorFlow builds them, because that tape may differentiate them."""
    if options.budget is None or not ys or not _end_is_reported(graph):
        return False
    return autodiff.is_recorded(ys, besides=tape)


def _end_is_reported(graph: tf.Graph) -> bool:
    """Return whether TensorFlow will report when ``graph`` is complete, and its ops stay as they
    are until then."""
    return (
        graphs.is_function(graph)
        and autodiff.end_is_reported()
        and not autodiff.vectorized()
        and not replicas.unsupported()
        and not whole_step.is_consumed_at_once()
    )


def let_wait(call: Call) -> list[Any]:
    """Let a call wait; return its gradients for the user as identities, to be re-pointed later."""
    parts = tf.nest.flatten(list(call.grads), expand_composites=True)
    given = [_stand_in(part, call.graph) for part in parts]
    grads = tf.nest.pack_sequence_as(list(call.grads), given, expand_composites=True)
    hooks.when_traced(_plan)
    waiting = notes(call.graph, _Waiting)
    waiting.calls.append(_WaitingCall(call, grads))
    waiting.controls = {op: op.control_inputs for op in call.graph.get_operations()}
    return list(grads)


def drop_inner(call: Call) -> None:
    """Remove the waiting calls that ``call`` differentiates: its own plan covers them."""
    if has_notes(call.graph, _Waiting):
        waiting = notes(call.graph, _Waiting)
        waiting.calls = [left for left in waiting.calls if not call.goes_through(left.call)]


def _stand_in(part: Any, graph: tf.Graph) -> Any:
    """Return the identity that the user gets for a part of a gradient, to be re-pointed later."""
    if not isinstance(part, tf.Tensor) or part.graph is not graph:
        return part
    stands = graphs.stand_in(part)
    graphs.protect(stands.op)
    return stands


@uncollected()
def _plan(graph: tf.Graph) -> None:
    """Plan the calls that wait in a function which was just traced to its end."""
    if not has_notes(graph, _Waiting):
        if autodiff.is_branch(graph) and any(map(_waits, autodiff.enclosing_graphs(graph))):
            in_branch(graph)
        inner_functions.take_turns(graph)
        return
    waiting = notes(graph, _Waiting)
    calls, waiting.calls = waiting.calls, []
    kept = [
        left
        for k, left in enumerate(calls)
        if not any(other.call.goes_through(left.call) for other in calls[k + 1 :])
    ]
    if not kept:
        return
    if is_observed():
        for left in kept:
            rewire_now(left.call)
        return
    # TensorFlow's automatic control dependencies order ops on the same variables, such as the
    # forward pass of a call after earlier updates. They exist only now, and gradients do not need
    # them.
    without = {op: added for op, known in waiting.controls.items() if (added := _added(op, known))}
    later = graph_state.operations_since(graph)
    with graph.as_default():
        for home in dict.fromkeys(left.call.home for left in kept):
            _plan_on(graph, [left for left in kept if left.call.home == home], without, later)
    one_at_a_time(graph)


def _waits(graph: tf.Graph) -> bool:
    """Return whether calls wait for the end of a graph that the executor will run."""
    waiting = notes(graph, _Waiting).calls if has_notes(graph, _Waiting) else []
    return any(not left.call.xla for left in waiting)


def _added(op: tf.Operation, known: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Return the control inputs of an op that are not ``known``."""
    waits = op.control_inputs
    return set() if len(waits) == len(known) else set(waits).difference(known)


def _plan_on(
    graph: tf.Graph,
    calls: Sequence[_WaitingCall],
    without: Mapping[tf.Operation, Collection[tf.Operation]],
    later: Sequence[tf.Operation],
) -> None:
    """Plan the calls of a step on one device.

    ``without``: control edges that were not there when gradients were built. ``later``: the ops
    that were created after the gradients.
    """
    known = len(graph.get_operations())
    found = (site_of(call, components(given, graph), without) for call, given in _together(calls))
    sites = [site for site in found if site is not None]
    if not sites:
        return
    step = None if sites[0].xla else _Step.of(sites)
    if all(can_be_assigned(site.call) for site in sites):
        plan_assigned(graph, sites)
    elif step is None:
        for site in sites:
            Driver(site).follow().settle()
    else:
        step.plan(later)
    let_readers_be_first(graph, sites[0].call.first_operation, known)
    whole_step.check_attention(graph, sites)


def cover_whole_step(site: Site) -> None:
    """Let plans for a call cover its whole step; its function has been traced to its end."""
    step = None if site.xla else _Step.of([site])
    if step is not None:
        (ends,) = step.updates(graph_state.operations_since(site.graph))
        site.whole = Whole(step.plain, ends, step.source, step.run)


def _together(calls: Sequence[_WaitingCall]) -> list[tuple[Call, list[Any]]]:
    """Join calls that are planned as one; return each with the gradients that the user got."""
    found: list[tuple[Call, list[Any]]] = []
    for left in calls:
        both = joined(found[-1][0], left.call) if found else None
        if both is None:
            found.append((left.call, list(left.given)))
        else:
            found[-1] = both, [*found[-1][1], *left.given]
    return found


@dataclass(eq=False)
class _Step:
    """The calls of a step on one device.

    Attributes
    ----------
    sites
        The calls, in the order of the step.
    plain
        The simulation of the step as TensorFlow built it.
    source, run
        The ops of the step and their simulation; if updates of several gradients were put in order,
        with this order.
    """

    sites: Sequence[Site]
    plain: Simulation
    source: OpGraph
    run: Simulation

    @classmethod
    def of(cls, sites: Sequence[Site]) -> _Step | None:
        """Return the step; ``None``: an op in it cannot be captured, such as a loop of TF1."""
        try:
            source, plain = _without_blocks(sites)
            return cls(sites, plain, source, plain)
        except GraphError:
            return None

    @property
    def need(self) -> int:
        """The bytes of a budget that the step needs as it is now."""
        return self._need(simulate_traced(self.sites[0]))

    def _need(self, step: Simulation) -> int:
        return safe_bytes(step, self.sites[0].gating)

    def plan(self, later: Sequence[tf.Operation]) -> None:
        """Plan all calls."""
        budgets = [_budget_of(site, self.plain) for site in self.sites]
        most = min((budget for budget in budgets if budget is not None), default=None)
        ample = most is not None and self._need(self.plain) <= most
        # A step that keeps its budget runs as TensorFlow built it.
        updates: list[_Updates] = [{} for _ in self.sites] if ample else self.updates(later)
        if most is None:
            drivers = [Driver(site).follow() for site in self.sites]
        elif len(self.sites) == 1 or ample:
            for site, ends in zip(self.sites, updates, strict=True):
                site.whole = Whole(self.plain, ends, self.source, self.run)
            drivers = [Driver(site).follow() for site in self.sites]
            followed = None if ample else drivers[0].followed
            need = self._need(self.plain) if followed is None else followed.outcome.need
        else:
            self._take_turns()
            drivers, need = self._one_after_the_other(updates, most)
        need = self.need if most is None else self._let_loops_wait(most, need)
        for driver, budget in zip(drivers, budgets, strict=True):
            driver.settle(whole_step=need, **({} if budget is None else {"budget": budget}))

    def _let_loops_wait(self, budget: int, need: int) -> int:
        """Let loop steps run one at a time where steps that run ahead would break the budget.
        Return the bytes that the step then needs: ``need`` if no steps run ahead."""
        site = self.sites[0]
        held = ahead(site.graph, site.options.batch)
        if not held:
            return need
        ops, run = simulate_all(site)
        need = self._need(run)
        # The budget counts chunks; convert it to bytes that are alive at once.
        within(held, ops, run, run.peak * budget / max(need, 1))
        return need

    def _take_turns(self) -> None:
        """Let calls that are independent of one another run one after the other."""
        rewiring = Rewiring()
        edges = Edges(without=self.sites[0].without)
        passes = [Pass(site.call.ys, [t.op for t in site.given]) for site in self.sites]
        for site, gates in zip(self.sites, take_turns(passes, edges, rewiring), strict=True):
            site.gates = gates
        original_view.remember(self.sites[0].graph, rewiring)

    def updates(self, later: Sequence[tf.Operation]) -> list[_Updates]:
        """Return the updates of each call's gradients. Let ops that need no gradient wait for one,
        let additions of gradients begin as these come, and let the ops on a large gradient run one
        after the other."""
        first, graph = self.sites[0], self.sites[0].graph
        grads = {tensor.op for site in self.sites for tensor in site.given or site.grads}
        rewiring, known, changed = Rewiring(), len(graph.get_operations()), False
        if all(site.options.accumulate for site in self.sites):
            own = {op for site in self.sites for op in site.call.own}
            changed = add_one_by_one(graph, grads, own, autodiff.ends_of(graph), rewiring)
            later = [*later, *graph.get_operations()[known:]]
        updates = whole_step.rest_of(graph, later, grads, first.call.first_operation)
        updates.defer(first.home, chain=False)
        updates.split(rewiring)
        # Independent of the budget, as the least budget that an error names has to be.
        huge = int(self.plain.peak * HUGE_SHARE)
        turns = in_turn(updates, huge, rewiring, first.home)
        together = one_by_one(updates, huge, rewiring, first.home)
        original_view.remember(graph, rewiring)
        if together or changed:
            self.source, self.run = _without_blocks(self.sites)
        ended, alone = updates.ends(), updates.alone()

        def done_with(grad: tf.Operation) -> Update:
            ops = [op.name for op in alone[grad]] if grad in turns else []
            return Update(ended[grad], ops, turns.get(grad, 0))

        return [
            {
                grad.op.name: done_with(given.op)
                for grad, given in zip(site.grads, site.given or site.grads, strict=True)
                if given.op in ended
            }
            for site in self.sites
        ]

    def _one_after_the_other(
        self, updates: Sequence[_Updates], budget: int
    ) -> tuple[list[Driver], int]:
        """Plan each call by itself, and all of them for fewer bytes while the step breaks the
        budget. If at most one call takes more than the budget, first plan the largest one for the
        whole step. Return their drivers, and the bytes that the step needs."""
        alone = [self._need(site.original()[1]) for site in self.sites]
        few = sum(need > budget for need in alone) < 2
        large = self.sites[alone.index(max(alone))] if few else None
        drivers, first = self._round(updates, 1.0, large), self.need
        share, need, stopped = 1.0, first, ""
        for left in reversed(range(STEP_ROUNDS + few)):
            if need <= budget:
                return drivers, need
            for driver in drivers:
                if driver.site.call.mode == "saved" and driver.followed is not None:
                    raise no_longer_kept(driver.followed.outcome)
            stopped = next(filter(None, (driver.site.stopped for driver in drivers)), stopped)
            for driver in reversed(drivers):
                driver.take_back()
            if not share:
                break
            # Calls that follow their least cannot save more; the last round finds the least need.
            is_last = left == 1 or all(driver.at_least for driver in drivers)
            share = 0.0 if is_last else share * budget / need
            drivers, need = self._round(updates, share), self.need
        raise self._too_small(budget, min(first, need) if few else need, stopped)

    def _round(
        self, updates: Sequence[_Updates], share: float, large: Site | None = None
    ) -> list[Driver]:
        """Plan each call for a share of the budget while it runs alone, later calls in the graph
        that earlier ones left. Plan ``large`` last, so that with it the whole step keeps the
        budget."""
        for site, ends in zip(self.sites, updates, strict=True):
            own = None if site is large else share
            site.whole = Whole(self.plain, ends, self.source, self.run, own, others=True)
        # Calls of microbatches are equal: they follow the plan of the first one.
        alike = Shared(Request(self.sites[0].options, "calls of a step"))
        found = {s: Driver(s, alike).follow() for s in self.sites if s is not large}
        last = {} if large is None else {large: Driver(large).follow()}
        return [{**found, **last}[site] for site in self.sites]

    def _too_small(self, budget: int, need: int, stopped: str) -> BudgetError:
        site = self.sites[0]
        base = plain_bytes(self.plain, site.gating)
        unknown = next(filter(None, map(unknown_to, self.sites)), None)
        asked = Goal(budget, self._need(self.plain), base, site.options.budget, unknown)
        return too_small(asked, site.capped_by_plain(need, asked.plain_need), stopped)


def _without_blocks(sites: Sequence[Site]) -> tuple[OpGraph, Simulation]:
    """Return `simulate_all` of a step with its attention as TensorFlow built it."""
    blocks = [site.attention.rewiring for site in sites if site.attention is not None]
    for rewiring in reversed(blocks):
        rewiring.undo()
    try:
        return simulate_all(sites[0])
    finally:
        for rewiring in blocks:
            rewiring.redo()


def _budget_of(site: Site, plain: Simulation) -> int | None:
    """Return the budget of a call in bytes of chunks; of saved plans, the largest budget."""
    saved = [plan.budget for plan in site.options.plan if plan.budget is not None]
    return max(saved) if saved else budget_of(site, plain)
