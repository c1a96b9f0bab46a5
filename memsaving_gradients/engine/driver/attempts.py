"""Plans for a step as it stands, one after the other, until one keeps its budget as it runs.

What the executor, the rest of the step and holes between chunks add to a plan is seen when the
graph follows it. The first plan leaves room for what is foreseen of that. If it does not keep the
budget, or leaves much of it, the next ones are asked for more or for less
(:class:`~memsaving_gradients.engine.driver.window.Window`), for each estimate of what the rest of
the step takes. A quick plan is nearly as good as the best one, and is found in a tenth of a second;
so an attempt costs little more than rewriting and simulating the graph. One that cannot be faster
than a plan that is known is not rewritten.

Into which holes between chunks buffers fall is chance: a plan keeps the budget if each of the steps
that were simulated does. Where nothing keeps it, the plan of least memory does, or the error names
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from memsaving_gradients.budget import Goal, chunk_bytes, too_small
from memsaving_gradients.engine.driver.attempt import Followed, follow, take_back
from memsaving_gradients.engine.driver.window import Window
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.planning.by_mode import by_mode
from memsaving_gradients.engine.planning.outcome import LIMITED, Outcome, nothing_else
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.planning.within_limits import first_need, within_limits
from memsaving_gradients.engine.site import Site
from memsaving_gradients.errors import PlanError
from memsaving_gradients.planners.budget_search import CLOSE, ROUNDS, Search
from memsaving_gradients.planners.meter import EXECUTOR_ADDS, Found
from memsaving_gradients.planners.proposal import SLACK

__all__ = ["STEP_ROUNDS", "Attempts", "no_longer_kept"]

#: Plans that are rewritten and simulated for each estimate: as many as are asked for in a search,
#: but fewer where an attempt takes seconds (`Site.is_large`), or is the planner's best instead of a
#: quick one. Chosen by judgement.
FEW_ATTEMPTS = 5
#: How often all calls of a step are planned, each time for less than before and the last time for
#: the least, until the step keeps the budget. Chosen by judgement.
STEP_ROUNDS = 4
#: Modes in which nobody but a planner says what is recomputed, and nobody allows for a number of
#: bytes.
SAVING = ("memory", "speed", "slowdown", "planner")


class Attempts:
    """Plans for the gradients of a site, one after the other.

    Parameters
    ----------
    site
        The gradient computation, its loops and masks as they are.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.mode = site, site.call.mode
        self.start()

    def start(self, *, alike: bool = False) -> None:
        """Begin anew, as for a step that was changed. ``alike``: what plans came to before tells
        what is worth trying now."""
        self.site.count()
        #: The fastest plan that keeps the budget.
        self._best: Followed | None = None
        if not alike:
            #: What plans of earlier estimates need, and their extra time.
            self._earlier: list[tuple[int, float]] = []

    def kept(self, limit: float = math.inf) -> Followed | None:
        """A plan that keeps the budget, or does what else was asked for; ``None``: nothing can be
        saved, or no plan was found that keeps it and takes less than ``limit`` of extra time."""
        if self.mode != "budget":
            return self._only()
        outcome = self._outcome(self._foreseen)
        if outcome is None:
            return None
        if outcome.plain:
            return follow(self.site, outcome)
        most = FEW_ATTEMPTS if self.site.is_large else ROUNDS.most
        found = self._tried(outcome, most, limit)
        while (found or self._best) is None and not self.site.stopped and self._counts_less():
            found = self._tried(self._outcome(self._foreseen), most, limit)
        if found is None and self._best is not None:
            found = self.again(self._best)
        return None if found is None else self._polished(found)

    def _only(self) -> Followed | None:
        """The plan that was asked for, where there is but one."""
        outcome = self._outcome()
        found = None if outcome is None else follow(self.site, outcome)
        if found is not None and self.mode == "saved" and not found.keeps(found.outcome.need):
            take_back(self.site, found)
            raise no_longer_kept(found.outcome)
        return self.if_it_saves(found)

    def _foreseen(self, search: Search) -> Found:
        """The plan that may keep the budget, by what is known before it is rewritten."""
        assert self.site.sought is not None
        return search.within(first_need(self.site, self.site.sought))

    def _outcome(self, wanted: Callable[[Search], Found] = Search.least) -> Outcome | None:
        """The plan that was asked for; of those that may keep a budget, the one ``wanted``."""
        if self.mode == "saved":
            return by_saved_plan(self.site)
        if self.mode in LIMITED:
            return within_limits(self.site, self.mode, wanted)
        return by_mode(self.site, self.mode)

    def _tried(
        self, outcome: Outcome | None, attempts: int, limit: float = math.inf, quick: bool = True
    ) -> Followed | None:
        """A plan that keeps the budget, and than which a faster one is hardly to be found: of those
        for the present estimate, of which ``outcome`` is the first. The others are noted.

        Of ``attempts``, a few are left as soon as one keeps it.
        """
        window, now, left = Window(), list[tuple[int, float]](), attempts
        assert outcome is not None
        assert outcome.plan.budget is not None
        if outcome.proposal.peak > outcome.plan.budget:
            # By this estimate nothing fits, and less of the budget is left to ask for.
            return None
        while True:
            left -= 1
            assert outcome is not None
            plan, peak = outcome.plan, outcome.proposal.peak
            if plan.extra_time >= min(limit, _extra(self._best)):
                window.of_no_use(peak)
            else:
                found = follow(self.site, outcome)
                need = found.outcome.need
                now.append((need, plan.extra_time))
                if found.keeps(need) and not (left and self._leaves_room(found, need, now)):
                    self._earlier += now
                    return found
                take_back(self.site, found)
                assert plan.budget is not None
                if found.keeps(need):
                    self._best, left = found, min(left, ROUNDS.fewest)
                    window.kept(peak, need / plan.budget)
                else:
                    window.broke(peak, need / plan.budget)
                if self._is_slower(need, plan.extra_time):
                    break
            asked, last = window.asked, outcome
            if asked is None or not left or self.site.stopped:
                break
            outcome = self._outcome(partial(Search.at, asked=asked, quick=quick))
            if outcome is not None and outcome.proposal.schedule == last.proposal.schedule:
                break
        self._earlier += now
        return None

    def _leaves_room(self, found: Followed, need: int, tried: list[tuple[int, float]]) -> bool:
        """Whether a plan may be found that is faster by more than `SLACK` than one that keeps the
        budget, and needs ``need``.

        Of plans that were ``tried`` and broke it, the line to them tells how long those take that
        need all of it. Where none did, it is known only that some of it is left.
        """
        plan = found.outcome.plan
        if plan.budget is None:
            return False
        needs, times = _fastest(tried)
        if needs[-1] > plan.budget:
            best = float(np.interp(plan.budget, needs, times))
        else:
            best = 0.0 if need < CLOSE**2 * plan.budget else plan.extra_time
        return plan.extra_time - best > SLACK

    def _is_slower(self, need: int, extra: float) -> bool:
        """Whether plans of earlier estimates take less time than one that needs so many bytes, by a
        line between those that need more and less."""
        if not self._earlier:
            return False
        needs, times = _fastest(self._earlier)
        return bool(need >= needs[0] and extra > np.interp(need, needs, times))

    def rescued(self) -> Followed:
        """The plan of least memory, or a faster one between it and those that broke the budget.

        Raises
        ------
        BudgetError
            If it does not keep the budget, either; the graph is left as it was.
        """
        needs = [need for need, _ in self._earlier] if self.site.stopped else []
        self.site.count()
        while True:
            found, goal = self.least(), self.site.goal
            assert found is not None and goal is not None
            take_back(self.site, found)
            if found.keeps(found.outcome.need):
                break
            needs.append(found.outcome.need)
            # What is named as the least is that of all estimates, whatever the budget is.
            if self.site.stopped or not self._counts_less(by=0.0):
                raise too_small(goal, self._or_plain(goal, min(needs)), self.site.stopped)
        other = self._tried(found.outcome, FEW_ATTEMPTS, quick=False)
        return other or self.again(self._best or found)

    def _polished(self, found: Followed) -> Followed:
        """``found``, or the planner's best plan for as many bytes, if that takes less time and
        keeps the budget, too."""
        plan, asked = found.outcome.plan, found.outcome.plan.planned_for
        if not found.outcome.proposal.quick or asked is None or self.site.stopped:
            return found
        self.site.count(found.outcome.estimate)
        outcome = self._outcome(partial(Search.at, asked=asked, quick=False))
        assert outcome is not None
        if outcome.plan.extra_time < plan.extra_time:
            take_back(self.site, found)
            other = follow(self.site, outcome)
            if other.keeps(other.outcome.need):
                return other
            take_back(self.site, other)
            found = self.again(found)
        # Its lower bound is the better one.
        bound = max(plan.lower_bound, outcome.plan.lower_bound)
        plan = replace(plan, lower_bound=min(bound, plan.extra_time))
        return replace(found, outcome=replace(found.outcome, plan=plan))

    def least(self) -> Followed | None:
        """The plan of least memory as it runs, whatever the budget is."""
        outcome = self._outcome()
        if outcome is None:
            return None
        found = follow(self.site, outcome)
        if self.site.goal is None or outcome.plain or self.site.stopped:
            return found
        lowest = self._outcome(Search.lowest)
        if lowest is None or lowest.proposal.schedule == outcome.proposal.schedule:
            return found
        take_back(self.site, found)
        other = follow(self.site, lowest)
        if other.outcome.need < found.outcome.need:
            return other
        take_back(self.site, other)
        return self.again(found)

    def again(self, found: Followed) -> Followed:
        """The graph made to follow a plan once more."""
        return replace(found, result=follow(self.site, found.outcome).result)

    def _counts_less(self, by: float = EXECUTOR_ADDS) -> bool:
        """Whether the rest of the step may take less beside gradients than plans were made for, by
        more than a share of the budget; the next one is made for that."""
        goal = self.site.goal
        return goal is not None and self.site.count_less(by * goal.budget)

    def if_it_saves(self, found: Followed | None) -> Followed | None:
        """``found``, unless it needs no less than plain training as the executor runs it, which its
        schedule does not tell.

        Checkpoints and tensors to encode that were named are followed, and it is said. Budgets are
        promises of their own, and a plan from a file is what was asked for.
        """
        if found is None or found.result is None or self.mode in ("budget", "saved"):
            return found
        plan, site = found.outcome.plan, self.site
        # The least that plain training may take is what recomputing must beat: it moves ops to
        # where they may meet others. What is packed or encoded alone is there in the same order,
        # and compared as it is on average.
        before = site.original()[1]
        need = plan.allocated
        most = plan.allocated_plain if plan.clones else chunk_bytes(before, site.gating)
        if need < most:
            return found
        figures = (
            f"as TensorFlow runs it, it may take {need:,} bytes in the allocator's chunks, plain"
            f" training {most:,}"
        )
        if self.mode not in SAVING or site.encode:
            said = "what was named is followed, but saves no memory"
            warn_nothing_saved(site.graph, figures, what=said)
            return found
        take_back(site, found)
        if site.is_other:
            unchanged = nothing_else(site, plan.mode, plan.planner)
            if unchanged.plan.allocated < most or (site.attention and site.attention.names):
                return follow(site, unchanged)
        warn_nothing_saved(site.graph, f"a plan was found that takes less in order, but {figures}")
        return None

    def _or_plain(self, goal: Goal, need: int) -> int:
        """The least of what a plan and plain training need, which nobody gets who asks for loops to
        be replayed."""
        return need if self.site.options.loops != "auto" else min(need, goal.plain_need)


def _fastest(tried: list[tuple[int, float]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """What plans need, in order, and the least extra time of those that need no more."""
    needs, times = np.array(sorted(tried)).T
    return needs, np.minimum.accumulate(times)


def _extra(found: Followed | None) -> float:
    return math.inf if found is None else found.outcome.plan.extra_time


def no_longer_kept(outcome: Outcome) -> PlanError:
    """The error for a saved plan with which a step breaks the budget that it was made for."""
    given = outcome.given or outcome.plan
    return PlanError(
        "plan",
        given.file or given,
        f"would need {outcome.need:,} bytes here, more than its budget of {given.budget:,}:"
        " hold_gradients, xla or the device are others than it was made for; plan anew with"
        " budget=",
    )
