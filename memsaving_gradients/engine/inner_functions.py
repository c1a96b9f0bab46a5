"""Functions with budgets of their own that another function calls several times.

A budget covers the function in which gradients are computed. If another function calls that one for
each microbatch, the calls need nothing of one another, and the executor would run all of them at
once, each within the budget. So they take turns, by control edges between the calls, and their
results are added up as they come (:mod:`~memsaving_gradients.rewriting.added_gradients`). What the
calling function holds besides, such as the sum so far, is in no budget: a warning names the bytes.
Calls that follow one another anyway, such as steps that update variables, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.graph.topology import Edges, ancestors
from graph_tools.memory.whole_function import simulate_function
from graph_tools.tf_private import autodiff, graphs, loops
from graph_tools.warn import warn
from memsaving_gradients.budget import exact_bytes, format_bytes, safe_bytes
from memsaving_gradients.engine import graph_state
from memsaving_gradients.errors import BudgetWarning
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.rewriting.added_gradients import add_one_by_one

__all__ = ["take_turns"]


def take_turns(graph: tf.Graph) -> None:
    """Let calls of functions with budgets run one after the other in a function that was traced to
    its end, and warn if it may take more than their budgets."""
    calls = [op for op in graph.get_operations() if op.type in loops.CALLS]
    found = {op: budgeted for op in calls if (budgeted := _within_budgets(op))}
    for device in dict.fromkeys(op.device for op in found):
        here = {op: budgeted for op, budgeted in found.items() if op.device == device}
        if _one_after_the_other([*here]):
            rewiring = Rewiring()
            add_one_by_one(graph, here, (), autodiff.ends_of(graph), rewiring)
            original_view.remember(graph, rewiring)
            _check(graph, [plan for plans in here.values() for plan in plans], len(here))


def _within_budgets(call: tf.Operation) -> list[Plan]:
    """Return the plans with budgets that a called function follows, outside of XLA."""
    (body,) = loops.bodies(call) or [None]
    plans = () if body is None else graph_state.plans(body)
    return [plan for plan in plans if plan.budget is not None and plan.gating != "data"]


def _one_after_the_other(calls: Sequence[tf.Operation]) -> bool:
    """Let each call wait for the one before, and return whether any did not wait for it yet."""
    changed, edges = False, Edges()
    for before, call in pairwise(calls):
        if before not in ancestors([call], edges):
            graphs.add_control_inputs(call, [before])
            changed = True
    return changed


def _check(graph: tf.Graph, plans: Sequence[Plan], calls: int) -> None:
    """Warn if a function with that many calls may take more than the largest budget of ``plans``,
    which their functions follow."""
    largest = max(plans, key=lambda plan: plan.budget or 0)
    budget = largest.budget or 0
    try:
        _, run = simulate_function(graph, largest.assumed_batch or 1)
    except GraphError:
        return
    need = safe_bytes(run, largest.gating)
    if need > budget and not graph_state.warned(graph, "inner functions"):
        warn(
            f"a budget of {exact_bytes(budget)} holds inside of a function that is called {calls}"
            f" times, but the function that calls it may take {need:,} ({format_bytes(need)}) with"
            " the results. Compute the gradients in the outermost tf.function, so that the budget"
            " covers the whole step.",
            BudgetWarning,
        )
