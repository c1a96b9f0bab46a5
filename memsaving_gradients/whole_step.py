"""What a whole step takes, beside the gradients that a budget was planned for.

**Several calls for gradients** in one step are planned each by itself; when one is done, the step is played with the
gradients of the calls before it.

**The optimizer**: a budget is planned for before the optimizer's ops exist. Most of these run when their gradient is
there, but what needs no gradient runs as soon as the step begins: ``momentum * velocity`` of Keras' SGD, the decay of weights, of
RMSprop's averages. That takes as much memory as the variables concerned, through the forward pass and most of the backward pass.
So a function is played as a whole when its graph is complete.

A rewritten graph can prevent neither; it is said. Costs a capture of the graph, and the plays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from graph_tools import _tf_autodiff
from graph_tools.capture import capture
from graph_tools.warn import warn
from memsaving_gradients.budgets import safe_bytes
from memsaving_gradients.errors import BudgetWarning
from memsaving_gradients.execution import simulate_execution
from memsaving_gradients.plan import Plan
from memsaving_gradients.site import Site
from memsaving_gradients.units import exact_bytes, format_bytes

__all__ = ["check_calls", "check_steps"]


def check_calls(site: Site, budget: int, grads: Sequence[tf.Tensor]) -> None:
    """Warn of a step that does not keep a budget that each of its calls for gradients keeps by itself."""
    played = site.play_together(grads)
    need = 0 if played is None else safe_bytes(played, site.gating)
    if need > budget:
        warn(
            f"each call for gradients keeps its budget of {exact_bytes(budget)} by itself, but with the "
            f"gradients of earlier calls the step may take {need:,} ({format_bytes(need)}); give smaller budgets, or "
            "compute these gradients in steps (traced functions) of their own.",
            BudgetWarning,
        )


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
                f"gradients keep their budget of {exact_bytes(plan.budget)}, but with what the rest of "
                f"the step does, such as the optimizer, it may take {need:,} ({format_bytes(need)}); if that is too much, give a "
                "budget that is smaller by the difference.",
                BudgetWarning,
            )
