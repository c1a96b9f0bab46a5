"""Improve a known plan, or prove it optimal, by constraint programming on the retention problem.

CP-SAT (:mod:`~memsaving_gradients.planners.retention.constraint_program`) starts with the known
plan, and finds better executions or proves that none exist. The lower bound of
:mod:`~memsaving_gradients.planners.bounds.integer` is used, too; it is stronger on long graphs.
Moccasin (Bartan et al. 2023, arXiv 2304.14463) introduced constraint programming for this problem.
On its instances, three copies of a value are needed and four change nothing. Here every recipe for
which more copies could pay may have more.

A proof is about the retention problem, which joins ops and writes nothing in place. It covers the
schedules that, between two ops, run others again in the order of their originals. In small graphs,
several passes through this order are allowed; where the problem is the graph itself, a proven plan
is marked optimal. Other plans are marked optimal only if they reach the lower bound. All schedules
run the originals in the order of the graph, and recompute only in the backward pass. The plan is
the same in every process, unless there is a limit on seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from graph_tools.warn import warn
from memsaving_gradients.errors import PlanNote, SolverError
from memsaving_gradients.planners.bounds.integer import tightest_bound
from memsaving_gradients.planners.proposal import (
    SLACK,
    Deadline,
    Interrupted,
    Limits,
    Proposal,
    proposed,
)
from memsaving_gradients.planners.retention import constraint_program
from memsaving_gradients.planners.retention.coarsen import CORRECTIONS, Coarse, coarsen
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["FEW", "prove"]

#: Passes through the order of the originals that are allowed between two ops, in problems of at
#: most `FEW` recipes.
ROUNDS_OF_FEW, FEW = 4, 24
#: Copies for each recipe at first; and copies of all recipes together, when more of some could
#: pay.
COPIES, MOST_COPIES = 3, 2_000
#: Fact: a plan this close to the lower bound is optimal, as CP-SAT counts in integers.
EQUAL = 1e-7


def prove(
    graph: TrainingGraph,
    limits: Limits,
    found: Proposal,
    *,
    effort: float,
    seconds: float | None = None,
) -> Proposal:
    """Return the fastest plan within ``limits.budget`` that CP-SAT finds from ``found``, with the
    bound that is proven.

    Each call of CP-SAT may take ``effort``, in its own measure (a unit takes some seconds); if
    ``seconds`` are given, all calls together may take these instead. There are at most
    `CORRECTIONS` calls: for more copies, or with another budget, where the bytes on the graph
    differ from the problem's.
    """
    return _Proving(graph, limits, found, effort, seconds).plan()


class _Proving:
    """One call of `prove`: the best plan and the best bound so far."""

    def __init__(
        self,
        graph: TrainingGraph,
        limits: Limits,
        found: Proposal,
        effort: float,
        seconds: float | None,
    ) -> None:
        self.graph, self.limits, self.found, self.effort = graph, limits, found, effort
        self.budget = int(limits.budget or 0)
        self.deadline = Deadline.of(seconds)
        self.coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
        self.few = len(self.coarse.problem.inputs) <= FEW
        self.bound = 0.0
        self.proven = False

    def plan(self) -> Proposal:
        complete = True
        try:
            self.bound = self.found.lower_bound or self._tightest_bound()
            # A user who interrupted the first plan wants no other one.
            if (
                self.bound < math.inf
                and not self._is_close()
                and (self.found.complete or self.deadline.left is not None)
            ):
                self._solve()
        except SolverError as error:
            if not self._fits():
                raise
            warn(
                f"a plan could not be improved, and is used as it is: {error}; if this happens"
                " again, reinstall OR-Tools, or give planner='chain'",
                PlanNote,
            )
        except Interrupted:
            complete = False
        except KeyboardInterrupt:
            if not self._fits():
                raise
            complete = False
        if self.proven and self._fits():
            self.bound = self.found.extra_seconds
        return replace(
            self.found,
            lower_bound=self.bound,
            optimal=self._is_close(),
            complete=complete,
        )

    def _tightest_bound(self) -> float:
        return tightest_bound(self.graph, self.budget, accumulate=self.limits.accumulate)

    def _fits(self) -> bool:
        return self.found.peak <= self.budget

    def _is_close(self) -> bool:
        return self._fits() and self.found.extra_seconds <= self.bound * (1 + EQUAL)

    def _solve(self) -> None:
        budget, copies = self.budget, self._enough(math.inf, COPIES)
        for _ in range(CORRECTIONS):
            solution = self._asked(budget, copies)
            extra = math.inf
            if solution.executions is not None:
                schedule = self.coarse.follow(solution.executions)
                trial = proposed(self.graph, self.limits, schedule)
                self._note(trial)
                extra = trial.extra_seconds
            if solution.proven and (self.coarse.is_exact or extra == math.inf):
                # With more copies there may be a better plan.
                enough = self._enough(extra)
                if all(have >= want for have, want in zip(copies, enough, strict=True)):
                    self.proven = self.coarse.is_exact and self.few
                    return
                copies = [max(pair) for pair in zip(copies, enough, strict=True)]
                if sum(copies) > MOST_COPIES:
                    return
                continue
            off = 0 if extra == math.inf or self.coarse.is_exact else trial.peak - self.budget
            if abs(off) <= SLACK * self.budget:
                return
            budget -= off

    def _asked(self, budget: int, copies: list[int]) -> constraint_program.Solution:
        left = self.deadline.left
        seconds = None if left is None else max(0.01, left)
        return constraint_program.solve(
            self.coarse.problem,
            budget,
            copies=copies,
            rounds=ROUNDS_OF_FEW if self.few else 1,
            hint=self.coarse.executions(self.found.schedule),
            bound=self.bound if budget <= self.budget else 0.0,
            effort=self.effort if seconds is None else None,
            seconds=seconds,
            tick=self._tick,
        )

    def _enough(self, extra: float, most: int | None = None) -> list[int]:
        """Return, for each recipe, the number of copies above which a plan takes more than
        ``extra`` seconds, but at most ``most``."""
        problem = self.coarse.problem
        events = len(problem.reads) - problem.border
        most = events if most is None else min(most, events)
        return [
            most if extra >= most * seconds else int(extra / seconds) for seconds in problem.seconds
        ]

    def _note(self, trial: Proposal) -> None:
        """Remember the better plan: within the budget the faster one, else the lower one."""
        if trial.rank(self.budget)[:2] < self.found.rank(self.budget)[:2]:
            self.found = trial

    def _tick(self) -> None:
        if self.limits.progress is not None:
            self.limits.progress(0.99, "proving")
