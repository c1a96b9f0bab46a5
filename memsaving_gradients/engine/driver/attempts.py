"""Plans for a step as it stands, one after the other, until one keeps its budget as it runs.

Each is made for less than the one before. Into which holes between chunks buffers fall is chance: a
plan with which not each of the steps that were simulated keeps the budget, but they do on average,
is followed where none is found that is better. An attempt costs a plan, a rewrite and the
simulations of the graph.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memsaving_gradients.budget import Goal, chunk_bytes, safe_bytes, too_small, worst_bytes
from memsaving_gradients.engine.driver.attempt import Followed, follow, take_back
from memsaving_gradients.engine.driver.window import Window
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.planning.by_mode import by_mode
from memsaving_gradients.engine.planning.outcome import LIMITED, Outcome, nothing_else
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.planning.within_limits import first_share, within_limits
from memsaving_gradients.engine.site import Site
from memsaving_gradients.errors import BudgetError, PlanError
from memsaving_gradients.planners.budget_search import CLOSE, ROUNDS
from memsaving_gradients.planners.meter import EXECUTOR_ADDS
from memsaving_gradients.planners.proposal import SLACK

__all__ = ["STEP_ROUNDS", "Attempts", "no_longer_kept"]

#: Plans that are rewritten and simulated until one keeps the budget: as many as are asked for in a
#: search, but fewer where an attempt takes seconds (`Site.is_large`), and until a better one is
#: found than one that keeps it. Chosen by judgement.
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

    Attributes
    ----------
    window
        For which share of the budget the next plan is made.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.mode = site, site.call.mode
        self.start()

    def start(self) -> None:
        """Begin anew, as for a step that was changed."""
        self.site.count_all()
        self.window = Window(first_share(self.site))
        self._broke = 0
        self._by_luck = False

    def kept(self) -> Followed | None:
        """A plan that keeps the budget; ``None``: nothing can be saved.

        Raises
        ------
        BudgetError
            If there is none; the graph is left as it was.
        """
        most = FEW_ATTEMPTS if self.site.is_large else ROUNDS.most
        found, ended = self._first_that_fits(most if self.mode == "budget" else 1)
        if ended:
            return self.if_it_saves(found)
        needs: list[int] = []
        while True:
            found, goal = self.least(), self.site.goal
            if found is None or goal is None:
                return found
            if found.outcome.need <= goal.budget:
                return self._faster_than(found, most) if needs else found
            needs.append(found.outcome.need)
            take_back(self.site, found)
            # What is named as the least is that of all estimates, whatever the budget is.
            if not self._counts_less(by=0.0):
                raise too_small(goal, self._or_plain(goal, min(needs)), self.site.stopped)

    def _faster_than(self, least: Followed, attempts: int) -> Followed | None:
        """A plan that keeps a budget as ``least``, which is followed, does."""
        take_back(self.site, least)
        found, ended = self._first_that_fits(attempts)
        return self.if_it_saves(found) if ended else self.again(least)

    def _first_that_fits(self, attempts: int) -> tuple[Followed | None, bool]:
        """A plan that keeps the budget; and whether the search is over, with this one, with plain
        gradients or with nothing."""
        attempt, last = 0, attempts
        #: The best plan that keeps it, which was taken back; whether it does for certain, or with
        #: some luck.
        kept: Followed | None = None
        certain = False
        while attempt < last:
            try:
                found = self._next(self.window.share)
            except BudgetError as error:
                if kept is not None:
                    break
                if self.site.stopped == "interrupted":
                    # Plans that broke the budget as they ran are no smaller than it.
                    raise self._no_smaller(error) from None
                if self.window.share < 1.0 and not attempt:
                    # There may be no plan that leaves room for what the executor adds, but one to
                    # which it adds nothing.
                    self.window.share = 1.0
                elif not self.window.narrow():
                    return None, False
                attempt += 1
                continue
            if found is None or found.result is None:
                return found, True
            if found.keeps(self.worst(found)):
                if not certain or _extra(found) < _extra(kept):
                    if attempt + 1 == last or not self._leaves_room(found):
                        return found, True
                    if not certain:
                        last = min(last, attempt + FEW_ATTEMPTS)
                    kept, certain = found, True
                elif attempt + 1 < last and not self._goes_on():
                    last = attempt + 1
                take_back(self.site, found)
                attempt += 1
                continue
            if self.mode == "saved":
                take_back(self.site, found)
                raise no_longer_kept(found.outcome)
            if kept is None and found.keeps(self.need(found)):
                # One more is tried.
                kept, last = found, min(attempts, attempt + 2)
            self._give_up(found, attempt)
            attempt += 1
        if kept is None:
            return None, False
        self._by_luck = not certain
        return self.again(kept), True

    def least(self) -> Followed | None:
        """The plan of least memory, whatever the budget is."""
        return self._next(0.0)

    def again(self, found: Followed) -> Followed:
        """The graph made to follow a plan once more."""
        return replace(found, result=follow(self.site, found.outcome).result)

    def _give_up(self, found: Followed, attempt: int) -> None:
        """Take a plan back, and ask for less from now on."""
        need = self.worst(found)
        take_back(self.site, found)
        self._broke = min(self._broke or need, need)
        budget = found.outcome.plan.budget
        assert budget is not None
        self.window.step_down(found.planned / budget, need / budget, attempt)

    def _counts_less(self, by: float = EXECUTOR_ADDS) -> bool:
        """Whether the rest of the step may take less beside gradients than plans were made for, by
        more than a share of the budget; the next one is made for that."""
        goal = self.site.goal
        if goal is None or not self.site.count_less(by * goal.budget):
            return False
        self.window = Window(first_share(self.site))
        return True

    def _leaves_room(self, found: Followed) -> bool:
        """Whether a faster plan may be found than one that keeps the budget, and leaves much of it:
        one that counts with less beside gradients, or one made for less than what broke it.

        Both what a plan needs and what the executor adds come near to what was asked for, no more.
        """
        plan = found.outcome.plan
        if plan.budget is None or found.outcome.need >= CLOSE**2 * plan.budget:
            return False
        return plan.extra_time > SLACK and self._goes_on()

    def _goes_on(self) -> bool:
        """Whether another plan is made for less beside gradients, or for another share of the
        budget."""
        return self._counts_less() or self.window.narrow()

    def worst(self, found: Followed) -> int:
        """The bytes of a budget that a step needs in the worst of the steps that were simulated, as
        long as there may be a plan that is better there.

        In large graphs there are buffers enough to even chance out.
        """
        if self.mode != "budget" or self.site.is_large or self._by_luck:
            return self.need(found)
        return worst_bytes(found.simulation, self.site.gating)

    def need(self, found: Followed) -> int:
        """The same on average, and with what is left to chance."""
        return safe_bytes(found.simulation, self.site.gating)

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

    def _next(self, share: float) -> Followed | None:
        """Plan and rewrite."""
        outcome: Outcome | None
        if self.mode == "saved":
            outcome = by_saved_plan(self.site)
        elif self.mode in LIMITED:
            outcome = within_limits(self.site, self.mode, share)
        else:
            outcome = by_mode(self.site, self.mode)
        return None if outcome is None else follow(self.site, outcome)

    def _no_smaller(self, error: BudgetError) -> BudgetError:
        """``error``, but naming no budget below the least that a plan needed as it ran (0: none did
        run)."""
        goal = self.site.goal
        if goal is None or error.least >= self._broke:
            return error
        return too_small(goal, self._or_plain(goal, self._broke), self.site.stopped)

    def _or_plain(self, goal: Goal, need: int) -> int:
        """The least of what a plan and plain training need, which nobody gets who asks for loops to
        be replayed."""
        return need if self.site.options.loops != "auto" else min(need, goal.plain_need)


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
