"""The fastest plan within a budget, with a proof, by constraint programming from a known plan.

:mod:`~memsaving_gradients.planners.auto` (in small graphs, the plan of least memory) begins, and
:mod:`~memsaving_gradients.planners.retention.prove` improves or proves its plan. Needs OR-Tools.
Exponential; within `EFFORT`, it solves 70 layers at all budgets, and 250 layers at some. The plan
is the same in every process, unless there is a limit on seconds.
"""

from __future__ import annotations

from dataclasses import replace

from memsaving_gradients.planners import auto, least_memory
from memsaving_gradients.planners.proposal import Deadline, Limits, Proposal, untouched
from memsaving_gradients.planners.retention import constraint_program
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.planners.retention.prove import FEW, prove
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]

#: The effort of CP-SAT for one plan, in its own measure: a unit takes some seconds.
EFFORT = 8.0
#: The share of ``limits.seconds`` that one call takes, because others may follow; and the share of
#: that time for the first plan. Chosen by judgement.
SHARE = 0.6


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Return the fastest plan within ``limits.budget``, if effort and time suffice; without a
    budget, the plan of least memory."""
    constraint_program.check_installed()
    if limits.budget is None:
        return auto.plan(graph, limits)
    plain = untouched(graph, limits)
    if plain.optimal:
        return plain
    most = None if limits.seconds is None else SHARE * limits.seconds
    deadline = Deadline.of(most)
    coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
    if len(coarse.problem.inputs) <= FEW and coarse.is_exact:
        # Any plan is good enough to start from.
        found = least_memory.plan(graph, replace(limits, budget=None))
    else:
        seconds = None if most is None else SHARE * most
        found = auto.plan(graph, replace(limits, seconds=seconds))
    return prove(graph, limits, found, effort=EFFORT, seconds=deadline.left)
