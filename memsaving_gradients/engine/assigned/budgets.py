"""Trials of plans, until XLA assigns no more bytes to a step than its budget.

The budget is a share of the bytes that XLA assigns to plain training. The first plan gets the same
share of plain training's simulated bytes; later shares follow from the bytes that XLA assigned. The
last plan needs least memory. XLA compiles once for plain training, and once for most plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.tf_private import autodiff
from graph_tools.tf_private.compiled import reads_new_variables
from graph_tools.warn import warn
from memsaving_gradients.budget import Goal, too_small
from memsaving_gradients.engine.assigned.shares import next_share
from memsaving_gradients.engine.assigned.trials import PLAIN, Trial, Trials
from memsaving_gradients.engine.call import Call
from memsaving_gradients.engine.driver.attempts import STEP_ROUNDS
from memsaving_gradients.engine.feedback.notices import note_ample
from memsaving_gradients.engine.planning.outcome import captured
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetError, BudgetWarning
from memsaving_gradients.planners.meter import EXECUTOR_ADDS

__all__ = ["can_be_assigned", "plan_assigned"]


def can_be_assigned(call: Call) -> bool:
    """Return whether a call has a budget that can be kept in XLA's bytes after the trace.

    XLA has to compile the function by itself, with known shapes unless the budget is a fraction.
    Calls that replicas reduce, or whose attention is in blocks already, are left out.
    """
    limit = call.options.limit
    if limit is None or not call.xla or not autodiff.is_compiled_alone(call.graph):
        return False
    if call.home is not None or call.reduced or (call.attention and call.attention.names):
        return False
    known = call.options.batch_size is not None or all(
        t.shape.is_fully_defined() for t in call.graph.inputs if t.dtype != tf.resource
    )
    return known or isinstance(limit, float)


def plan_assigned(graph: tf.Graph, sites: Sequence[Site]) -> None:
    """Plan the gradients of a function that was just traced to its end.

    Raises
    ------
    BudgetError
        If no plan keeps the budget in XLA's bytes; the error names the least that one keeps.
    """
    # Calls that cannot be rewritten stay plain, with a warning.
    sites = [site for site in sites if captured(site) is not None]
    # TensorFlow initializes new variables, and then traces the function once more.
    if not sites or reads_new_variables(graph):
        return
    with autodiff.compiling(graph):
        trials = Trials(graph, sites)
        try:
            plain = trials.compiled().assignment.transient
        except GraphError as error:
            limit = sites[0].options.asked_budget
            warn(
                f"{limit[0]}={limit[1]!r} counts simulated bytes, not those that XLA assigns, which"
                f" may be more: {error}.",
                BudgetWarning,
            )
            for driver in trials.as_asked().drivers:
                driver.settle()
            return
        goal = _goal(trials, plain)
        trial = _kept(trials, goal)
    figures = (plain, trial.assigned)
    for driver in trial.drivers:
        driver.settle(budget=goal.budget, chunks=figures, assigned=True)


def _goal(trials: Trials, plain: int) -> Goal:
    """Return the budget in bytes that XLA assigns; of several calls, the smallest budget."""
    goals = []
    for site in trials.sites:
        limit = site.options.limit
        assert limit is not None
        target = max(1, int(limit * plain)) if isinstance(limit, float) else limit
        goals.append(Goal(target, plain, plain, site.options.budget))
    return min(goals, key=lambda goal: goal.budget)


def _kept(trials: Trials, goal: Goal) -> Trial:
    """Follow plans with which XLA assigns no more bytes than a budget."""
    plain, target = goal.base, goal.budget
    if target >= plain:
        note_ample(trials.graph, goal)
        return trials.within(PLAIN)
    share, broke, floor = target / plain, PLAIN, 0.0
    for attempt in range(STEP_ROUNDS - 1):
        if share <= floor:
            break
        try:
            trial = trials.within(share)
        except BudgetError as error:
            # No plan is that small. One between the least and the last plan may fit, and take less
            # time than the plan of least memory.
            floor = error.least / max(trials.simulated, 1)
            share = (floor + broke) / 2 if broke < PLAIN else floor
            continue
        if trial.assigned <= target or trial.is_plain:
            return trial
        broke = min(share, trial.simulated / max(trials.simulated, 1))
        trials.take_back(trial)
        # A plan for exactly the budget breaks it as often as not.
        share = next_share(plain, broke, trial.assigned, target) * (1 - EXECUTOR_ADDS) ** (
            attempt + 1
        )
    trial = trials.least()
    if trial.assigned <= target:
        return trial
    trials.take_back(trial)
    raise too_small(goal, min(trial.assigned, plain))
