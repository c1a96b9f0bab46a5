"""Recompute nothing: what may not be stored is kept.

The planner behind ``planner="keep"``, for those who want to offload or encode, and to run nothing
twice.
"""

from __future__ import annotations

from memsaving_gradients.planners.proposal import Limits, Proposal, untouched
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Plain training, with sums that are added up as their addends come."""
    return untouched(graph, limits)
