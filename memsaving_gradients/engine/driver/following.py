"""One gradient computation on its way from plan to plan: alone, beside its replicas, and with the
rest of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.errors import GraphError
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.engine.driver.attempt import Followed, Simulate, follow, take_back
from memsaving_gradients.engine.driver.attempts import Attempts
from memsaving_gradients.engine.driver.candidates import (
    each_way,
    first_candidate_that_fits,
    has_other,
    packed_otherwise,
    switch_packing,
)
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.progress import showing
from memsaving_gradients.engine.replicas import Shared
from memsaving_gradients.engine.site import Site
from memsaving_gradients.errors import BudgetError, PlanError
from memsaving_gradients.reports.plan import Plan

__all__ = ["Following"]

#: Plans for less that are tried to leave room for the rest of a step, before the one of least
#: memory.
WHOLE_ATTEMPTS = 3


class Following:
    """One gradient computation on its way from plan to plan.

    Attributes
    ----------
    site
        The gradient computation.
    attempts
        The plans that are tried for it.
    shared
        The plan that other replicas of the same step follow, which is followed here as well if it
        fits; ``None``: there are no replicas.
    loops_alone
        After `least`: for each way to replay loops, the bytes of a budget that a step needs and its
        time (seconds) if nothing else is done.
    """

    def __init__(self, site: Site, mode: str, shared: Shared | None = None) -> None:
        self.site, self.shared = site, shared
        self.attempts = Attempts(site, mode)
        self.loops_alone: list[tuple[int, float]] = []
        self._theirs: Plan | None = None

    def follow(self) -> Followed | None:
        """Follow a plan with which the gradients keep the budget; ``None``: nothing can be saved.

        Raises
        ------
        BudgetError
            If there is none; the graph is left as it was.
        """
        try:
            with showing(self.site.options.progress) as self.site.progress:
                return self._as_others_if_it_fits() or self._by_itself()
        except BaseException:
            self.site.abandon()
            raise

    def least(self) -> Outcome | None:
        """The plan of least memory, as an error about a budget would name it; the graph is left as
        it was. ``None``: none saves anything."""
        least: Outcome | None = None
        sought = self.site.sought
        try:
            with uncollected(), showing(self.site.options.progress) as self.site.progress:
                self.site.original()
                for _ in each_way(self.attempts):
                    self._note_loops_alone()
                    found = self.attempts.least()
                    take_back(self.site, found)
                    if least is None or (found is not None and found.outcome.need < least.need):
                        least = None if found is None else found.outcome
                        sought = self.site.sought
        finally:
            self.site.abandon()
            # Of what was looked for plans with, for whoever looks on.
            self.site.sought = sought
        return least

    def lower(
        self, found: Followed, simulate: Simulate, updates: Mapping[str, Sequence[tf.Operation]]
    ) -> Followed:
        """Follow a plan with which what is simulated keeps the budget, in the place of ``found``,
        with which it does not.

        The first is ``found`` itself, with a place in the order for ``updates``: by name of a
        gradient's op, the ops that end what is done with the gradient. Where no plan keeps the
        budget, it is the last one as well.
        """
        result, attempts = found.result, self.attempts
        goal, sought = self.site.goal, self.site.sought
        packed = self.site.packed.rewiring
        if result is None or result.readers_of:
            return found
        with uncollected(), showing(self.site.options.progress) as self.site.progress:
            take_back(self.site, found)
            attempts.updates = updates
            lower = attempts.again(found)
            if self._theirs is not None:
                if not lower.keeps(attempts.need(lower, simulate)):
                    take_back(self.site, lower)
                    plan = self._new_plan_of_others()
                    lower = (
                        self._as_others(plan) if plan else self._lower_than_others(found, simulate)
                    )
            elif (
                not lower.keeps(attempts.worst(lower, simulate))
                and goal
                and sought
                and sought.search
            ):
                lucky = found if lower.keeps(attempts.need(lower, simulate)) else None
                attempts.share = min(1.0, found.planned / goal.budget)
                attempts.give_up(lower, simulate, 0)
                lower = self._lower(simulate, lucky) or attempts.again(found)
                if self.shared is not None:
                    self.shared.plan = lower.outcome.plan
        assert lower.result is not None
        if self.site.packed.rewiring is not packed:
            original_view.forget(self.site.graph, packed)
            original_view.remember(self.site.graph, self.site.packed.rewiring)
        # After what it was made on: edits are undone from the last one on.
        original_view.remember(self.site.graph, lower.result.rewiring)
        return lower

    def _lower(self, simulate: Simulate, lucky: Followed | None) -> Followed | None:
        """A plan with which what is simulated keeps the budget: with masks packed as they are, or
        the other way, or of least memory; ``None``: there is none."""
        attempts = self.attempts

        def first_that_fits() -> Followed | None:
            return attempts.first_that_fits(WHOLE_ATTEMPTS, simulate)[0]

        try:
            lower, ended = attempts.first_that_fits(WHOLE_ATTEMPTS, simulate, lucky)
            if ended:
                return packed_otherwise(attempts, lower, first_that_fits)
            if has_other(self.site):
                switch_packing(attempts)
                if (lower := first_that_fits()) is not None:
                    return lower
                switch_packing(attempts)
            lower = attempts.least()
        except BudgetError:
            # Interrupted: there will be no other plan.
            return None
        if lower is not None and not lower.keeps(attempts.need(lower, simulate)):
            take_back(self.site, lower)
            return None
        return lower

    def _note_loops_alone(self) -> None:
        site = self.site
        if site.loops.replayed:
            step = site.capture()
            need = safe_bytes(site.simulate_plain(step), site.gating)
            self.loops_alone.append((need, step.graph.total_seconds))

    # Beside replicas.

    def _by_itself(self) -> Followed | None:
        found = first_candidate_that_fits(self.attempts)
        if self.shared is not None and found is not None:
            self.shared.plan = found.outcome.plan
        return found

    def _as_others(self, plan: Plan) -> Followed:
        """What follows the plan of other replicas."""
        self._theirs = plan
        return follow(self.site, by_saved_plan(self.site, [plan]), self.attempts.updates)

    def _as_others_if_it_fits(self) -> Followed | None:
        """The same, if there are any, this one is equal to them, and keeps the budget; the graph is
        left as it was otherwise."""
        if self.shared is None or self.shared.plan is None:
            return None
        try:
            found = self._as_others(self.shared.plan)
        except (GraphError, PlanError):
            pass
        else:
            if found.keeps(found.outcome.need):
                return found
            take_back(self.site, found)
        self._theirs = None
        self.site.treat_loops(None)
        return None

    def _lower_than_others(self, found: Followed, simulate: Simulate) -> Followed:
        """A plan of its own, where what the other replicas follow breaks the budget here alone;
        ``found`` once more if there is none."""
        theirs, self._theirs = self._theirs, None
        lower = self._lower(simulate, None)
        if lower is not None:
            return lower
        self._theirs = theirs
        return self.attempts.again(found)

    def _new_plan_of_others(self) -> Plan | None:
        """The plan that other replicas follow by now in the place of the one that is followed
        here."""
        plan = None if self.shared is None else self.shared.plan
        return None if plan is self._theirs else plan
