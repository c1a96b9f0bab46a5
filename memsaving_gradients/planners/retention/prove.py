"""A plan that is known, improved or proven by constraint programming on the retention problem.

What was found is handed to CP-SAT
(:mod:`~memsaving_gradients.planners.retention.constraint_program`), which finds better executions
or proves that there are none, beside the lower bound of
:mod:`~memsaving_gradients.planners.bounds.integer`, which is the stronger one on long graphs.
Moccasin (Bartan et al. 2023, arXiv 2304.14463) brought constraint programming to this; that three
copies of a value are needed and four change nothing was found on its instances, and here every
recipe that could pay more often is given more.

What is proven is proven of the retention problem, in which ops are joined and nothing is written in
place, and of schedules that between two ops run others again in the order of their originals. In
small graphs, where that order may be gone through several times and the problem is the graph
itself, a plan is marked optimal; in others only if it comes to the bound. All schedules run the
originals in the order of the graph, and begin to recompute when the backward pass begins. The same
plan in every process, unless there is a limit on seconds.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from graph_tools.warn import warn
from memsaving_gradients.errors import PlanNote, SolverError
from memsaving_gradients.planners.bounds.integer import tightest_bound
from memsaving_gradients.planners.proposal import SLACK, Interrupted, Limits, Proposal, proposed
from memsaving_gradients.planners.retention import constraint_program
from memsaving_gradients.planners.retention.coarsen import CORRECTIONS, Coarse, coarsen
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["FEW", "prove"]

#: Times that the order of the originals may be gone through between two ops, in problems of at most
#: `FEW` recipes.
ROUNDS_OF_FEW, FEW = 4, 24
#: Copies of each value that are considered at first; of all values together when more of some could
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
    """The fastest plan within ``limits.budget`` that CP-SAT comes to from ``found``, and what is
    proven of it.

    Each time that it is asked it may make so much ``effort``, in its own measure (a unit takes some
    seconds), or, if they are given, all together may take so many ``seconds``. It is asked at most
    `CORRECTIONS` times: for more copies, or with another budget, where bytes on the graph are
    others than those of the problem.
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
        self.ends = None if seconds is None else time.monotonic() + seconds
        self.coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
        self.few = len(self.coarse.problem.inputs) <= FEW
        self.bound = 0.0
        self.proven = False

    def plan(self) -> Proposal:
        complete = True
        try:
            self.bound = self.found.lower_bound or self._tightest_bound()
            # Whoever interrupted the first plan wants no other one.
            if (
                self.bound < math.inf
                and not self._is_close()
                and (self.found.complete or self.ends)
            ):
                self._solve()
        except SolverError as error:
            if not self._fits():
                raise
            warn(
                f"a plan could not be improved, and is used as it is: {error}; reinstall it, or"
                " give planner='chain', if this happens again",
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
        seconds = None if self.ends is None else max(0.01, self.ends - time.monotonic())
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
        """For each recipe, so many copies that with more of them a plan would take longer than
        ``extra`` seconds; at most as many."""
        problem = self.coarse.problem
        events = len(problem.reads) - problem.border
        most = events if most is None else min(most, events)
        return [
            most if extra >= most * seconds else int(extra / seconds) for seconds in problem.seconds
        ]

    def _note(self, trial: Proposal) -> None:
        """Remember the better one: within the budget the faster, else the lower."""

        def rank(proposal: Proposal) -> tuple[float, float]:
            return max(0, proposal.peak - self.budget), proposal.extra_seconds

        if rank(trial) < rank(self.found):
            self.found = trial

    def _tick(self) -> None:
        if self.limits.progress is not None:
            self.limits.progress(0.99, "proving")
