"""The candidates: steps to plan for, with loops replayed in different ways, masks packed or not.

Replays keep the state of a loop at fewer steps, and take more time; packing takes time that
recomputation could use instead. The best choice depends on the budget. The graph follows a plan of
the first candidate that fits, unless the next candidate's plan takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from graph_tools.errors import GraphError
from memsaving_gradients.engine.driver.attempt import AppliedPlan, take_back
from memsaving_gradients.engine.driver.attempts import Attempts
from memsaving_gradients.engine.planning.within_limits import switch_packing
from memsaving_gradients.engine.site.search_state import SearchState
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.planners.meter import is_clearly_less
from memsaving_gradients.planners.proposal import SLACK, is_near
from memsaving_gradients.transforms.loops.selection import WAYS

__all__ = ["each_way", "first_candidate_that_fits", "treat"]


def first_candidate_that_fits(attempts: Attempts) -> AppliedPlan | None:
    """Follow a plan with which the gradients keep the budget; ``None``: nothing can be saved.

    Raises
    ------
    BudgetError
        If there is none; the error names the least budget of all candidates.
    """
    site = attempts.site
    try:
        ways = _ways(attempts)
        if ways != [None]:
            site.original()
    except GraphError:
        # The graph cannot be rewritten; the next caller that captures it warns of that.
        ways = [None]
    if ways == [None]:
        return _packed_or_not(attempts)
    refused: list[BudgetError] = []
    for number, way in enumerate(ways):
        treat(attempts, way)
        try:
            found = _packed_or_not(attempts)
        except BudgetError as error:
            refused.append(error)
            if site.stopped == "interrupted":
                break
            continue
        return _cheaper(attempts, found, ways[number:])
    raise min(refused, key=lambda error: error.least)


def each_way(attempts: Attempts) -> Iterator[str | None]:
    """Treat loops in one way after the other, and yield each way; ``None``: there are no loops to
    replay."""
    ways: list[str | None] = [*attempts.site.loops.ways(WAYS)]
    for way in ways or [None]:
        treat(attempts, way)
        yield way


def _ways(attempts: Attempts) -> list[str | None]:
    """Return the ways to treat loops that are tried, in order."""
    site, mode = attempts.site, attempts.mode
    loops, asked = site.loops, site.options.loops
    if mode == "saved":
        return [None]
    if asked != "auto":
        return [*loops.ways([asked])] or [None]
    if mode == "budget":
        return [*loops.ways(WAYS)] or [None]
    if mode == "slowdown":
        return [_least_in_time(site)]
    replays = mode in ("memory", "planner") or (mode == "named" and not site.call.kept)
    return [*loops.ways(["segments" if replays else "keep"])] or [None]


def _least_in_time(site: Site) -> str | None:
    """Return the way that saves most among those within the allowed time."""
    ways = site.loops.ways(WAYS)
    if len(ways) < 2 or site.options.max_slowdown is None:
        return ways[0] if ways else None
    allowed = site.options.max_slowdown * site.original()[0].graph.total_seconds
    for way in reversed(ways):
        site.treat_loops(way)
        if site.capture().graph.total_seconds <= allowed:
            return way
    return ways[0]


def treat(attempts: Attempts, way: str | None) -> None:
    """Replay loops in another way, and start again."""
    attempts.site.treat_loops(way)
    attempts.start()


def _cheaper(
    attempts: Attempts, found: AppliedPlan | None, ways: Sequence[str | None]
) -> AppliedPlan | None:
    """Follow ``found``, a plan for the first of ``ways``, or a plan for the next way if that takes
    less time."""
    if found is None or found.result is None or len(ways) < 2 or attempts.mode != "budget":
        return found
    site = attempts.site
    extra, way = found.outcome.plan.extra_time, ways[0]
    take_back(site, found)
    treat(attempts, ways[1])
    seconds = site.original()[0].graph.total_seconds
    if site.capture().graph.total_seconds / max(seconds, 1e-12) - 1 < extra:
        other = _faster(site, extra, lambda: _packed_or_not(attempts, extra))
        if other is not None:
            return other
    treat(attempts, way)
    return _packed_or_not(attempts)


def _faster(
    site: Site, extra: float, attempt: Callable[[], AppliedPlan | None]
) -> AppliedPlan | None:
    """Return the plan that ``attempt`` follows, if it takes less than ``extra`` time; else restore
    the graph and return ``None``."""
    try:
        found = attempt()
    except BudgetError:
        return None
    if found is not None and found.outcome.plan.extra_time < extra:
        return found
    take_back(site, found)
    return None


def _packed_or_not(attempts: Attempts, limit: float = math.inf) -> AppliedPlan | None:
    """Follow a plan with masks as they are. Switch packing if no such plan keeps the budget, or if
    a first plan with packing switched was faster. ``limit``: as in `Attempts.kept`."""
    site = attempts.site
    found = attempts.kept(limit)
    if found is not None or attempts.mode != "budget" or site.search_state is None:
        return _packed_otherwise(attempts, found)
    if _has_other(site):
        _switch_packing(attempts)
        found = attempts.kept(limit)
    return _rescued(attempts) if found is None and math.isinf(limit) else found


def _rescued(attempts: Attempts) -> AppliedPlan:
    """Follow the plan of least memory, with masks packed or not, if no other keeps the budget."""
    try:
        return attempts.rescued()
    except BudgetError as error:
        if not _has_other(attempts.site):
            raise
        _switch_packing(attempts)
        try:
            return attempts.rescued()
        except BudgetError as another:
            raise min((error, another), key=lambda refused: refused.least) from None


def _packed_otherwise(attempts: Attempts, found: AppliedPlan | None) -> AppliedPlan | None:
    """Follow ``found``, or a plan with packing switched if that is faster."""
    site = attempts.site
    if found is None or found.result is None or not _has_other(site):
        return found
    assert site.search_state is not None and site.search_state.other is not None
    extra, other = found.outcome.plan.extra_time, site.search_state.other
    if extra - _least_time(site, other) <= SLACK:
        return found
    if not is_clearly_less(_expected_time(site, found, other), extra):
        return found
    take_back(site, found)
    _switch_packing(attempts, alike=True)
    faster = _faster(site, extra, lambda: attempts.kept(extra))
    if faster is not None:
        return faster
    _switch_packing(attempts)
    return attempts.again(found)


def _expected_time(site: Site, found: AppliedPlan, other: SearchState) -> float:
    """Return the extra time of a plan with packing switched, as a share of a step; infinite: no
    plan fits, 0: unknown.

    Such a plan is expected to have as many bytes in holes as ``found``. If ``found`` is far from
    its lower bound, it may be worth seconds to know better, so no bytes in holes are expected. (On
    seven networks, plans near their bounds gained nothing from that, and took a tenth of the first
    step.)
    """
    outcome, plan = found.outcome, found.outcome.plan
    budget = plan.budget
    if other.search is None or budget is None or outcome.estimate != other.estimate:
        return 0.0
    asked = int(budget * outcome.proposal.peak / outcome.need)
    if not is_near(plan.extra_time, plan.lower_bound, 1.0):
        asked = max(budget, asked)
    proposal = other.search.at(asked).proposal
    return _time(site, other, proposal.extra_seconds) if proposal.peak <= asked else math.inf


def _least_time(site: Site, other: SearchState) -> float:
    """Return a lower bound of the extra time, as a share of a step, of plans with packing switched
    that keep the budget."""
    assert other.goal is not None
    budget, accumulate = other.goal.budget, site.options.accumulate
    return _time(site, other, least_extra_seconds(other.step.graph, budget, accumulate=accumulate))


def _time(site: Site, other: SearchState, extra_seconds: float) -> float:
    """Return the extra time of a plan for the step of ``other``, as a share of a plain step."""
    plain = site.original()[0].graph.total_seconds
    return (other.step.graph.total_seconds + extra_seconds) / plain - 1


def _has_other(site: Site) -> bool:
    """Return whether a search for plans with packing switched is possible."""
    return (
        site.search_state is not None and site.search_state.other is not None and not site.stopped
    )


def _switch_packing(attempts: Attempts, *, alike: bool = False) -> None:
    """Search plans with packing switched from now on. ``alike``: as in `Attempts.start`."""
    switch_packing(attempts.site)
    attempts.start(alike=alike)
