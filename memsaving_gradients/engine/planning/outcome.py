"""What planning comes to for one gradient computation: a plan, described, or that there is nothing
to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_tools.errors import GraphError
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.site import Site
from memsaving_gradients.planners import Proposal
from memsaving_gradients.planners.meter import Found, Meter
from memsaving_gradients.reports.describe import describe
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["LIMITED", "Outcome", "captured", "described", "nothing_else"]

#: Modes in which what is plain is the graph before masks were packed.
LIMITED = ("budget", "slowdown", "planner")


@dataclass(frozen=True)
class Outcome:
    """What to make of a gradient computation.

    ``plain``: nothing; it does what was asked for as it is. ``stopped``: why planning ended early,
    or an empty string. ``given``: the saved plan that is followed. ``estimate``: which
    estimate of the rest of the step ``step`` counts with.
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
        """The bytes of a budget that it may need."""
        simulation = self.plan.simulation
        assert simulation is not None
        return safe_bytes(simulation, self.plan.gating)

    def as_it_runs(self, simulation: Simulation) -> Outcome:
        """The same, described by what the executor makes of it."""
        plan = replace(self.plan, peak=simulation.peak, simulation=simulation)
        return replace(self, plan=plan)


def nothing_else(site: Site, mode: str, name: str) -> Outcome:
    """Loops are replayed, or attention is in blocks, and nothing else is done."""
    original, before = site.original()
    step = site.capture()
    found = Found(Meter(step.graph, site.gating).plain, 0, None)
    plan = described(site, step, found, mode, name, before=before, unpacked=original)
    return Outcome(step, found.proposal, plan, plain=True).as_it_runs(site.as_it_is(step))


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
        assumed_steps=site.assumed_steps,
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


def captured(site: Site) -> CapturedStep | None:
    try:
        return site.capture()
    except GraphError as error:
        limited = ", and no budget is kept" if site.options.searches else ""
        warn_nothing_saved(site.graph, f"the graph cannot be rewritten{limited}: {error}")
        return None
