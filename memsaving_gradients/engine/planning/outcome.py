"""The outcome of planning for one gradient computation: a described plan, or the decision to
rewrite nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_tools.errors import GraphError
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.site.simulations import as_it_is
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.planners import Proposal
from memsaving_gradients.planners.meter import Found, Meter
from memsaving_gradients.reports.describe import describe
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["LIMITED", "Outcome", "captured", "described", "nothing_else"]

#: Modes in which plain training is the graph before masks were packed.
LIMITED = ("budget", "slowdown", "planner")


@dataclass(frozen=True)
class Outcome:
    """The plan for a gradient computation.

    ``plain``: whether the graph needs no rewrite to do what was asked for. ``stopped``: why
    planning ended early, or an empty string. ``given``: the saved plan that is followed.
    ``estimate``: the number of the estimate of the rest of the step in ``step``.
    """

    step: CapturedStep
    proposal: Proposal
    plan: Plan
    plain: bool = False
    stopped: str = ""
    given: Plan | None = None
    estimate: int = 0

    @property
    def need(self) -> int:
        """The bytes of a budget that the step may need."""
        simulation = self.plan.simulation
        assert simulation is not None
        return safe_bytes(simulation, self.plan.gating)

    def as_it_runs(self, simulation: Simulation) -> Outcome:
        """Return this outcome, described by a simulation of the executor."""
        plan = replace(self.plan, peak=simulation.peak, simulation=simulation)
        return replace(self, plan=plan)


def nothing_else(site: Site, mode: str, name: str) -> Outcome:
    """Return the outcome that only replays loops or computes attention in blocks."""
    original, before = site.original()
    step = site.capture()
    found = Found(Meter(step.graph, site.gating).plain, 0, None)
    plan = described(site, step, found, mode, name, before=before, unpacked=original)
    return Outcome(step, found.proposal, plan, plain=True).as_it_runs(as_it_is(site, step))


def described(
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
    """Describe a plan. ``unpacked``: the step before masks were packed and loops replayed, which
    counts as plain training."""
    packed = bool(site.packed.tensors)
    earlier = unpacked if packed or site.differs_from_plain else None
    plan = describe(
        step,
        found,
        mode=mode,
        planner=planner,
        batch=site.options.batch,
        batch_is_known=site.options.batch_size is not None,
        assumed_steps=site.assumed_steps,
        xla=site.xla,
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


def captured(site: Site) -> CapturedStep | None:
    try:
        return site.capture()
    except GraphError as error:
        limited = ", and no budget is kept" if site.options.searches else ""
        warn_nothing_saved(site.graph, f"the graph cannot be rewritten{limited}: {error}")
        return None
