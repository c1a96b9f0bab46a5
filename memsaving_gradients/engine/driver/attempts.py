"""Attempts at a plan for one step, until a plan keeps the budget in the executor's order.

The executor, the rest of the step and holes between chunks add bytes to a plan. Their number is
known when the graph follows the plan; the first plan leaves room for a forecast. If a plan breaks
the budget, or leaves much of it unused, the next plan is for fewer or for more bytes
(:class:`~memsaving_gradients.engine.driver.window.Window`). If none keeps the budget, the next
estimate of the rest of the step is used. A quick plan is nearly as good as the best one and takes a
tenth of a second. So an attempt costs little more than rewriting and simulating the graph. A plan
that cannot be faster than a known one is not rewritten.

Chance decides which holes between chunks a buffer falls into: a plan keeps the budget if each of
the simulated steps does. The last attempt is the plan of least memory; if it breaks the budget,
too, the error names its need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from memsaving_gradients.budget import chunk_bytes, safe_bytes, too_small
from memsaving_gradients.engine.driver.attempt import AppliedPlan, follow, rewritten, take_back
from memsaving_gradients.engine.driver.window import Window
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.planning.by_mode import by_mode
from memsaving_gradients.engine.planning.earlier_traces import EarlierPlan, scaled
from memsaving_gradients.engine.planning.outcome import LIMITED, Outcome, nothing_else
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.planning.within_limits import (
    as_it_is_now,
    first_need,
    within_limits,
)
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import PlanError
from memsaving_gradients.planners.budget_search import CLOSE, ROUNDS, Search
from memsaving_gradients.planners.meter import EXECUTOR_ADDS, Found
from memsaving_gradients.planners.proposal import SLACK
from memsaving_gradients.schedules.simulate import TIE

__all__ = ["STEP_ROUNDS", "Attempts", "no_longer_kept"]

#: The most plans that are rewritten and simulated for each estimate where an attempt takes seconds
#: (`Site.is_large`), or needs the planner's best plan instead of a quick one. Elsewhere, there are
#: as many as a search asks for (`ROUNDS`). Chosen by judgement.
FEW_ATTEMPTS = 5
#: The most rounds in which all calls of a step are planned, until the step keeps the budget. Each
#: round is for fewer bytes, and the last one for least memory. Chosen by judgement.
STEP_ROUNDS = 4
#: Modes in which the planner alone chooses what to recompute, and the user gives no budget.
SAVING = ("memory", "speed", "slowdown", "planner")


class Attempts:
    """The attempts at a plan for the gradients of a site, one after the other.

    Parameters
    ----------
    site
        The gradient computation, with its loops and masks as they are now.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.mode = site, site.call.mode
        self.start()

    def start(self, *, alike: bool = False) -> None:
        """Start again, as after a change of the step. ``alike``: keep the needs and times of
        earlier plans, which tell whether a plan is worth trying now."""
        self.site.use_estimate()
        #: The fastest plan so far that keeps the budget.
        self._best: AppliedPlan | None = None
        if not alike:
            #: The need of each plan for earlier estimates, and its extra time.
            self._earlier: list[tuple[int, float]] = []

    def kept(self, limit: float = math.inf) -> AppliedPlan | None:
        """Follow a plan that keeps the budget, or the plan of another mode; ``None``: nothing can
        be saved, or no plan with less extra time than ``limit`` keeps the budget."""
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
        if found is not None:
            return self._polished(found, found)
        return None if self._best is None else self._polished(self._best, None)

    def as_before(self, earlier: EarlierPlan, budget: int) -> AppliedPlan | None:
        """Follow the plan of an earlier trace of the step, or a plan for a few bytes more or fewer,
        if it keeps the budget, uses about as much of it as before, and is about as near its lower
        bound as before; else return ``None``. ``budget``: bytes of chunks.

        Holes between chunks differ from trace to trace, so the second plan is often needed. Of a
        budget in bytes, hardly anything may be left: a smaller batch may need less recomputation.
        """
        site = self.site
        first = scaled(site, earlier, budget)
        if first.plan.gap > earlier.plan.gap + 2 * SLACK:
            return None
        shares = isinstance(site.options.limit, float)
        found, least = follow(site, first), (CLOSE**2 if shares else CLOSE) * earlier.used
        need = found.outcome.need
        if least * budget <= need <= budget:
            return found
        take_back(site, found)
        site.search_state = as_it_is_now(site)
        ratio = earlier.used * budget / need
        # Halfway, if there is room: the next plan may have more bytes in holes.
        asked = first.proposal.peak * (math.sqrt(ratio) if ratio > 1 else ratio)
        second = self._outcome(partial(Search.at, asked=int(asked * (1 - EXECUTOR_ADDS))))
        most = first.plan.extra_time + (2 * SLACK if need > budget else 0.0)
        if second is None or second.plan.extra_time > most:
            return None
        found = follow(site, second)
        if (least**2 if shares else least) * budget <= found.outcome.need <= budget:
            return found
        take_back(site, found)
        return None

    def _only(self) -> AppliedPlan | None:
        """Follow the one plan of a mode without a budget."""
        outcome = self._outcome()
        found = None if outcome is None else follow(self.site, outcome)
        if found is not None and self.mode == "saved" and not found.keeps(found.outcome.need):
            take_back(self.site, found)
            raise no_longer_kept(found.outcome)
        return self.if_it_saves(found)

    def _foreseen(self, search: Search) -> Found:
        """Return the plan that may keep the budget, as far as is known before its rewrite."""
        assert self.site.search_state is not None
        return search.within(first_need(self.site, self.site.search_state))

    def _outcome(self, wanted: Callable[[Search], Found] = Search.least) -> Outcome | None:
        """Return the plan of the mode; under a budget, the plan that ``wanted`` picks."""
        if self.mode == "saved":
            return by_saved_plan(self.site)
        if self.mode in LIMITED:
            return within_limits(self.site, self.mode, wanted)
        return by_mode(self.site, self.mode)

    def _tried(
        self, outcome: Outcome | None, attempts: int, limit: float = math.inf, quick: bool = True
    ) -> AppliedPlan | None:
        """Follow plans for the current estimate, ``outcome`` first, and return the first one that
        keeps the budget and leaves no room for a clearly faster one. Note the others.

        Make at most ``attempts``; once a plan has kept the budget, a few more.
        """
        assert outcome is not None
        assert outcome.plan.budget is not None
        window, now, left = Window(high=outcome.plan.budget), list[tuple[int, float]](), attempts
        if outcome.proposal.peak > outcome.plan.budget:
            # By this estimate no plan fits, and further plans would be for even fewer bytes.
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
                hoped = self._hoped(found, need) if left and found.keeps(need) else None
                if found.keeps(need) and not (left and self._leaves_room(found, need, now, hoped)):
                    self._earlier += now
                    return found
                take_back(self.site, found)
                assert plan.budget is not None
                if found.keeps(need):
                    self._best, left = found, min(left, ROUNDS.fewest)
                    window.kept(peak, need / plan.budget, 0 if hoped is None else hoped[0])
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

    def _leaves_room(
        self,
        found: AppliedPlan,
        need: int,
        tried: list[tuple[int, float]],
        hoped: tuple[int, float] | None,
    ) -> bool:
        """Return whether some plan may be faster by more than `SLACK` than ``found``, which keeps
        the budget and needs ``need`` bytes.

        If a ``tried`` plan broke the budget, interpolation gives the time of a plan that uses all
        of it. If none did, the unused part of the budget is known, and the plan ``hoped`` for.
        """
        plan = found.outcome.plan
        if plan.budget is None:
            return False
        needs, times = _fastest(tried)
        if needs[-1] > plan.budget:
            best = float(np.interp(plan.budget, needs, times))
        elif hoped is None:
            best = 0.0 if need < CLOSE**2 * plan.budget else plan.extra_time
        else:
            best = hoped[1]
        return plan.extra_time - best > SLACK

    def _hoped(self, found: AppliedPlan, need: int) -> tuple[int, float] | None:
        """Return the peak and the extra time of a quick plan for more bytes than ``found``, which
        uses the budget: halfway to the plan that would need all of it if it had as few bytes in
        holes as plain training. ``None``: there is no such plan, or ``found`` leaves room.

        How many bytes are in holes is chance: a tenth of one plan, half of the next.
        """
        site, outcome, plan = self.site, found.outcome, found.outcome.plan
        state = site.search_state
        assert state is not None and state.search is not None and plan.budget is not None
        if not plan.extra_time or need < CLOSE**2 * plan.budget:
            return None
        peak, before = outcome.proposal.peak, state.before
        least = before.peak / max(safe_bytes(before, site.gating), 1)
        asked = int(math.sqrt(peak * max(peak, plan.budget * least)))
        hoped = state.search.at(asked).proposal
        if hoped.peak > asked:
            return None
        seconds = outcome.step.graph.total_seconds + hoped.extra_seconds
        return hoped.peak, seconds / state.unpacked.graph.total_seconds - 1

    def _is_slower(self, need: int, extra: float) -> bool:
        """Return whether plans for earlier estimates are faster than a plan with this need, by
        interpolation between those that need more and fewer bytes."""
        if not self._earlier:
            return False
        needs, times = _fastest(self._earlier)
        return bool(need >= needs[0] and extra > np.interp(need, needs, times))

    def rescued(self) -> AppliedPlan:
        """Follow the plan of least memory, or a faster one between it and those that broke the
        budget.

        Raises
        ------
        BudgetError
            If that plan breaks the budget, too; the graph is left as it was.
        """
        needs = [need for need, _ in self._earlier] if self.site.stopped else []
        self.site.use_estimate()
        while True:
            found, goal = self.least(), self.site.goal
            assert found is not None and goal is not None
            take_back(self.site, found)
            if found.keeps(found.outcome.need):
                break
            needs.append(found.outcome.need)
            # The error names the least need over all estimates that differ, whatever the budget is.
            if self.site.stopped or not self.site.use_lower_estimate(TIE * found.outcome.need):
                raise too_small(
                    goal, self.site.capped_by_plain(min(needs), goal.plain_need), self.site.stopped
                )
        other = self._tried(found.outcome, FEW_ATTEMPTS, quick=False)
        return other or self.again(self._best or found)

    def _polished(self, found: AppliedPlan, followed: AppliedPlan | None) -> AppliedPlan:
        """Follow ``found``, or the planner's best plan for as many bytes, or for a few less, if
        that is faster and keeps the budget, too.

        ``followed``: ``found``, if the graph follows it now.
        """
        plan, asked = found.outcome.plan, found.outcome.plan.planned_for
        if not found.outcome.proposal.quick or asked is None or self.site.stopped:
            return followed or self.again(found)
        self.site.use_estimate(found.outcome.estimate)
        bound = plan.lower_bound
        for number in range(ROUNDS.fewest):
            outcome = self._outcome(partial(Search.at, asked=asked, quick=False))
            assert outcome is not None and plan.budget is not None
            if asked == plan.planned_for:
                # Both lower bounds hold for as many bytes; the higher one says more.
                bound = max(bound, outcome.plan.lower_bound)
            if outcome.plan.extra_time >= plan.extra_time - (SLACK if number else 0.0):
                break
            take_back(self.site, followed)
            other = follow(self.site, outcome)
            if other.keeps(other.outcome.need):
                return _bounded(other, bound)
            take_back(self.site, other)
            followed = None
            asked = int(asked * plan.budget / other.outcome.need * (1 - EXECUTOR_ADDS))
        return _bounded(followed or self.again(found), bound)

    def least(self) -> AppliedPlan | None:
        """Follow the plan of least memory in the executor's order, whatever the budget is."""
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

    def again(self, found: AppliedPlan) -> AppliedPlan:
        """Make the graph follow a plan once more, which is simulated already."""
        return replace(found, result=rewritten(self.site, found.outcome))

    def _counts_less(self) -> bool:
        """Switch to an estimate of the rest of the step that is lower by more than the executor may
        add to a plan, for the next plan; return whether there is one."""
        goal = self.site.goal
        return goal is not None and self.site.use_lower_estimate(EXECUTOR_ADDS * goal.budget)

    def if_it_saves(self, found: AppliedPlan | None) -> AppliedPlan | None:
        """Return ``found`` if it needs less than plain training in the executor's order, which its
        schedule does not show; else take it back.

        Named checkpoints and encodings are followed in any case, with a warning. Plans for a budget
        (a promise of its own) and saved plans (the user's request) are not checked.
        """
        if found is None or found.result is None or self.mode in ("budget", "saved"):
            return found
        plan, site = found.outcome.plan, self.site
        # Recomputation moves ops to where they may meet others, so it has to beat the least that
        # plain training may take. Packing and encoding keep the order of ops: they are compared
        # with the average.
        before = site.original()[1]
        if found.simulation.allocated_most < before.least_peak:
            # Chunks need not be simulated to know.
            return found
        need = plan.allocated
        most = plan.allocated_plain if plan.clones else chunk_bytes(before, site.gating)
        if need < most:
            return found
        figures = (
            f"as TensorFlow runs it, the plan may take {need:,} bytes in the allocator's chunks,"
            f" and plain training {most:,}"
        )
        if self.mode not in SAVING or site.encode:
            said = "the named checkpoints or encodings are used, but save no memory"
            warn_nothing_saved(site.graph, figures, what=said)
            return found
        take_back(site, found)
        if site.differs_from_plain:
            unchanged = nothing_else(site, plan.mode, plan.planner)
            if unchanged.plan.allocated < most or (site.attention and site.attention.names):
                return follow(site, unchanged)
        warn_nothing_saved(
            site.graph, f"a plan was found with a lower peak in schedule order, but {figures}"
        )
        return None


def _fastest(tried: list[tuple[int, float]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the needs of plans in ascending order, and the least extra time within each."""
    needs, times = np.array(sorted(tried)).T
    return needs, np.minimum.accumulate(times)


def _bounded(found: AppliedPlan, bound: float) -> AppliedPlan:
    """Return ``found`` with a lower bound of its extra time."""
    plan = replace(found.outcome.plan, lower_bound=min(bound, found.outcome.plan.extra_time))
    return replace(found, outcome=replace(found.outcome, plan=plan))


def _extra(found: AppliedPlan | None) -> float:
    return math.inf if found is None else found.outcome.plan.extra_time


def no_longer_kept(outcome: Outcome) -> PlanError:
    """Return the error for a saved plan with which a step breaks the plan's own budget."""
    given = outcome.given or outcome.plan
    return PlanError(
        "plan",
        given.file or given,
        f"would need {outcome.need:,} bytes here, more than its budget of {given.budget:,}:"
        " hold_gradients, xla or the device differ from those it was made for; plan again with"
        " budget=",
    )
