"""A plan that a graph follows after a rewrite, described by a simulation of the executor."""

from __future__ import annotations

from dataclasses import dataclass

from graph_tools.editing import original_view
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.site.simulations import simulate_rewritten
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.rewriting.clones import Rewrite, rewrite
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["AppliedPlan", "follow", "rewritten", "take_back"]


@dataclass(frozen=True, eq=False)
class AppliedPlan:
    """A plan that a graph follows.

    Attributes
    ----------
    outcome
        The plan, described by a simulation of the executor (under XLA: of the schedule).
    result
        The rewrite; ``None``: gradients are plain.
    """

    outcome: Outcome
    result: Rewrite | None

    @property
    def simulation(self) -> Simulation:
        """The simulation of the step that follows the plan."""
        simulation = self.outcome.plan.simulation
        assert simulation is not None
        return simulation

    def keeps(self, need: int) -> bool:
        """Return whether ``need`` bytes are within the plan's budget."""
        budget = self.outcome.plan.budget
        return budget is None or need <= budget


def follow(site: Site, outcome: Outcome) -> AppliedPlan:
    """Make the graph follow a plan. Except under XLA, describe the plan by a simulation of the
    executor: of the whole step, or of the gradients if they are planned alone."""
    result = rewritten(site, outcome)
    if result is not None and not site.xla:
        extra = outcome.proposal.extra_seconds
        outcome = outcome.as_it_runs(simulate_rewritten(site, result, extra))
    return AppliedPlan(outcome, result)


def rewritten(site: Site, outcome: Outcome) -> Rewrite | None:
    """Make the graph follow a plan, and return the changes; ``None``: nothing is recomputed."""
    if outcome.plain:
        return None
    proposal = outcome.proposal
    result = rewrite(
        outcome.step,
        proposal.schedule,
        proposal.simulation,
        xla=site.xla,
        updates={} if site.whole is None else site.whole.updates,
        host=site.call.host,
        grads=site.grads,
    )
    for grad, given in zip(site.grads, site.given, strict=False):
        if grad.ref() in result.replaced:
            result.rewiring.point(given.op, 0, result.replaced[grad.ref()])
    return result


def take_back(site: Site, found: AppliedPlan | None) -> None:
    """Restore the graph as it was before it followed ``found``."""
    if found is not None and found.result is not None:
        found.result.rewiring.undo()
        original_view.forget(site.graph, found.result.rewiring)
        graph_state.retire(site.graph, found.result.built)
