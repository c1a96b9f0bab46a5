"""A plan that a graph follows: made by a rewrite, described by what the executor makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.site import Site
from memsaving_gradients.rewriting.clones import Rewrite, rewrite
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["Followed", "Simulate", "alone", "follow", "take_back"]


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


#: What the executor makes of a step that follows a plan.
Simulate = Callable[[Followed], Simulation]


def alone(found: Followed) -> Simulation:
    """What the gradients come to by themselves."""
    simulation = found.outcome.plan.simulation
    assert simulation is not None
    return simulation


def follow(
    site: Site, outcome: Outcome, updates: Mapping[str, Sequence[tf.Operation]] | None = None
) -> Followed:
    """Make the graph follow a plan, and describe the plan by what the executor will make of it, if
    the gradients are alone.

    ``updates``: by name of a gradient's op, the ops that end what is done with the gradient;
    ``None``: the gradients are alone.
    """
    planned = outcome.planned or outcome.need
    if outcome.plain:
        return Followed(outcome, None, planned)
    proposal, gates = outcome.proposal, site.data_gates
    result = rewrite(
        outcome.step,
        proposal.schedule,
        proposal.simulation,
        data_gates=gates,
        updates=updates or {},
        host=site.host,
        grads=site.grads,
    )
    if not gates and updates is None:
        outcome = outcome.as_it_runs(site.simulate_rewritten(result, proposal.extra_seconds))
    return Followed(outcome, result, planned)


def take_back(site: Site, found: Followed | None) -> None:
    """Leave the graph as it was before ``found`` was followed."""
    if found is not None and found.result is not None:
        site.take_back(found.result)
