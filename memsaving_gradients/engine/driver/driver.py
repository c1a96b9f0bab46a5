"""The driver of one gradient computation: alone, with its replicas, and with the other calls of
its step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graph_tools.editing import original_view
from graph_tools.errors import GraphError
from graph_tools.tf_private import graphs
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.engine import graph_state, replicas
from memsaving_gradients.engine.driver.attempt import AppliedPlan, follow, take_back
from memsaving_gradients.engine.driver.attempts import Attempts
from memsaving_gradients.engine.driver.candidates import each_way, first_candidate_that_fits, treat
from memsaving_gradients.engine.feedback.notices import note_unused, warn_stopped
from memsaving_gradients.engine.feedback.progress import showing
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.engine.planning.earlier_traces import earlier_plan, remember
from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.planning.within_limits import budget_of
from memsaving_gradients.engine.site.simulations import as_it_is
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetError, PlanError
from memsaving_gradients.planners.budget_search import Search

__all__ = ["Driver"]


class Driver:
    """The driver that makes a gradient computation follow plans until one fits.

    Attributes
    ----------
    site
        The gradient computation.
    attempts
        The plans that are tried for it.
    shared
        The options and the plan of equal computations; their plan is followed here as well if it
        fits. By default, those of the site's replicas; ``None``: it has none.
    followed
        After `follow`: the plan that the computation follows; ``None``: its gradients are plain.
    at_least
        Whether the step follows the plan of least memory because no other one keeps the budget.
    as_before
        Whether the step follows the plan of an earlier trace, or a plan for a few bytes more or
        fewer.
    loops_alone
        After `least`: for each way to replay loops, without other savings, the bytes of a budget
        that the step needs and its time (seconds).
    search
        After `least`: the search in which its plan was found, to search further; ``None``: there
        was no search.
    """

    def __init__(self, site: Site, shared: replicas.Shared | None = None) -> None:
        self.site, self.shared = site, shared
        self.attempts = Attempts(site)
        self.followed: AppliedPlan | None = None
        self.at_least = self.as_before = False
        self.loops_alone: list[tuple[int, float]] = []
        self.search: Search | None = None

    def follow(self) -> Driver:
        """Follow a plan with which the gradients keep the budget, and return ``self``. The caller
        has to settle the plan, or take it back.

        Raises
        ------
        BudgetError
            If no plan does; the graph is left as it was.
        """
        try:
            self.shared = self.shared or replicas.shared(self.site)
            with showing(self.site.options.progress) as self.site.progress:
                found = self._as_others_if_it_fits()
                if found is None:
                    found = self._as_before_if_it_fits() or self._fitting()
                    if self.shared is not None and found is not None:
                        self.shared.plan = found.outcome.plan
        except BaseException:
            self.site.abandon()
            raise
        self.followed = found
        if found is not None:
            # Later differentiation is to see the graph that TensorFlow built.
            original_view.remember(self.site.graph, self.site.packed.rewiring)
            if found.result is not None:
                original_view.remember(self.site.graph, found.result.rewiring)
        return self

    def take_back(self) -> None:
        """Restore the graph as TensorFlow built it, so that it can be planned anew."""
        take_back(self.site, self.followed)
        if self.followed is not None:
            original_view.forget(self.site.graph, self.site.packed.rewiring)
        self.site.restore()
        self.followed = None

    def settle(self, **changes: Any) -> None:
        """Record the plan, with ``changes`` to its attributes, as the final one."""
        site, followed = self.site, self.followed
        if followed is None:
            site.treat_loops(None)
            return
        position = followed.outcome.step.source.position
        unread = (op for op in site.call.own if op.name not in position)
        graph_state.idle(site.graph).update(map(graphs.creation_index, unread))
        plan = replace(followed.outcome.plan, **changes)
        graph_state.record(site.graph, plan)
        if not self.at_least and not self.as_before and followed.keeps(followed.outcome.need):
            remember(site, followed.outcome)
        note_unused(plan, [reference.deref().name for reference in site.encode])
        if followed.outcome.stopped:
            warn_stopped(plan, followed.outcome.stopped)

    def least(self) -> Outcome | None:
        """Return the plan of least memory, which a budget error would name; the graph is left as it
        was. ``None``: no plan saves memory."""
        least: Outcome | None = None
        try:
            with uncollected(), showing(self.site.options.progress) as self.site.progress:
                self.site.original()
                for _ in each_way(self.attempts):
                    self._note_loops_alone()
                    found = self.attempts.least()
                    take_back(self.site, found)
                    if least is None or (found is not None and found.outcome.need < least.need):
                        least = None if found is None else found.outcome
                        state = self.site.search_state
                        self.search = None if state is None else state.search
        finally:
            self.site.abandon()
        return least

    def _fitting(self) -> AppliedPlan | None:
        """Follow a plan that keeps the budget. If other calls of the step are still to be planned,
        the plan of least memory will do: whether the step keeps its budget is not known yet."""
        whole = self.site.whole
        if whole is not None and whole.share == 0:
            return self._least()
        try:
            return first_candidate_that_fits(self.attempts)
        except BudgetError:
            if whole is None or not whole.others:
                raise
            return self._least()

    def _least(self) -> AppliedPlan | None:
        """Follow the plan of least memory, with loops replayed in the way that needs least."""
        self.at_least = True
        best: tuple[int, str] | None = None
        for way in each_way(self.attempts):
            found = self.attempts.least()
            if way is None:
                return found
            take_back(self.site, found)
            if found is not None and (best is None or found.outcome.need < best[0]):
                best = found.outcome.need, way
        if best is None:
            return None
        treat(self.attempts, best[1])
        return self.attempts.least()

    def _note_loops_alone(self) -> None:
        site = self.site
        if site.loops.replayed:
            step = site.capture()
            need = safe_bytes(as_it_is(site, step), site.gating)
            self.loops_alone.append((need, step.graph.total_seconds))

    def _as_before_if_it_fits(self) -> AppliedPlan | None:
        """Follow the plan of an earlier trace of the step if it keeps the budget; else restore the
        graph and return ``None``. A step that plain training keeps within its budget needs no
        plan."""
        try:
            earlier = earlier_plan(self.site)
            budget = None if earlier is None else self._budget
            if earlier is None or budget is None:
                return None
            if safe_bytes(self.site.original()[1], self.site.gating) <= budget:
                return None
            found = self.attempts.as_before(earlier, budget)
        except (GraphError, PlanError):
            found = None
        self.as_before = found is not None
        if found is None:
            self.site.restore()
        return found

    # With replicas.

    def _as_others_if_it_fits(self) -> AppliedPlan | None:
        """Follow the plan of other replicas if this one is equal to them and keeps the budget; else
        restore the graph and return ``None``."""
        if self.shared is None or self.shared.plan is None:
            return None
        try:
            found = follow(self.site, by_saved_plan(self.site, [self.shared.plan]))
        except (GraphError, PlanError):
            pass
        else:
            need, budget = found.outcome.need, self._budget
            if found.keeps(need) and (budget is None or need <= budget):
                return found
            take_back(self.site, found)
        self.site.treat_loops(None)
        return None

    @property
    def _budget(self) -> int | None:
        """The budget in bytes of chunks, which a plan of other replicas does not contain."""
        whole = self.site.whole
        return budget_of(self.site, self.site.original()[1] if whole is None else whole.plain)
