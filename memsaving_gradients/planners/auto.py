"""The fastest plan within a budget that a search finds, on any graph of any size.

The planner coarsens the step (:mod:`~memsaving_gradients.planners.retention.coarsen`), so that
simulating a plan takes milliseconds. Prices of memory
(:mod:`~memsaving_gradients.planners.prices.iteration`) find a plan of the coarse step. The planner
simulates its schedule on the whole graph, and corrects the coarse budget while the peak is above
the budget or far below it. If the plan stays far above the lower bound, the planner takes smaller
price steps. Then a local search (:mod:`~memsaving_gradients.planners.retention.local_search`)
lowers the budget step by step, from a larger one where prices work. It also improves the plans so
far; the number of simulations is bounded. If nothing fits, the result is the plan of least memory.
Not optimal in general; each plan has a lower bound
(:mod:`~memsaving_gradients.planners.bounds.integer`).

Each budget is planned without knowledge of others, so a larger budget may get a slower plan. Cost:
about a second for 10,000 ops. The plan is the same in every process, unless time is limited.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from memsaving_gradients.planners import least_memory
from memsaving_gradients.planners.bounds.integer import bound_within
from memsaving_gradients.planners.bounds.moment_program import Solved
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.chains.stages import MOST_STAGES
from memsaving_gradients.planners.prices.iteration import GENTLE, Pace, Priced, Pricing
from memsaving_gradients.planners.proposal import (
    MOST_STEPS,
    NEAR_BOUND,
    ROUNDING,
    SLACK,
    Deadline,
    Interrupted,
    Limits,
    Proposal,
    is_near,
    proposed,
    untouched,
)
from memsaving_gradients.planners.retention.coarsen import CORRECTIONS, Coarse, coarsen
from memsaving_gradients.planners.retention.local_search import RUNS_OF_A_STRETCH, Search
from memsaving_gradients.planners.retention.simulate import Run
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]

#: Above this many times the lower bound, chains of stages may do better: small budgets need values
#: recomputed several times. (An LSTM of 100 steps at 10 %: 30 % extra time instead of 107.)
FAR = 1.5
#: Budgets to approach a small budget from, as multiples of it. Near the least budget, prices find
#: poor plans up to half above it. (U-Net at 0.37 of its peak: 18 % extra time instead of 28.)
LARGER = (1.23, 1.6)
#: The cost of a local search where prices are not near the bound: the most simulated steps, the
#: most runs that simulate them, and the share of these runs for lowering the peak to the budget.
SEARCH_STEPS, MOST_RUNS, DESCENT = 800_000, 8_000, 0.6
#: Quick plans get the runs of a local search divided by this number.
QUICK = 8
#: At first, the local search makes one in this many of the promising changes at once.
BOLD = 8


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Return the fastest plan found within ``limits.budget``, or of least memory without one."""
    if limits.budget is None:
        return least_memory.plan(graph, limits)
    plain = untouched(graph, limits)
    return plain if plain.optimal else _Planning(graph, limits).plan()


class _Stopped(Exception):
    """Raised to end planning early, as when its time is over."""


class _Planning:
    """One call of `plan`, with the best proposal, its decisions, and the lower bound so far."""

    def __init__(self, graph: TrainingGraph, limits: Limits) -> None:
        self.graph, self.limits = graph, limits
        self.budget = int(limits.budget or 0)
        self.found: Proposal | None = None
        self.decisions: list[int] = []
        self.deadline = Deadline.of(limits.seconds)
        self.bound = least_extra_seconds(graph, self.budget, accumulate=limits.accumulate)
        self.solved: tuple[Solved, ...] = ()
        self.ticks, self.off, self.quick, self.told = 0, 0, False, 0.0

    @cached_property
    def coarse(self) -> Coarse:
        """The graph as a retention problem."""
        return self.graph.derived(coarsen, frozenset(self.limits.keep), self.limits.accumulate)

    @cached_property
    def most_runs(self) -> int:
        """The most runs of the local search."""
        return max(60, min(SEARCH_STEPS // max(1, len(self.coarse.problem.reads)), MOST_RUNS))

    def plan(self) -> Proposal:
        complete = True
        try:
            self._search()
        except (Interrupted, _Stopped):
            complete = False
        except KeyboardInterrupt:
            if not self._fits():
                raise
            complete = False
        if not self._fits():
            self._note(least_memory.plan(self.graph, replace(self.limits, budget=None)))
        assert self.found is not None
        return replace(
            self.found,
            lower_bound=self.bound,
            optimal=self._fits() and self.found.extra_seconds <= self.bound * (1 + ROUNDING),
            complete=complete,
            quick=self.quick,
        )

    def _search(self) -> None:
        if self.bound == float("inf"):
            # Nothing fits, so only the lowest peak is of interest.
            self._follow_chain()
            self._local_search([self.coarse.problem.plain()], self.most_runs // 4)
            return
        pricing = Pricing(self.coarse.problem, self._tick)
        found = [self._priced(pricing, Pace())]
        if self._is_small and not self.limits.quick:
            self._follow_chain()
        if not self.limits.quick:
            self._refine_bound(deep=False)
        # If prices stayed far above the budget, smaller price steps do so, too.
        work = MOST_STEPS // max(1, len(self.coarse.problem.reads))
        for pace in GENTLE:
            if self._is_enough() or found[0].run.peak > FAR * self.budget:
                break
            work -= pace.steps
            if work >= 0:
                found.append(self._priced(pricing, pace))
        if self._is_enough():
            if self.quick and not self._is_within(FAR):
                if self._is_small or found[-1].run.extra_seconds > NEAR_BOUND * found[-1].near:
                    self._approach(pricing)
                if self._is_small and not self._is_within(FAR):
                    self._local_search([self.decisions], self.most_runs // QUICK)
            return
        self._approach(pricing)
        if not self._is_small and not self._is_within(FAR):
            self._follow_chain()
        if self._is_enough():
            return
        runs = self.most_runs // QUICK if self.limits.quick else self.most_runs
        if not self._fits():
            if not self.limits.quick:
                # The bound of several moments takes seconds, and gives starting points.
                self._refine_bound(deep=True)
            starts = [self.coarse.like(one.runs) for one in self.solved if one.runs]
            starts += (one.closest for one in found)
            self._local_search(starts, runs)
        elif self.most_runs >= RUNS_OF_A_STRETCH:
            # Where one start leads to a dead end, the other one may not.
            first, best = found[0].decisions, self.decisions
            for start in [first] if first == best else [first, best]:
                self._local_search([start], runs // 2)
        self.quick = self.limits.quick

    def _is_enough(self) -> bool:
        """Return whether the best plan fits and, unless a quick one is wanted, is near the lower
        bound."""
        if self.limits.quick:
            self.quick = self._fits()
            return self.quick
        return self._is_within(NEAR_BOUND)

    def _refine_bound(self, *, deep: bool) -> None:
        """Raise the lower bound, as far as `bound_within` can."""
        found = bound_within(
            self.graph,
            self.budget,
            accumulate=self.limits.accumulate,
            deep=deep,
            seconds=self.deadline.left,
        )
        self.bound, self.solved = max(self.bound, found.seconds), found.solved

    def _priced(self, pricing: Pricing, pace: Pace) -> Priced:
        """Return the plan of prices, with the coarse budget corrected by the peak on the graph."""
        found: Priced | None = None
        for correction in range(CORRECTIONS):
            budget = max(0, self.budget - self.off)
            found = pricing.plan(budget, pace, self.bound * (1 + ROUNDING), found)
            trial = self._follow(found.decisions, found.run)
            if trial is None or found.run.peak > budget:
                break
            off = trial.peak - found.run.peak
            fits = trial.peak <= self.budget
            if fits and abs(off - self.off) <= SLACK * self.budget:
                break
            self.off = off if fits or off > self.off else self.off + correction + 1
        assert found is not None
        return found

    def _approach(self, pricing: Pricing) -> None:
        """Note the plan that a local search reaches from the plan of a larger budget; if it is far
        from the lower bound, from the plan of a much larger one, too."""
        for larger in LARGER:
            self._approach_from(larger, pricing)
            if self._is_within(FAR):
                break

    def _approach_from(self, larger: float, pricing: Pricing) -> None:
        """Note the plan that a local search reaches from the plan of ``larger`` times the
        budget."""
        budget = max(0, self.budget - self.off)
        found = pricing.plan(int(budget * larger))
        decisions, run = found.decisions, found.run
        for _ in range(CORRECTIONS):
            search = Search(self.coarse.problem, budget, tick=self._tick)
            decisions, run = search.approach(decisions, run)
            trial = self._follow(decisions, run)
            if trial is None or trial.peak <= self.budget or run.peak > budget:
                break
            budget = run.peak - (trial.peak - self.budget)

    def _follow_chain(self) -> None:
        """Note the plan of a chain of stages."""
        limits = replace(self.limits, seconds=self.deadline.left, progress=self._tell)
        trial = chain.plan(self.graph, limits)
        self._note(trial)
        if not trial.complete:
            raise _Stopped

    def _local_search(self, starts: list[list[int]], runs: int) -> None:
        """Continue from decisions: lower the peak to the budget, then reduce extra time."""
        budget = max(0, self.budget - self.off)
        search = Search(self.coarse.problem, budget, tick=self._tick)
        each = int(runs * DESCENT) // len(starts)
        found = []
        for start in starts:
            decisions, result = search.descend(start, each, bold=BOLD)
            if result.peak > budget:
                decisions, result = search.descend(start, each)
            found.append(search.keep_again(decisions, result, range(len(decisions))))
        best = min(found, key=lambda one: one[1].worth(budget))
        self._follow(*best)
        better = search.improve(*best, max(0, runs - search.runs), self.bound * (1 + ROUNDING))
        self._follow(*better)

    def _follow(self, decisions: list[int], run: Run) -> Proposal | None:
        """Note and return the plan that decisions give on the whole graph; ``None`` if its extra
        time is too long.

        Recursion adds a forward pass for each halving of n ops, and reaches the memory of log n ops
        (Chen et al. 2016). More time gains little: an LSTM takes 10.0 MB instead of 10.2 if each of
        its steps recomputes all steps before it, which takes 180 times as long.
        """
        if run.extra_seconds > math.log2(self.graph.length) * self.graph.total_seconds:
            return None
        trial = proposed(self.graph, self.limits, self.coarse.schedule(decisions))
        self._note(trial)
        if self.found is trial:
            self.decisions = decisions
        return trial

    @property
    def _is_small(self) -> bool:
        """Whether a chain could have a stage for each forward and each backward event. Planning it
        takes no time then, so it comes before smaller price steps."""
        return len(self.coarse.problem.reads) <= 2 * MOST_STAGES

    def _fits(self) -> bool:
        return self.found is not None and self.found.peak <= self.budget

    def _is_within(self, times: float) -> bool:
        """Return whether the best plan fits, with extra time of at most so many ``times`` the lower
        bound, or `SLACK` of a step above the bound."""
        if self.found is None or not self._fits():
            return False
        return is_near(self.found.extra_seconds, self.bound, self.graph.total_seconds, times)

    def _note(self, trial: Proposal) -> None:
        """Remember the best plan: the fastest within the budget, else the lowest."""
        if self.found is None or trial.rank(self.budget) < self.found.rank(self.budget):
            self.found = trial

    def _tick(self) -> None:
        self.ticks += 1
        if self.deadline.is_over:
            raise _Stopped
        if self.ticks % 4 == 1:
            self._tell(min(self.ticks / self.most_runs, 0.99), "pricing")

    def _tell(self, share: float, what: str) -> None:
        """Report the share of planning done; it never falls, even between planners."""
        self.told = max(self.told, share)
        if self.limits.progress is not None:
            self.limits.progress(self.told, what)
