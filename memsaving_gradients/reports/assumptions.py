"""Phrases for the numbers that figures assume where neither the graph nor the user gave them."""

from __future__ import annotations

from memsaving_gradients.reports.explanation_values import ExplanationValues
from memsaving_gradients.reports.plan_values import PlanValues

__all__ = ["assumed"]


def assumed(found: PlanValues | ExplanationValues) -> list[str]:
    """Return a phrase for each number that was assumed, with the argument that sets it."""
    said = []
    if found.assumed_batch is not None:
        said.append(f"for a batch of {found.assumed_batch}, assumed: give batch_size=")
    if found.assumed_steps is not None:
        said.append(f"for loops of {found.assumed_steps} steps, assumed: give loop_steps=")
    if found.assumed_rows is not None:
        said.append(f"for {found.assumed_rows:,} rows, the most that the run may choose")
    return said
