"""From plan to plan, until one keeps its budget as it runs.

How the executor runs a step is known when the step is rewritten. Where that breaks the promise, the
rewrite is taken back, and a plan is made for less; at last the plan of least memory. The same once
more for the step as a whole, when the function is traced to its end
(:mod:`~memsaving_gradients.engine.whole_step`). Into which holes between chunks buffers fall is
chance: a plan with which not each of the steps that were simulated keeps the budget, but they do on
average, is followed where none is found that is better. An attempt costs a plan, a rewrite and the
simulations of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.errors import GraphError
from memsaving_gradients.budget import chunk_bytes, safe_bytes, too_small, worst_bytes
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.engine.planning import (
    LIMITED,
    Outcome,
    by_limits,
    by_mode,
    by_saved_plan,
    first_share,
    nothing_else,
    search_of,
    warn_nothing_saved,
)
from memsaving_gradients.engine.replicas import Shared
from memsaving_gradients.engine.site import Site
from memsaving_gradients.errors import BudgetError, PlanError
from memsaving_gradients.planners.budget_search import MANY_OPS
from memsaving_gradients.planners.progress import showing
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.rewriting.clones import Rewrite, rewrite
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.transforms.loops.selection import WAYS

__all__ = ["Followed", "Following"]

#: Plans that are rewritten and simulated until one keeps the budget, and the most that the next one
#: gets of what this one had.
MOST_ATTEMPTS, MOST_SHARE = 8, 0.97
#: Where an attempt takes seconds (`MANY_OPS`), there are fewer.
FEW_ATTEMPTS = 5
#: Plans for less that are tried to leave room for the rest of a step, before the one of least
#: memory.
WHOLE_ATTEMPTS = 3
#: Plans that are tried after one that keeps the budget with some luck.
LUCKY_ATTEMPTS = 1


@dataclass(frozen=True, eq=False)
class Followed:
    """A plan that a graph follows.

    Attributes
    ----------
    outcome
        The plan, described by what the executor will make of it.
    result
        The rewrite; ``None``: gradients are plain.
    planned
        The bytes of a budget that it was thought to need before it was rewritten.
    """

    outcome: Outcome
    result: Rewrite | None
    planned: int

    def keeps(self, need: int) -> bool:
        """Whether ``need`` is within the budget."""
        budget = self.outcome.plan.budget
        return budget is None or need <= budget


#: Modes in which nobody but a planner says what is recomputed, and nobody allows for a number of
#: bytes.
SAVING = ("memory", "speed", "slowdown", "planner")

#: What the executor makes of a step that follows a plan.
Simulate = Callable[[Followed], Simulation]


class Following:
    """One gradient computation on its way from plan to plan.

    Attributes
    ----------
    site
        The gradient computation.
    mode
        What a plan will be called, see `memsaving_gradients.engine.rewire.save_memory`.
    shared
        The plan that other replicas of the same step follow, which is followed here as well if it
        fits; ``None``: there are no replicas.
    loops_alone
        After `least`: for each way to replay loops, the bytes of a budget that a step needs and its
        time (seconds) if nothing else is done.
    """

    def __init__(self, site: Site, mode: str, shared: Shared | None = None) -> None:
        self.site, self.mode, self.shared = site, mode, shared
        self.loops_alone: list[tuple[int, float]] = []
        self._theirs: Plan | None = None
        self._large = len(site.operations) > MANY_OPS
        self._updates: Mapping[str, Sequence[tf.Operation]] | None = None
        self._start()

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

    def _by_itself(self) -> Followed | None:
        found = self._follow()
        if self.shared is not None and found is not None:
            self.shared.plan = found.outcome.plan
        return found

    def _as_others(self, plan: Plan) -> Followed:
        """What follows the plan of other replicas."""
        self._theirs = plan
        outcome = by_saved_plan(self.site, [plan])
        return Followed(outcome, None, outcome.need) if outcome.plain else self._rewritten(outcome)

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
            if found.result is not None:
                self._take_back(found)
        self._theirs = None
        self.site.treat_loops(None)
        return None

    def _follow(self) -> Followed | None:
        try:
            ways = self._ways()
            if ways != [None]:
                self.site.original()
        except GraphError:
            # The graph cannot be rewritten, which the first who looks at it says.
            ways = [None]
        if ways == [None]:
            return self._treated()
        refused: list[BudgetError] = []
        for number, way in enumerate(ways):
            self._treat(way)
            try:
                found = self._treated()
            except BudgetError as error:
                refused.append(error)
                if self.site.stopped == "interrupted":
                    break
                continue
            return self._cheaper(found, ways[number:])
        raise min(refused, key=lambda error: error.least)

    def _ways(self) -> list[str | None]:
        """The ways to treat loops that are tried, in order."""
        loops, asked = self.site.loops, self.site.options.loops
        if self.mode == "saved":
            return [None]
        if asked != "auto":
            return [*loops.ways([asked])] or [None]
        if self.mode == "budget":
            return [*loops.ways(WAYS)] or [None]
        if self.mode == "slowdown":
            return [self._least_in_time()]
        replays = self.mode in ("memory", "planner") or not (self.mode != "named" or self.site.kept)
        return [*loops.ways(["segments" if replays else "keep"])] or [None]

    def _least_in_time(self) -> str | None:
        """The way that saves most of those that take no more time than was allowed."""
        site = self.site
        ways = site.loops.ways(WAYS)
        if len(ways) < 2 or site.options.max_slowdown is None:
            return ways[0] if ways else None
        allowed = site.options.max_slowdown * site.original()[0].graph.total_seconds
        for way in reversed(ways):
            self._treat(way)
            if site.capture().graph.total_seconds <= allowed:
                return way
        return ways[0]

    def _treat(self, way: str | None) -> None:
        self.site.treat_loops(way)
        self._start()

    def _cheaper(self, found: Followed | None, ways: Sequence[str | None]) -> Followed | None:
        """``found``, of the first of ``ways``, or what the next way comes to, if that takes less
        time."""
        if found is None or found.result is None or len(ways) < 2 or self.mode != "budget":
            return found
        extra, way = found.outcome.plan.extra_time, ways[0]
        self._take_back(found)
        self._treat(ways[1])
        seconds = self.site.original()[0].graph.total_seconds
        other: Followed | None = None
        if self.site.capture().graph.total_seconds / max(seconds, 1e-12) - 1 < extra:
            try:
                other = self._treated()
            except BudgetError:
                other = None
        if other is not None and other.outcome.plan.extra_time < extra:
            return other
        if other is not None and other.result is not None:
            self._take_back(other)
        self._treat(way)
        return self._treated()

    def _treated(self) -> Followed | None:
        """As `follow`, with loops treated as they are now."""
        try:
            return self._kept()
        except BudgetError as error:
            if not self._has_other():
                raise
            self._switch()
            try:
                return self._kept()
            except BudgetError as another:
                raise min((error, another), key=lambda refused: refused.least) from None

    def _has_other(self) -> bool:
        """Whether plans may be looked for with masks packed if they are not, or unpacked."""
        sought = self.site.sought
        return sought is not None and sought.other is not None and not self.site.stopped

    def _switch(self) -> None:
        """Look for such plans from now on, or for those from before again."""
        site, sought = self.site, self.site.sought
        assert sought is not None and sought.other is not None
        site.switch_packing(not site.packed.tensors)
        other = sought.other
        search = other.search or search_of(site, other.step, other.before)
        site.sought = replace(other, search=search, other=replace(sought, other=None))
        self._start()

    def _start(self) -> None:
        self._share = first_share(self.site)
        self._below: int | None = None
        self._broke = 0
        self._by_luck = False

    def _kept(self) -> Followed | None:
        """A plan with which the gradients keep the budget, of those for masks packed or unpacked as
        they are now."""
        most = FEW_ATTEMPTS if self._large else MOST_ATTEMPTS
        found, ended = self._search(most if self.mode == "budget" else 1, _alone)
        if ended:
            return self._if_it_saves(found)
        found = self._next(0.0)
        goal = self.site.goal
        if found is None or goal is None or found.outcome.need <= goal.budget:
            return found
        self._take_back(found)
        raise too_small(goal, min(found.outcome.need, goal.plain_need), self.site.stopped)

    def _if_it_saves(self, found: Followed | None) -> Followed | None:
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
        self._take_back(found)
        if site.is_other:
            alone = nothing_else(site, plan.mode, plan.planner)
            if alone.plan.allocated < most or (site.attention and site.attention.names):
                return Followed(alone, None, alone.need)
        warn_nothing_saved(site.graph, f"a plan was found that takes less in order, but {figures}")
        return None

    def least(self) -> Outcome | None:
        """The plan of least memory, as an error about a budget would name it; the graph is left as
        it was. ``None``: none saves anything."""
        least: Outcome | None = None
        sought = self.site.sought
        try:
            with uncollected(), showing(self.site.options.progress) as self.site.progress:
                self.site.original()
                ways: list[str | None] = [*self.site.loops.ways(WAYS)] or [None]
                for way in ways:
                    self._treat(way)
                    self._note_loops_alone()
                    found = self._next(0.0)
                    if found is not None and found.result is not None:
                        self._take_back(found)
                    if least is None or (found is not None and found.outcome.need < least.need):
                        least = None if found is None else found.outcome
                        sought = self.site.sought
        finally:
            self.site.abandon()
            # Of what was looked for plans with, for whoever looks on.
            self.site.sought = sought
        return least

    def _note_loops_alone(self) -> None:
        site = self.site
        if site.loops.replayed:
            step = site.capture()
            need = safe_bytes(site.simulate_plain(step), site.gating)
            self.loops_alone.append((need, step.graph.total_seconds))

    def worst(self, found: Followed, simulate: Simulate) -> int:
        """The bytes of a budget that a step needs in the worst of the steps that were simulated, as
        long as there may be a plan that is better there.

        In large graphs there are buffers enough to even chance out.
        """
        if self.mode != "budget" or self._large or self._by_luck:
            return self._need(found, simulate)
        return worst_bytes(simulate(found), self.site.gating)

    def lower(
        self, found: Followed, simulate: Simulate, updates: Mapping[str, Sequence[tf.Operation]]
    ) -> Followed:
        """Follow a plan with which what is simulated keeps the budget, in the place of ``found``,
        with which it does not.

        The first is ``found`` itself, with a place in the order for ``updates``: by name of a
        gradient's op, the ops that end what is done with the gradient. Where no plan keeps the
        budget, it is the last one as well.
        """
        result, goal, sought = found.result, self.site.goal, self.site.sought
        if result is None or result.readers_of:
            return found
        with uncollected(), showing(self.site.options.progress) as self.site.progress:
            self._take_back(found)
            self._updates = updates
            lower = self._again(found)
            if self._theirs is not None:
                if not lower.keeps(self._need(lower, simulate)):
                    self._take_back(lower)
                    plan = self._new_plan_of_others()
                    lower = (
                        self._as_others(plan) if plan else self._lower_than_others(found, simulate)
                    )
            elif not lower.keeps(self.worst(lower, simulate)) and goal and sought and sought.search:
                self._share = min(1.0, found.planned / goal.budget)
                lucky = found if lower.keeps(self._need(lower, simulate)) else None
                self._give_up(lower, simulate, 0)
                lower = self._lower(simulate, lucky) or self._again(found)
                if self.shared is not None:
                    self.shared.plan = lower.outcome.plan
        assert lower.result is not None
        original_view.remember(self.site.graph, lower.result.rewiring)
        return lower

    def _lower_than_others(self, found: Followed, simulate: Simulate) -> Followed:
        """A plan of its own, where what the other replicas follow breaks the budget here alone;
        ``found`` once more if there is none."""
        theirs, self._theirs = self._theirs, None
        lower = self._lower(simulate, None)
        if lower is not None:
            return lower
        self._theirs = theirs
        return self._again(found)

    def _new_plan_of_others(self) -> Plan | None:
        """The plan that other replicas follow by now in the place of the one that is followed
        here."""
        plan = None if self.shared is None else self.shared.plan
        return None if plan is self._theirs else plan

    def _again(self, found: Followed) -> Followed:
        """The graph made to follow a plan once more."""
        return replace(found, result=self._rewritten(found.outcome).result)

    def _lower(self, simulate: Simulate, lucky: Followed | None) -> Followed | None:
        try:
            lower, ended = self._search(WHOLE_ATTEMPTS, simulate, lucky)
            if ended:
                return lower
            lower = self._next(0.0)
        except BudgetError:
            # Interrupted: there will be no other plan.
            return None
        if lower is not None and not lower.keeps(self._need(lower, simulate)):
            self._take_back(lower)
            return None
        return lower

    def _search(
        self, attempts: int, simulate: Simulate, lucky: Followed | None = None
    ) -> tuple[Followed | None, bool]:
        """A plan that keeps the budget; and whether the search is over, with this one, with plain
        gradients or with nothing.

        ``lucky``: one that keeps it with some luck, which was taken back.
        """
        attempt = 0
        last = attempts if lucky is None else LUCKY_ATTEMPTS
        while attempt < last:
            try:
                found = self._next(self._share, self._below)
            except BudgetError as error:
                if lucky is not None:
                    break
                if self.site.stopped == "interrupted":
                    # Plans that broke the budget as they ran are no smaller than it.
                    raise self._no_smaller(error) from None
                if self._share < 1.0 and not attempt and simulate is _alone:
                    # There may be no plan that leaves room for what the executor adds, but one to
                    # which it adds nothing.
                    self._share = 1.0
                    attempt += 1
                    continue
                return None, False
            if found is None or found.result is None or found.keeps(self.worst(found, simulate)):
                return found, True
            if self.mode == "saved":
                self._take_back(found)
                raise _no_longer_kept(found.outcome)
            if lucky is None and found.keeps(self._need(found, simulate)):
                lucky, last = found, min(attempts, attempt + 1 + LUCKY_ATTEMPTS)
            self._give_up(found, simulate, attempt)
            attempt += 1
        if lucky is None:
            return None, False
        self._by_luck = True
        return self._again(lucky), True

    def _give_up(self, found: Followed, simulate: Simulate, attempt: int) -> None:
        """Take a plan back, and ask for less from now on."""
        need = self.worst(found, simulate)
        self._take_back(found)
        self._broke = min(self._broke or need, need)
        # What the executor adds to one plan it adds to the next, about. Holes between chunks need
        # not shrink with the plan, and what the rest of a step takes grows: each step down is a
        # larger one.
        alone = simulate is _alone
        share = min(found.planned / need, self._share * (MOST_SHARE if alone else 1.0))
        self._share = share * MOST_SHARE ** (attempt if alone else attempt + 1)
        # Holes are chance, and the next plan may have fewer; what the rest of a step takes is not.
        self._below = found.planned if alone and not self._large else None

    def _need(self, found: Followed, simulate: Simulate) -> int:
        """The same on average, and with what is left to chance."""
        return safe_bytes(simulate(found), self.site.gating)

    def _next(self, share: float, below: int | None = None) -> Followed | None:
        """Plan and rewrite."""
        if self.mode == "saved":
            outcome: Outcome | None = by_saved_plan(self.site)
        elif self.mode in LIMITED:
            outcome = by_limits(self.site, self.mode, share, below)
        else:
            outcome = by_mode(self.site, self.mode)
        if outcome is None:
            return None
        return Followed(outcome, None, outcome.need) if outcome.plain else self._rewritten(outcome)

    def _rewritten(self, outcome: Outcome) -> Followed:
        """The graph made to follow a plan, and the plan described by what the executor will make of
        it, if the gradients are alone."""
        proposal, gates = outcome.proposal, self.site.data_gates
        planned = outcome.need
        result = rewrite(
            outcome.step,
            proposal.schedule,
            proposal.simulation,
            data_gates=gates,
            updates=self._updates or {},
            host=self.site.host,
        )
        if not gates and self._updates is None:
            outcome = outcome.as_it_runs(
                self.site.simulate_rewritten(result, proposal.extra_seconds)
            )
        return Followed(outcome, result, planned)

    def _take_back(self, found: Followed) -> None:
        assert found.result is not None
        self.site.take_back(found.result)

    def _no_smaller(self, error: BudgetError) -> BudgetError:
        """``error``, but naming no budget below the least that a plan needed as it ran (0: none did
        run)."""
        goal = self.site.goal
        if goal is None or error.least >= self._broke:
            return error
        return too_small(goal, min(self._broke, goal.plain_need), self.site.stopped)


def _alone(found: Followed) -> Simulation:
    """What the gradients come to by themselves."""
    simulation = found.outcome.plan.simulation
    assert simulation is not None
    return simulation


def _no_longer_kept(outcome: Outcome) -> PlanError:
    given = outcome.given or outcome.plan
    return PlanError(
        "plan",
        given.file or given,
        f"would need {outcome.need:,} bytes here, more than its budget of {given.budget:,}:"
        " hold_gradients, xla or the device are others than it was made for; plan anew with"
        " budget=",
    )
