"""What a whole step takes, the optimizer's part included, once its graph is complete.

A budget is planned for when gradients are asked for, before the optimizer's ops exist. Most of these run when their gradient is
there, but what needs no gradient runs as soon as the step begins: ``momentum * velocity`` of Keras' SGD, the decay of weights, of
RMSprop's averages. That takes as much memory as the variables concerned, through the forward pass and most of the backward pass.
A rewritten graph cannot prevent it; it is said. (Memory that the optimizer takes while it works on one gradient after
the other is small, and counted here, too.) Costs a capture of the graph, and the plays.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from graph_tools import _tf_autodiff
from graph_tools.capture import capture
from graph_tools.warn import warn
from memsaving_gradients.budgets import safe_bytes
from memsaving_gradients.errors import BudgetWarning
from memsaving_gradients.execution import simulate_execution
from memsaving_gradients.plan import Plan
from memsaving_gradients.units import format_bytes

__all__ = ["check_steps"]


def check_steps(traced: Iterable[tuple[tf.Graph, Plan]]) -> None:
    """Warn of functions that take more, as a whole, than the budgets that their gradients keep."""
    for graph, plan in dict(traced).items():
        ends = _tf_autodiff.ends_of(graph)
        if plan.budget is None or plan.gating == "data" or plan.fingerprint is None or not ends:
            continue
        played, _ = simulate_execution(capture(ends), batch=plan.fingerprint.batch)
        need = safe_bytes(played, plan.gating)
        if need > plan.budget:
            warn(
                f"gradients keep their budget of {plan.budget:,} bytes ({format_bytes(plan.budget)}), but with what the rest of "
                f"the step does, such as the optimizer, it may take {need:,} ({format_bytes(need)}); if that is too much, give a "
                f"budget that is smaller by the difference.",
                BudgetWarning,
            )
