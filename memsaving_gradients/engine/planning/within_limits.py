"""Plans within a budget or a slowdown, or a planner's plan without limits.

Plans are searched for the step as it is, and for the step with masks packed in bits. A first plan
of each decides between the two (`seek`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from graph_tools.memory.timeline import CHANCE
from memsaving_gradients.budget import Goal, chunk_bytes, plain_bytes, safe_bytes
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.capture.unknown_sizes import unknown_bytes, unknown_lists, unknown_steps
from memsaving_gradients.engine.feedback.notices import ENDED, note_ample, warn_nothing_saved
from memsaving_gradients.engine.planning.outcome import (
    Outcome,
    captured,
    described,
    nothing_else,
)
from memsaving_gradients.engine.site.search_state import SearchState
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import find_planner, planner_name
from memsaving_gradients.planners.budget_search import Search
from memsaving_gradients.planners.meter import EXECUTOR_ADDS, Found, Meter, is_clearly_less
from memsaving_gradients.planners.proposal import SMALLER
from memsaving_gradients.planners.with_storage import planner_that_stores
from memsaving_gradients.schedules.schedule import ordered
from memsaving_gradients.schedules.simulate import Simulation, simulate

__all__ = [
    "as_it_is_now",
    "budget_of",
    "first_need",
    "first_share",
    "seek",
    "switch_packing",
    "unknown_to",
    "within_limits",
]


def within_limits(
    site: Site, mode: str, wanted: Callable[[Search], Found] = Search.least
) -> Outcome | None:
    """Return a plan for a budget, the plan of least memory within a slowdown, or a planner's plan
    without limits.

    ``None``, after a warning, if the graph cannot be rewritten, or if no plan within the slowdown
    or of the planner saves memory. ``wanted``: picks the plan from a search for a budget.
    """
    options = site.options
    state = seek(site) if site.search_state is None else site.search_state
    if state is not None and state.estimate != site.estimate:
        state = _estimated(site, state)
    site.search_state = state
    if state is None:
        return None
    step, goal, search = state.step, state.goal, state.search
    budget = None if goal is None else goal.budget
    name = planner_name(options.planner)
    plain_need = chunk_bytes(state.before, site.gating)
    if search is None:
        assert goal is not None
        if site.whole is None or site.covers_step:
            note_ample(site.graph, goal)
        untouched = Found(Meter(step.graph, site.gating).plain, plain_need, None)
        plan = described(site, step, untouched, mode, name, before=state.before, budget=budget)
        return Outcome(step, untouched.proposal, plan, plain=True).as_it_runs(state.before)
    found: Found | None
    search.progress = site.progress
    if goal is not None:
        found = wanted(search)
    elif options.max_slowdown is not None:
        allowed = options.max_slowdown * state.unpacked.graph.total_seconds
        seconds = allowed - step.graph.total_seconds
        found = search.within_time(seconds, plain=bool(site.packed.tensors))
    else:
        found = search.free()
    if found is None or (budget is None and found.need >= plain_need):
        if site.attention is not None and site.attention.names:
            return nothing_else(site, mode, name)
        where = (
            f"within max_slowdown={options.max_slowdown}"
            if options.max_slowdown
            else f"of planner {name!r}"
        )
        so_far = (
            f" that was found before planning {ENDED[search.stopped]}" if search.stopped else ""
        )
        warn_nothing_saved(
            site.graph,
            f"no plan {where}{so_far} needs less than the"
            f" {plain_bytes(state.before, site.gating):,} bytes of plain training",
        )
        return None
    plan = described(
        site,
        step,
        found,
        mode,
        name,
        before=state.before,
        budget=budget,
        unpacked=state.unpacked,
    )
    return Outcome(step, found.proposal, plan, stopped=found.stopped, estimate=site.estimate)


def switch_packing(site: Site) -> None:
    """Pack masks if they are not packed, else unpack them; search plans for that from now on."""
    state = site.search_state
    assert state is not None and state.other is not None
    site.switch_packing(not site.packed.tensors)
    other = state.other
    search = other.search or _search_of(site, other.step, other.before)
    site.search_state = replace(other, search=search, other=replace(state, other=None))


def seek(site: Site) -> SearchState | None:
    """Return the step to plan for, with masks packed or not, and the search for its plans;
    ``None``, after a warning: the graph cannot be rewritten."""
    options = site.options
    step = captured(site)
    if step is None:
        return None
    unpacked, before = site.original()
    goal = _goal(site, before)
    ample = goal is not None and goal.budget >= safe_bytes(before, site.gating)
    if ample and not site.differs_from_plain:
        return SearchState(step, unpacked, before, goal, None)
    if not site.pack():
        return SearchState(step, unpacked, before, goal, _search_of(site, step, before))
    packed = SearchState(site.capture(), unpacked, before, goal, None)
    limited = goal is not None or options.max_slowdown is not None
    if not limited:
        if site.packed.parts and _plain_peak(packed.step) >= _plain_peak(step):
            # Where the largest tensors are read, packed and unpacked copies are alive together.
            site.unpack()
            site.pack(parts=False)
            packed = replace(packed, step=site.capture())
        return replace(packed, search=_search_of(site, packed.step, before))
    # Packing takes time that recomputation could use instead.
    site.switch_packing(False)
    other = SearchState(step, unpacked, before, goal, _search_of(site, step, before))
    seconds = packed.step.graph.total_seconds - step.graph.total_seconds
    cost = _cost(other, site)
    assert other.search is not None
    if other.search.stopped:
        return other
    if goal is not None and cost <= seconds:
        return replace(other, other=packed)
    site.switch_packing(True)
    packed = replace(packed, search=_search_of(site, packed.step, before))
    # If neither fits, both costs are infinite. The packed step goes first: its need is the least.
    better, worse = packed, other
    if not is_clearly_less(_cost(packed, site, seconds), cost):
        site.switch_packing(False)
        better, worse = other, packed
    return better if goal is None else replace(better, other=worse)


def as_it_is_now(site: Site) -> SearchState:
    """Return a search for plans of the step as it is now, with no other packing to try."""
    step, (unpacked, before) = site.capture(), site.original()
    search = _search_of(site, step, before)
    return SearchState(step, unpacked, before, _goal(site, before), search)


def _estimated(site: Site, state: SearchState) -> SearchState:
    """Return ``state`` with the step and the search for the estimate that is in use now."""
    searched, now = state.searched, site.estimate
    searched[state.estimate] = state.step, state.search
    if now not in searched:
        step = site.capture()
        searched[now] = step, _search_of(site, step, state.before)
    step, search = searched[now]
    return replace(state, step=step, search=search, estimate=now)


def first_share(site: Site) -> float:
    """Return the share of a budget to plan with at first; the rest is for chance in the executor's
    order, and for the bytes that this order adds."""
    return 1.0 if site.xla else (1 - EXECUTOR_ADDS) / (1 + CHANCE)


def first_need(site: Site, state: SearchState) -> int:
    """Return the bytes in chunks that a first plan may need before its rewrite, to keep the budget
    after it. The executor adds about as much to a plan as to plain training, and a little more: 3
    per cent, in the median of 17 plans for six networks."""
    assert state.goal is not None and state.search is not None
    budget, meter = state.goal.budget, state.search.meter
    share = first_share(site)
    if not site.xla:
        runs = safe_bytes(state.before, site.gating) / max(state.before.peak, 1)
        foreseen = meter.need(meter.plain) / max(meter.plain.peak, 1)
        share = SMALLER * min(share, foreseen / max(runs, 1e-12))
    return int(budget * share)


def _search_of(site: Site, step: CapturedStep, before: Simulation) -> Search:
    """Return a search for plans of a step, with masks packed as they are at the site now."""
    options = site.options
    return Search(
        Meter(step.graph, site.gating, before),
        planner_that_stores(find_planner(options.planner)),
        keep=site.keep(step, "marked"),
        accumulate=options.accumulate,
        seconds=options.planning_seconds,
        floors=site.floors,
        host=site.call.room_on_host,
        early=site.call.early,
    )


def _cost(state: SearchState, site: Site, packing: float | None = None) -> float:
    """Return the cost to compare: the extra seconds of a first plan within a budget, or the bytes
    of the plan within a slowdown; infinite: there is no plan.

    ``packing``: the seconds that packing takes; ``None``: masks are not packed.
    """
    search = state.search
    assert search is not None
    if state.goal is not None:
        return search.sketch(first_need(site, state)) + (packing or 0.0)
    assert site.options.max_slowdown is not None
    most = site.options.max_slowdown * state.unpacked.graph.total_seconds
    found = search.within_time(most - state.step.graph.total_seconds, plain=packing is not None)
    return math.inf if found is None else found.need


def _plain_peak(step: CapturedStep) -> int:
    return simulate(step.graph, ordered(step.graph, step.graph.sums)).peak


def budget_of(site: Site, plain: Simulation) -> int | None:
    """Return the budget in bytes of chunks; ``None``: there is none. A fraction below 1 refers to
    the least that plain training may need, and 1.0 to the most."""
    limit = site.options.limit
    if isinstance(limit, float):
        base = safe_bytes if limit == 1 else plain_bytes
        return max(1, int(limit * base(plain, site.gating)))
    return limit


def _goal(site: Site, before: Simulation) -> Goal | None:
    plain = before if site.whole is None else site.whole.plain
    budget = budget_of(site, plain)
    if budget is None:
        return None
    unknown = unknown_to(site)
    if unknown is not None and not isinstance(site.options.limit, float):
        raise unknown
    if site.whole is not None and site.whole.share is not None:
        budget = int(budget * site.whole.share)
    most, base = safe_bytes(plain, site.gating), plain_bytes(plain, site.gating)
    return Goal(budget, most, base, site.options.budget, unknown)


def unknown_to(site: Site) -> ArgumentError | None:
    """Return the error for a budget in bytes if the call's bytes are unknown, else ``None``."""
    step, before = site.original()
    options = site.options
    error = unknown_bytes(step, before.peak, options.batch_size, options.asked_budget[0])
    error = error or unknown_lists(site.guessed_loops, before.peak, options.batch)
    if error is None and (inside := site.guessed_inside):
        error = unknown_steps(inside[0].name)
    return error
