"""Plans that kept a budget in earlier traces of the same step.

TensorFlow traces a step again for another batch size, for a smaller last batch, or if a model is
compiled again. The new graph has the ops and the edges of the old one, and other sizes. A schedule
names ops by their positions, so it is valid in both graphs; as with every plan, gradients are equal
to the bit. The plan of the earlier trace is therefore tried first
(:mod:`memsaving_gradients.engine.driver`). Whether it keeps the budget is simulated anew.

Each process remembers a few plans, newest first, and none of their graphs. Not remembered are plans
that planning with a limit on seconds, or an interruption, cut short; plans that store residuals,
whose bytes and seconds are those of one trace; and plans that replay loops, as another batch may
need fewer replays or none.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from memsaving_gradients.capture.fingerprint import fingerprint
from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.planning.saved_plans import by_saved_plan
from memsaving_gradients.engine.planning.within_limits import unknown_to
from memsaving_gradients.engine.site.request import Request, request_of
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.planners.bounds.integer import bound_within
from memsaving_gradients.reports.plan import Plan

__all__ = ["EarlierPlan", "earlier_plan", "forget", "remember", "scaled"]

#: The most plans that are remembered. Chosen by judgement: a step has few batch sizes.
MOST_PLANS = 8


@dataclass(frozen=True, eq=False)
class EarlierPlan:
    """A plan that kept its budget in an earlier trace.

    Attributes
    ----------
    request
        The user's request.
    size
        The number of ops of the step, and of its forward ops.
    plan
        The plan, without its simulations; its fingerprint has no sizes.
    used
        The share of the budget that the step needed.
    """

    request: Request
    size: tuple[int, int]
    plan: Plan
    used: float

    def is_for(self, request: Request, size: tuple[int, int]) -> bool:
        """Return whether the plan answers a request at a step of this size."""
        return (self.request, self.size) == (request, size)


#: The plans, newest first. Strategies of ``tf.distribute`` trace in threads of their own.
_plans: list[EarlierPlan] = []
_lock = threading.Lock()


def forget() -> None:
    """Forget all plans."""
    _plans.clear()


def remember(site: Site, outcome: Outcome) -> None:
    """Remember the plan that a site follows, if it keeps a budget that the site has for itself."""
    plan, budget = outcome.plan, outcome.plan.budget
    if outcome.plain or outcome.stopped or budget is None or not plan.complete:
        return
    if outcome.proposal.schedule.stored or plan.loops or (request := _request(site)) is None:
        return
    plan = replace(
        plan,
        decisions=(),
        replayed=(),
        simulation=None,
        simulation_plain=None,
        fingerprint=fingerprint(outcome.step, sized=False),
        file="an earlier trace",
    )
    found = EarlierPlan(request, _size(site), plan, outcome.need / budget)
    with _lock:
        others = [one for one in _plans if not one.is_for(request, found.size)]
        _plans[:] = [found, *others][:MOST_PLANS]


def earlier_plan(site: Site) -> EarlierPlan | None:
    """Return the plan that kept the budget in the last trace of the step; ``None``: there is
    none."""
    if not _plans or (request := _request(site)) is None:
        return None
    size = _size(site)
    with _lock:
        return next((one for one in _plans if one.is_for(request, size)), None)


def scaled(site: Site, earlier: EarlierPlan, budget: int) -> Outcome:
    """Return the outcome of the earlier plan at a site, within a budget in bytes.

    Raises
    ------
    PlanError
        If the graph is another one.
    """
    plan, asked = earlier.plan, earlier.plan.planned_for
    if asked is not None and plan.budget is not None:
        asked = int(asked * budget / plan.budget)
    plan = replace(plan, budget=budget, planned_for=asked, lower_bound=0.0, optimal=False)
    outcome = by_saved_plan(site, [plan], sized=False)
    graph = outcome.step.graph
    accumulate = site.options.accumulate
    bound = bound_within(graph, outcome.proposal.peak, accumulate=accumulate, deep=False)
    share = bound.seconds / site.original()[0].graph.total_seconds
    bounded = replace(outcome.plan, lower_bound=min(share, outcome.plan.extra_time))
    return replace(outcome, plan=bounded)


def _request(site: Site) -> Request | None:
    """Return the request at a site, if it has a budget for itself that TensorFlow's executor has to
    keep."""
    alone = site.whole is None or site.covers_step
    if site.call.mode != "budget" or site.xla or not alone or callable(site.options.planner):
        return None
    if not isinstance(site.options.limit, float) and unknown_to(site) is not None:
        # A budget in bytes is refused on a guess.
        return None
    request = request_of(site, site.original()[0])
    return replace(request, options=replace(request.options, progress=None))


def _size(site: Site) -> tuple[int, int]:
    graph = site.original()[0].graph
    return graph.length, graph.first_backward
