"""The fastest plan within a budget that is found on any graph, of any size.

The step is made coarse (:mod:`~memsaving_gradients.planners.retention.coarsen`), so that a plan is
simulated in a millisecond. A search
(:mod:`~memsaving_gradients.planners.retention.local_search`) then begins at plain training and at
several other places (:mod:`~memsaving_gradients.planners.retention.starts`). The best of what comes
down to the budget is improved. The schedule is simulated on the whole graph; as long as that is
above the budget, or far below, the coarse budget is corrected. Where nothing fits, or what fits is
far above the lower bound, :mod:`~memsaving_gradients.planners.chains.chain` is asked: at small
budgets values are recomputed several times. Where a search takes long, it is asked first; in deep
networks, if it comes close to the bound, there is no search.

A budget is sought by several such plans, since an allocator's chunks are known only then. The one
that is used at last may be improved further, by
:mod:`~memsaving_gradients.planners.retention.prove`: that takes twenty seconds, where it may gain
two hundredths of a step.

Not optimal in general; on the public planning instances within 0.1 points of the optimum, and a
lower bound is given with each plan (:mod:`~memsaving_gradients.planners.bounds.relaxation`, and
with SciPy :mod:`~memsaving_gradients.planners.bounds.integer`). Nothing that is found for one
budget is known at another, so that a larger one may get a slower plan; on four networks, 20 budgets
each, none did. Cost: `MOST_STEPS` steps simulated, a few seconds; the same plan in every process,
unless a limit on time is given. In large graphs that fall into no blocks most of that is used, and
descents end far above the bound; there they begin at the solutions of larger integer programs, for
less than the budget (a random layered graph of 1000 ops at 80 % of its peak: 3.5 % extra in a
minute, 10.9 % from other places).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from memsaving_gradients.planners import least_memory
from memsaving_gradients.planners.bounds.integer import (
    SHALLOW,
    THOROUGH,
    Bound,
    Depth,
    bound_within,
)
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal, proposed, untouched
from memsaving_gradients.planners.retention import constraint_program
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.planners.retention.local_search import Search
from memsaving_gradients.planners.retention.prove import prove
from memsaving_gradients.planners.retention.simulate import Run
from memsaving_gradients.planners.retention.starts import as_the_bound_says, fitting_cuts
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["improved", "plan"]

#: Steps that are simulated while a plan is searched for, in so many runs at most: small
#: problems are soon known.
MOST_STEPS, MOST_RUNS = 2_400_000, 8_000
#: So many times through the whole step, where no plan fits.
MOST_IN_VAIN = 4000
#: The shares of them for coming down to the budget: from all places together, and where one has to
#: go on.
DESCENT, FURTHER = 0.3, 0.2
#: A plan this close to the lower bound is optimal: sums of times differ in their last bits.
EQUAL = 1e-9
#: In graphs of more ops, plans of chains come first; those of at most this many times the least
#: extra time are good.
DEEP, GOOD = 20_000, 3.0
#: How boldly the descents go: with few large steps, and with many small ones.
BOLD = (8, 0)
#: In problems of so many events, descents that have not come to the budget go on for so many runs;
#: if there is a limit on time, for more, and the best is improved, so many runs at a time, until
#: this share of the time is left for other attempts.
MANY_EVENTS, LONG_DESCENT, LONGEST_DESCENT, SLICE, LEFT = 800, 6000, 40_000, 2000, 0.4
#: So many of the places come to are improved, with this part of the steps each, before the best is
#: gone on with.
IMPROVED, SHARE = 3, 10
#: Bounds do not see all the room that recomputing takes: searches also begin at what those of this
#: share of the budget say; in large problems that are not solved well yet at those of several, from
#: larger programs.
LESS, LESS_FOR_LONG = 0.88, (0.94, 0.88)
#: Corrections of the coarse budget, and the slack that is left alone.
CORRECTIONS, SLACK = 4, 0.005

#: CP-SAT is asked in problems of at most so many recipes, if that share of a step may be gained,
#: and with so much effort, or for so many seconds at most where time is limited.
MOST_RECIPES, WORTH, EFFORT, IMPROVING = 150, 0.02, 1.0, 30.0


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """The fastest plan found within ``limits.budget``; the least memory if there is no budget."""
    if limits.budget is None:
        return least_memory.plan(graph, limits)
    plain = untouched(graph, limits)
    return plain if plain.optimal else _Planning(graph, limits).plan()


def improved(graph: TrainingGraph, limits: Limits, found: Proposal) -> Proposal | None:
    """What constraint programming makes of a plan, within seconds; ``None`` without OR-Tools, and
    where it would hardly pay.

    It may pay where few recipes decide, and the plan takes so much longer than the lower bound that
    a part of it is worth the wait.
    """
    may_gain = found.extra_seconds - found.lower_bound
    if (
        not constraint_program.is_installed()
        or found.peak > int(limits.budget or 0)
        or may_gain < WORTH * graph.total_seconds
    ):
        return None
    coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
    if len(coarse.problem.inputs) > MOST_RECIPES:
        return None
    seconds = None if limits.seconds is None else min(limits.seconds, IMPROVING)
    return prove(graph, limits, found, effort=EFFORT, seconds=seconds, rounds=1, nearby=True)


class _Stopped(Exception):
    """The time to plan is over, or somebody wants no more."""


class _Planning:
    """One call of `plan`: what is known so far."""

    def __init__(self, graph: TrainingGraph, limits: Limits) -> None:
        self.graph, self.limits = graph, limits
        self.budget = int(limits.budget or 0)
        self.found: Proposal | None = None
        self.ends = None if limits.seconds is None else time.monotonic() + limits.seconds
        self.bound_within = bound_within(
            graph, self.budget, accumulate=limits.accumulate, seconds=limits.seconds
        )
        self.bound = self.bound_within.seconds
        self.searches: list[Search] = []
        self.ticks = 0

    @cached_property
    def coarse(self) -> Coarse:
        """The graph as a retention problem."""
        return self.graph.derived(coarsen, frozenset(self.limits.keep), self.limits.accumulate)

    @cached_property
    def most_runs(self) -> int:
        """What all searches together may cost."""
        runs = min(MOST_STEPS // max(1, len(self.coarse.problem.reads)), MOST_RUNS)
        if self.bound == float("inf"):
            # Nothing fits: only how low one can come is to be found.
            runs = min(runs // 4, MOST_IN_VAIN)
        return max(60, runs)

    def plan(self) -> Proposal:
        complete, deep = True, self.graph.length > DEEP
        try:
            chain_first = deep or self._is_long
            if chain_first:
                self._follow_chain()
            if not (deep and self._good()):
                self._search()
            if not chain_first and not self._good():
                self._follow_chain()
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
            optimal=self.found.peak <= self.budget
            and self.found.extra_seconds <= self.bound * (1 + EQUAL),
            complete=complete,
        )

    def _follow_chain(self) -> None:
        left = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        trial = chain.plan(self.graph, replace(self.limits, seconds=left))
        self._note(trial)
        if not trial.complete:
            raise _Stopped

    def _fits(self) -> bool:
        return self.found is not None and self.found.peak <= self.budget

    def _good(self) -> bool:
        found = self.found
        return found is not None and self._fits() and found.extra_seconds <= GOOD * self.bound

    def _search(self) -> None:
        starts = list(self._starts())
        budget = self.budget
        found: list[tuple[list[int], Run]] = []
        each = max(20, int(self.most_runs * DESCENT) // (len(starts) * len(BOLD) + 1))
        for decisions, bold in itertools.product(starts, BOLD):
            search = self._new_search(budget)
            came_to = search.descend(decisions, each, bold=bold)
            came_to = search.keep_again(*came_to, range(len(decisions)))
            if came_to[1].peak <= budget and all(came_to[0] != other for other, _ in found):
                self._note(self._proposal(came_to[0]))
            found.append(came_to)
        if self._is_long and not self._good():
            found += self._from_less(each)
        found += self._gone_on(found, budget)
        found.sort(key=lambda came_to: came_to[1].worth(budget))
        improved = [
            self._new_search(budget).improve(
                decisions, result, self.most_runs // SHARE, self.bound * (1 + EQUAL)
            )
            for decisions, result in found[:IMPROVED]
        ]
        best = min(improved, key=lambda came_to: came_to[1].worth(budget))
        for correction in range(CORRECTIONS):
            search = self._new_search(budget)
            decisions, result = search.descend(best[0], each)
            decisions, result = search.improve(
                decisions,
                result,
                (self.most_runs - self.runs) // (2 if correction < 2 else 4),
                self.bound * (1 + EQUAL),
            )
            trial = self._proposal(decisions)
            self._note(trial)
            best = decisions, result
            off = trial.peak - result.peak
            wanted = self.budget - off
            if trial.peak <= self.budget and abs(wanted - budget) <= SLACK * self.budget:
                break
            budget = max(0, min(wanted, budget - 1) if trial.peak > self.budget else wanted)
        if self._is_long:
            self._improve_for_long(*best, budget)

    @property
    def _is_long(self) -> bool:
        return len(self.coarse.problem.reads) >= MANY_EVENTS

    def _from_less(self, runs: int) -> Iterator[tuple[list[int], Run]]:
        """Where descents come to from what the bounds of smaller budgets say."""
        for share in LESS_FOR_LONG:
            bound = self._bound_of(share, THOROUGH)
            for decisions in as_the_bound_says(self.coarse, bound):
                search = self._new_search(self.budget)
                came_to = search.descend(decisions, runs)
                came_to = search.keep_again(*came_to, range(len(decisions)))
                if came_to[1].peak <= self.budget:
                    self._note(self._proposal(came_to[0]))
                yield came_to

    def _bound_of(self, share: float, depth: Depth) -> Bound:
        """The bound of a share of the budget."""
        self._tick()
        left = None if self.ends is None else self.ends - time.monotonic()
        return bound_within(
            self.graph,
            int(share * self.budget),
            accumulate=self.limits.accumulate,
            depth=depth,
            seconds=left,
        )

    def _gone_on(
        self, found: list[tuple[list[int], Run]], budget: int
    ) -> Iterator[tuple[list[int], Run]]:
        """Where two descents come to that had not come to the budget: the one that was closest, and
        the one that had lost least time."""
        over = [came_to for came_to in found if came_to[1].peak > budget]
        if not over or self.bound == float("inf"):
            return
        closest = min(over, key=lambda came_to: came_to[1].worth(budget))
        fastest = min(over, key=lambda came_to: came_to[1].extra_seconds)
        most = int(self.most_runs * FURTHER)
        if self._is_long and not self._good():
            most = LONG_DESCENT if self.limits.seconds is None else LONGEST_DESCENT
        for decisions, _ in [closest] if closest is fastest else [closest, fastest]:
            yield self._new_search(budget).descend(decisions, most // 2)

    def _improve_for_long(self, decisions: list[int], result: Run, budget: int) -> None:
        """In a large graph, improve as long as there is time, if somebody said how much."""
        if self.limits.seconds is None or self.ends is None:
            return
        took, ends = 0.0, self.ends - LEFT * self.limits.seconds
        while time.monotonic() + 1.5 * took < ends:
            began = time.monotonic()
            search = self._new_search(budget, seed=len(self.searches))
            decisions, result = search.improve(decisions, result, SLICE, self.bound * (1 + EQUAL))
            self._note(self._proposal(decisions))
            took = time.monotonic() - began
            if search.runs < SLICE:
                return

    def _starts(self) -> Iterator[list[int]]:
        """Decisions to begin with."""
        yield self.coarse.problem.plain()
        yield from as_the_bound_says(self.coarse, self.bound_within)
        yield from as_the_bound_says(self.coarse, self._bound_of(LESS, SHALLOW))
        yield from fitting_cuts(self.graph, self.limits, self.budget)

    def _proposal(self, decisions: list[int]) -> Proposal:
        return proposed(self.graph, self.limits, self.coarse.schedule(decisions))

    def _note(self, trial: Proposal) -> None:
        """Remember the best: within the budget the fastest, else the lowest."""
        if self.found is None or self._rank(trial) < self._rank(self.found):
            self.found = trial

    def _rank(self, trial: Proposal) -> tuple[float, float, float]:
        over = max(0, trial.peak - self.budget)
        return (over, trial.extra_seconds, trial.peak)

    @property
    def runs(self) -> int:
        """What the searches have cost so far."""
        return sum(search.runs for search in self.searches)

    def _new_search(self, budget: int, seed: int = 0) -> Search:
        self.searches.append(Search(self.coarse.problem, budget, tick=self._tick, seed=seed))
        return self.searches[-1]

    def _tick(self) -> None:
        self.ticks += 1
        if self.ends is not None and time.monotonic() > self.ends:
            raise _Stopped
        if self.limits.progress is not None and self.ticks % 32 == 1:
            self.limits.progress(min(self.runs / self.most_runs, 0.99), "searching")
