"""Keep the storages that the user named; recompute every other residual once.

The plan also keeps small storages, storages that cannot be recomputed, and residuals made behind
the last named one: backward reads those first. With no names, it recomputes the rest from the
inputs. For users who know the cuts of their network; otherwise, the peak may be high. Linear.
"""

from __future__ import annotations

from memsaving_gradients.planners.chains.frontiers import measure_segments
from memsaving_gradients.planners.proposal import Limits, Proposal, propose
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Keep the storages in ``limits.keep``."""
    segments = measure_segments(graph, limits.keep)
    behind = max((int(graph.producer[s]) for s in limits.keep), default=graph.first_backward)
    late = segments.residuals[segments.residual_born > behind].tolist()
    fixed = dict.fromkeys(segments.small, "small") | dict.fromkeys(segments.pinned, "pinned")
    return propose(graph, limits, fixed | dict.fromkeys(late, "last segment"))
