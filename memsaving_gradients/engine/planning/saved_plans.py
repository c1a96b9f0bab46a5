"""Saved plans: find the plan that was made for this graph, and apply it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memsaving_gradients.capture.fingerprint import fingerprint
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine.planning.outcome import LIMITED, Outcome, described
from memsaving_gradients.engine.site.simulations import as_it_is
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import PlanError
from memsaving_gradients.planners import Proposal
from memsaving_gradients.planners.meter import Found
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.schedules.schedule import Schedule, plain
from memsaving_gradients.schedules.simulate import Simulation, simulate
from memsaving_gradients.schedules.storage import OFFLOAD
from memsaving_gradients.schedules.validation import problem_of

__all__ = ["by_saved_plan"]


def by_saved_plan(site: Site, plans: Sequence[Plan] = (), *, sized: bool = True) -> Outcome:
    """Return the outcome of the plan, one of ``plans``, that was made for this graph.

    Without ``plans``, the plans that the user gave are searched. Without ``sized``, a plan may have
    been made for other sizes; its fingerprint has none.

    Raises
    ------
    PlanError
        If no plan was made for this graph (the error names the difference), or if the plan that
        was cannot be applied.
    """
    plans = plans or site.options.plan
    unpacked, before = site.original()
    difference = None
    ways = sorted({(plan.loops, plan.packed) for plan in plans})
    # A packed plan packed masks and parts of other tensors, or masks alone.
    tries = [(way, packed, parts) for way, packed in ways for parts in (True, False)[: 1 + packed]]
    for way, packed, parts in tries:
        candidates = [plan for plan in plans if (plan.loops, plan.packed) == (way, packed)]
        site.treat_loops(way or None)
        if packed:
            site.pack(parts=parts)
        step = site.capture()
        mark = fingerprint(step, site.options.batch, sized=sized)
        for plan in candidates:
            different = "it has no fingerprint"
            if plan.fingerprint is not None:
                names = [op.name for op in step.source.ops]
                different = plan.fingerprint.difference(mark, names) or ""
            if not different:
                return _applied(site, step, plan, unpacked, before)
            difference = difference or different
    given = [plan.file or plan for plan in plans]
    one = len(given) == 1
    wrong = (
        "was made for another graph"
        if one
        else "none of them was made for this graph; the problem with the first one"
    )
    raise PlanError(
        "plan",
        given[0] if one else given,
        f"{wrong}: {difference}; plan again, with the options that the plan was made with",
    )


def _applied(
    site: Site, step: CapturedStep, plan: Plan, unpacked: CapturedStep, before: Simulation
) -> Outcome:
    schedule = plan.schedule
    problem = "it has no schedule" if schedule is None else problem_of(step.graph, schedule)
    if schedule is None or problem:
        raise PlanError("plan", plan.file or plan, f"cannot be applied here: {problem}; plan again")
    if problem := _not_asked_for(site, step, schedule):
        raise PlanError("plan", plan.file or plan, problem)
    seconds = unpacked.graph.total_seconds
    proposal = Proposal(
        schedule,
        dict(plan.reasons),
        simulate(step.graph, schedule),
        plan.lower_bound * seconds,
        plan.optimal,
        plan.complete,
    )
    found = Found(proposal, 0, plan.planned_for)
    mine = described(
        site,
        step,
        found,
        plan.mode,
        plan.planner,
        before=before,
        budget=plan.budget,
        unpacked=unpacked if plan.mode in LIMITED or plan.loops else None,
    )
    untouched = schedule == plain(step.graph) and not plan.packed
    if untouched and site.differs_from_plain:
        mine = replace(mine, simulation=as_it_is(site, step))
    return Outcome(step, proposal, mine, plain=untouched, given=plan)


def _not_asked_for(site: Site, step: CapturedStep, schedule: Schedule) -> str:
    """Return the problem, if the saved plan needs consent or room that the user did not give;
    empty: there is none."""
    for op, how in schedule.stored.items():
        ways = {way.means for way in step.graph.storable.get(op, ())}
        if how.fate == "encode" and how.means not in ways:
            return (
                f"keeps tensors as {how.means}, which changes gradients: give encode={how.means!r}"
                " as well, or the mapping it was made with"
            )
    moved = {how.value for how in schedule.stored.values() if how.means == OFFLOAD}
    if moved and not site.call.host:
        return "offloads tensors, and no device is named here: give offload= as well"
    size = sum(int(step.graph.size[value]) for value in moved)
    room = site.call.room_on_host
    if room is not None and size > room:
        return f"offloads {size:,} bytes, more than memory={room:,}; allow more, or plan again"
    return ""
