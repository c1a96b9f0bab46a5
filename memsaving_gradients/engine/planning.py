"""From gradients that TensorFlow built to a plan for them, in one of three ways: by a mode, within
limits, or as a saved plan says."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.memory.executor import CHANCE
from graph_tools.memory.liveness import timeline
from graph_tools.warn import warn
from memsaving_gradients.budget import (
    DeviceMemory,
    Goal,
    chunk_bytes,
    exact_bytes,
    format_bytes,
    format_share,
    plain_bytes,
    safe_bytes,
)
from memsaving_gradients.capture.fingerprint import fingerprint
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.capture.unknown_sizes import check_known
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.site import Site, Sought
from memsaving_gradients.errors import (
    NothingSavedWarning,
    PlanError,
    PlanningStoppedWarning,
    PlanNote,
)
from memsaving_gradients.planners import (
    Limits,
    Proposal,
    cheap_ops,
    find_planner,
    least_memory,
    named,
    planner_name,
)
from memsaving_gradients.planners.budget_search import MANY_OPS, Found, Meter, Search
from memsaving_gradients.planners.short_sums import left_alone
from memsaving_gradients.planners.with_storage import planner_that_stores
from memsaving_gradients.reports.describe import describe, why_nothing
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.schedules.schedule import Schedule, ordered, plain
from memsaving_gradients.schedules.simulate import Simulation, simulate
from memsaving_gradients.schedules.storage import OFFLOAD
from memsaving_gradients.schedules.validation import problem_of

__all__ = [
    "LIMITED",
    "OUTER",
    "Outcome",
    "by_limits",
    "by_mode",
    "by_saved_plan",
    "first_share",
    "note_unused",
    "nothing_else",
    "warn_nothing_saved",
    "warn_stopped",
]

_BY_MODE = {"memory": least_memory.plan, "speed": cheap_ops.plan}
#: Packing has to leave at most this share of the bytes, or of the extra time, of a plan without;
#: for plans may need more when they run.
MARGIN = 0.97
#: The share of a budget that is planned with at first in graphs of more than `MANY_OPS`.
LARGE_SHARE = 0.92
#: Modes in which what is plain is the graph before masks were packed.
LIMITED = ("budget", "slowdown", "planner")
#: Why gradients of targets of another graph are plain.
OUTER = (
    "ys were computed in another function or outside of the branch or loop that asks for gradients"
)
_ENDED = {"interrupted": "interrupted", "out of time": "stopped, out of time"}


@dataclass(frozen=True)
class Outcome:
    """What to make of a gradient computation.

    ``plain``: nothing; it does what was asked for as it is. ``stopped``: why planning ended early,
    or an empty string. ``given``: the saved plan that is followed.
    """

    step: CapturedStep
    proposal: Proposal
    plan: Plan
    plain: bool = False
    stopped: str = ""
    given: Plan | None = None

    @property
    def need(self) -> int:
        """The bytes of a budget that it may need."""
        simulation = self.plan.simulation
        assert simulation is not None
        return safe_bytes(simulation, self.plan.gating)

    def as_it_runs(self, simulation: Simulation) -> Outcome:
        """The same, described by what the executor makes of it."""
        plan = replace(self.plan, peak=simulation.peak, simulation=simulation)
        return replace(self, plan=plan)


def by_mode(site: Site, mode: str) -> Outcome | None:
    """What a mode or named checkpoints come to; ``None``, after a warning, if that saves
    nothing."""
    step = _captured(site)
    if step is None:
        return None
    original, before = site.original()
    proposal = _by_mode(site, step, mode)
    tries = mode == "memory" and _packing_may_help(step, proposal, site.packable())
    for parts in (True, False) if tries else ():
        if not site.pack(parts=parts):
            break
        packed = site.capture()
        other = _by_mode(site, packed, mode)
        if other.peak <= proposal.peak * MARGIN:
            step, proposal = packed, other
            break
        both = bool(site.packed.masks and site.packed.parts)
        site.unpack()
        if not both:
            break
    most = simulate(step.graph, plain(step.graph)).peak
    schedule = proposal.schedule
    works = schedule.clones or schedule.chained or schedule.stored
    if site.is_other and (not works or proposal.peak >= most):
        return nothing_else(site, mode, mode)
    if not works or (proposal.peak >= most and mode in _BY_MODE):
        warn_nothing_saved(site.graph, why_nothing(step, mode, most, site.loops.kept))
        return None
    if proposal.peak >= most:
        warn_nothing_saved(
            site.graph,
            f"the checkpoints named do not lower the simulated peak ({proposal.peak:,} bytes, plain"
            f" {most:,}); checkpoints='memory' finds better ones",
            what="tensors are recomputed, but that saves no memory",
        )
    found = Found(proposal, proposal.peak, None)
    unpacked = original if site.is_other else None
    plan = _described(site, step, found, mode, mode, before=before, unpacked=unpacked)
    return Outcome(step, proposal, plan)


def _packing_may_help(step: CapturedStep, proposal: Proposal, tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a plan would need less by `MARGIN` if these took no bytes: packing builds ops and has
    all be planned again."""
    graph, simulation = step.graph, proposal.simulation
    roots = graph.storage[[step.source.value(tensor) for tensor in tensors]]
    if not len(roots):
        return False
    owned = np.flatnonzero(np.isin(graph.storage[simulation.owner], roots))
    born, dies, size = (values[owned] for values in simulation.buffers)
    without = simulation.bytes_alive - timeline(born, dies, size, len(simulation.bytes_alive))
    return int(without.max()) <= simulation.peak * MARGIN


def _by_mode(site: Site, step: CapturedStep, mode: str) -> Proposal:
    limits = Limits(
        keep=site.keep(step, "marked" if mode == "collection" else "named"),
        accumulate=site.options.accumulate,
        seconds=site.options.planning_seconds,
        progress=site.progress,
        host=site.room_on_host,
        early=site.early,
    )
    proposal = planner_that_stores(_BY_MODE.get(mode, named.plan))(step.graph, limits)
    return left_alone(step.graph, proposal, None)


def nothing_else(site: Site, mode: str, name: str) -> Outcome:
    """Loops are replayed, or attention is in blocks, and nothing else is done."""
    original, before = site.original()
    step = site.capture()
    found = Found(Meter(step.graph, site.gating).plain, 0, None)
    plan = _described(site, step, found, mode, name, before=before, unpacked=original)
    return Outcome(step, found.proposal, plan, plain=True).as_it_runs(site.simulate_plain(step))


def by_limits(
    site: Site, mode: str, share: float = 1.0, below: int | None = None
) -> Outcome | None:
    """The fastest plan within a budget, or the one of least memory within a slowdown, or what a
    planner does by itself.

    ``None``, after a warning, if no plan within the slowdown saves anything, or the planner's does
    not. ``share``: how much of the budget may be planned with; 0: the plan of least memory is
    wanted. ``below``: what a plan needed that broke the budget as it ran.
    """
    options = site.options
    if site.sought is None:
        site.sought = seek(site)
    sought = site.sought
    if sought is None:
        return None
    step, goal, search = sought.step, sought.goal, sought.search
    budget = None if goal is None else goal.budget
    name = planner_name(options.planner)
    plain_need = chunk_bytes(sought.before, site.gating)
    if search is None:
        assert goal is not None
        _note_ample(site.graph, goal)
        untouched = Found(Meter(step.graph, site.gating).plain, plain_need, None)
        plan = _described(site, step, untouched, mode, name, before=sought.before, budget=budget)
        return Outcome(step, untouched.proposal, plan, plain=True)
    found: Found | None
    search.progress = site.progress
    if goal is not None:
        found = search.within(goal, share, below) if share else search.least()
    elif options.max_slowdown is not None:
        allowed = options.max_slowdown * sought.unpacked.graph.total_seconds
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
            f" was found before planning was {_ENDED[search.stopped]} that"
            if search.stopped
            else ""
        )
        warn_nothing_saved(
            site.graph,
            f"no plan {where}{so_far} needs less than the"
            f" {plain_bytes(sought.before, site.gating):,} bytes of plain training",
        )
        return None
    plan = _described(
        site, step, found, mode, name, before=sought.before, budget=budget, unpacked=sought.unpacked
    )
    return Outcome(step, found.proposal, plan, stopped=found.stopped)


def seek(site: Site) -> Sought | None:
    """What plans are made for, and with what: the step, with masks packed. ``None``, after a
    warning: it cannot be rewritten."""
    options = site.options
    step = _captured(site)
    if step is None:
        return None
    unpacked, before = site.original()
    goal = _goal(site, unpacked, before)
    if goal is not None and goal.budget >= goal.plain_need and not site.is_other:
        return Sought(step, unpacked, before, goal, None)
    if not site.pack():
        return Sought(step, unpacked, before, goal, search_of(site, step, before))
    packed = Sought(site.capture(), unpacked, before, goal, None)
    limited = goal is not None or options.max_slowdown is not None
    if not limited:
        if site.packed.parts and _plain_peak(packed.step) >= _plain_peak(step):
            # Where the largest of them are read, what is packed is there beside what is unpacked.
            site.unpack()
            site.pack(parts=False)
            packed = replace(packed, step=site.capture())
        return replace(packed, search=search_of(site, packed.step, before))
    # Packing takes time that recomputing could have, too.
    site.switch_packing(False)
    other = Sought(step, unpacked, before, goal, search_of(site, step, before))
    seconds = packed.step.graph.total_seconds - step.graph.total_seconds
    cost = _cost(other, site)
    assert other.search is not None
    if other.search.stopped:
        return other
    if goal is not None and cost <= seconds:
        return replace(other, other=packed)
    site.switch_packing(True)
    packed = replace(packed, search=search_of(site, packed.step, before))
    # Where nothing fits, the error is to name the least that could be had: that of what is packed.
    better, worse = packed, other
    if _cost(packed, site, seconds) > cost * MARGIN:
        site.switch_packing(False)
        better, worse = other, packed
    return better if goal is None else replace(better, other=worse)


def first_share(site: Site) -> float:
    """The share of a budget to plan with at first: what is left to chance as the executor runs a
    step takes the rest, and in large graphs, where an attempt takes seconds, what it adds."""
    if site.data_gates:
        return 1.0
    return LARGE_SHARE if len(site.operations) > MANY_OPS else 1 / (1 + CHANCE)


def search_of(site: Site, step: CapturedStep, before: Simulation) -> Search:
    """A search for plans for a step, with masks packed as they are at the site now."""
    options = site.options
    return Search(
        Meter(step.graph, site.gating, before.persistent),
        planner_that_stores(find_planner(options.planner)),
        keep=site.keep(step, "marked"),
        accumulate=options.accumulate,
        seconds=options.planning_seconds,
        floors=site.floors,
        host=site.room_on_host,
        early=site.early,
    )


def _cost(sought: Sought, site: Site, packing: float | None = None) -> float:
    """What is to be little: the extra seconds of a first plan within a budget, or the bytes of that
    within a slowdown; infinite: there is none.

    ``packing``: the seconds that packing takes, if there is any.
    """
    search = sought.search
    assert search is not None
    if sought.goal is not None:
        return search.sketch(sought.goal, first_share(site)) + (packing or 0.0)
    assert site.options.max_slowdown is not None
    most = site.options.max_slowdown * sought.unpacked.graph.total_seconds
    found = search.within_time(most - sought.step.graph.total_seconds, plain=packing is not None)
    return math.inf if found is None else found.need


def _plain_peak(step: CapturedStep) -> int:
    return simulate(step.graph, ordered(step.graph, step.graph.sums)).peak


def by_saved_plan(site: Site, plans: Sequence[Plan] = ()) -> Outcome:
    """The one of ``plans`` that was made for this graph; an error that names the difference if none
    was.

    Those that the user gave, if there are no others.

    Raises
    ------
    PlanError
        If no plan fits to the graph.
    """
    plans = plans or site.options.plan
    unpacked, before = site.original()
    difference = None
    ways = sorted({(plan.loops, plan.packed) for plan in plans})
    # All that may be packed was, or masks alone.
    tries = [(way, packed, parts) for way, packed in ways for parts in (True, False)[: 1 + packed]]
    for way, packed, parts in tries:
        candidates = [plan for plan in plans if (plan.loops, plan.packed) == (way, packed)]
        site.treat_loops(way or None)
        if packed:
            site.pack(parts=parts)
        step = site.capture()
        mark = fingerprint(step, site.options.batch)
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
    wrong = "was made for another graph" if one else "none was made for this graph; of the first"
    raise PlanError(
        "plan",
        given[0] if one else given,
        f"{wrong}: {difference}; plan anew, with the options that the plan was made with",
    )


def _applied(
    site: Site, step: CapturedStep, plan: Plan, unpacked: CapturedStep, before: Simulation
) -> Outcome:
    schedule = plan.schedule
    problem = "it has no schedule" if schedule is None else problem_of(step.graph, schedule)
    if schedule is None or problem:
        raise PlanError("plan", plan.file or plan, f"cannot be applied here: {problem}; plan anew")
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
    described = _described(
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
    if untouched and site.is_other:
        described = replace(described, simulation=site.simulate_plain(step))
    return Outcome(step, proposal, described, plain=untouched, given=plan)


def _not_asked_for(site: Site, step: CapturedStep, schedule: Schedule) -> str:
    """What a saved plan does that needs consent, or room, that was not given with it; empty:
    nothing."""
    for op, how in schedule.stored.items():
        ways = {way.means for way in step.graph.storable.get(op, ())}
        if how.fate == "encode" and how.means not in ways:
            return (
                f"keeps tensors as {how.means}, which changes gradients: give encode={how.means!r}"
                " as well, or the mapping it was made with"
            )
    moved = {how.value for how in schedule.stored.values() if how.means == OFFLOAD}
    if moved and not site.host:
        return "offloads tensors, and no device is named here: give offload= as well"
    size = sum(int(step.graph.size[value]) for value in moved)
    if site.room_on_host is not None and size > site.room_on_host:
        return (
            f"offloads {size:,} bytes, more than memory={site.room_on_host:,}; allow more, or plan"
            " anew"
        )
    return ""


def _described(
    site: Site,
    step: CapturedStep,
    found: Found,
    mode: str,
    planner: str,
    *,
    before: Simulation,
    budget: int | None = None,
    unpacked: CapturedStep | None = None,
) -> Plan:
    """``unpacked``: the step before masks were packed and loops replayed, which is what is
    plain."""
    packed = bool(site.packed.tensors)
    earlier = unpacked if packed or site.is_other else None
    plan = describe(
        step,
        found,
        mode=mode,
        planner=planner,
        batch=site.options.batch,
        batch_is_known=site.options.batch_size is not None,
        data_gates=site.data_gates,
        packed=packed,
        budget=budget,
        before=before,
        earlier=earlier,
        loops=site.loops,
    )
    if site.attention is None:
        return plan
    kept = tuple(sorted(site.attention.refused.items()))
    return replace(plan, attention=site.attention.names, attention_kept=kept)


def _captured(site: Site) -> CapturedStep | None:
    try:
        return site.capture()
    except GraphError as error:
        limited = ", and no budget is kept" if site.options.searches else ""
        warn_nothing_saved(site.graph, f"the graph cannot be rewritten{limited}: {error}")
        return None


def _goal(site: Site, step: CapturedStep, before: Simulation) -> Goal | None:
    """The budget in bytes of chunks: a fraction is one of the least that plain training may need,
    and 1 the most."""
    limit = site.options.limit
    if limit is None:
        return None
    most = safe_bytes(before, site.gating)
    base = plain_bytes(before, site.gating)
    if isinstance(limit, float):
        limit = max(1, int(limit * (most if limit == 1 else base)))
    else:
        check_known(step, before.peak, site.options.batch_size, site.options.asked_budget[0])
    return Goal(limit, most, base, site.options.budget)


def warn_nothing_saved(
    graph: tf.Graph,
    why: str,
    what: str = "gradients are plain TensorFlow gradients and save no memory",
) -> None:
    """Say, once for each graph, why gradients are TensorFlow's own, or else ``what`` is so."""
    if graph_state.warned(graph, why):
        return
    warn(f"{what}: {why}.", NothingSavedWarning)


def _note_ample(graph: tf.Graph, goal: Goal) -> None:
    most = f", {goal.plain_need:,} at most," if goal.plain_need > goal.base else ""
    device = f", what {goal.value} leaves" if isinstance(goal.value, DeviceMemory) else ""
    note = (
        f"plain training needs {exact_bytes(goal.base)}{most} and meets the budget of"
        f" {goal.budget:,} ({format_bytes(goal.budget)}{device}): gradients are plain, nothing is"
        " recomputed"
    )
    if not graph_state.warned(graph, note):
        warn(note + ".", PlanNote)


def note_unused(plan: Plan, named: Collection[str]) -> None:
    """Say it, if none of the tensors that were named to be encoded is."""
    encoded = {decision.tensor for decision in plan.stored}
    if named and encoded.isdisjoint(named):
        warn(
            f"none of the {len(named)} tensors that encode= names is encoded (the first is"
            f" {min(named)!r}): the plan keeps or recomputes them, since encoding them would not"
            " lower the peak, or is not needed for the budget.",
            PlanNote,
        )


def warn_stopped(plan: Plan, why: str) -> None:
    """Say that planning ended early."""
    warn(
        f"planning was {_ENDED[why]}; the best plan so far is used: extra time about"
        f" {format_share(plan.extra_time, 1)}, at most {format_share(plan.gap, 1)} of a step above"
        f" the least ({format_share(plan.lower_bound, 1)}).",
        PlanningStoppedWarning,
    )
