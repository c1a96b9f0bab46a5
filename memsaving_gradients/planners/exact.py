"""The fastest plan within a budget, proven: constraint programming, from the plan that is known.

:mod:`~memsaving_gradients.planners.auto` plans first, and
:mod:`~memsaving_gradients.planners.retention.prove` improves its plan or proves it. Needs OR-Tools.
Exponential; within `EFFORT`, graphs of 70 layers are solved at all budgets, and of 250 some. The
same plan in every process, unless there is a limit on seconds.
"""

from __future__ import annotations

import time
from dataclasses import replace

from memsaving_gradients.planners import auto, least_memory
from memsaving_gradients.planners.proposal import Limits, Proposal, untouched
from memsaving_gradients.planners.retention import constraint_program
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.planners.retention.prove import FEW, prove
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]

#: What CP-SAT may do for one plan, in its own measure: a unit takes some seconds.
EFFORT = 8.0
#: The share of the seconds there are that one call takes, for others may follow; and of that, the
#: share of the first plan. Chosen by judgement.
SHARE = 0.6


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """The fastest plan within ``limits.budget``, if effort and time suffice; the least memory if
    there is no budget."""
    constraint_program.check_installed()
    if limits.budget is None:
        return auto.plan(graph, limits)
    plain = untouched(graph, limits)
    if plain.optimal:
        return plain
    began = time.monotonic()
    coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
    if len(coarse.problem.inputs) <= FEW and coarse.is_exact:
        # Any plan will do to begin with.
        found = least_memory.plan(graph, replace(limits, budget=None))
    else:
        seconds = None if limits.seconds is None else SHARE**2 * limits.seconds
        found = auto.plan(graph, replace(limits, seconds=seconds))
    left = None
    if limits.seconds is not None:
        left = max(0.0, began + SHARE * limits.seconds - time.monotonic())
    return prove(graph, limits, found, effort=EFFORT, seconds=left)
