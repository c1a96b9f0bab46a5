"""Keep the storages that the user named and nothing else; recompute every other residual once.

What cannot be recomputed is kept besides, and so are residuals made behind the last named one: they
are needed first. With no names everything is recomputed from the inputs. For whoever knows the cuts
of the network; no guarantee of a low peak otherwise. Linear.
"""

from __future__ import annotations

from memsaving_gradients.planners.chains.frontiers import measure_segments
from memsaving_gradients.planners.proposal import Limits, Proposal, propose
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Keep ``limits.keep``."""
    segments = measure_segments(graph, limits.keep)
    behind = max((int(graph.producer[s]) for s in limits.keep), default=graph.first_backward)
    late = segments.residuals[segments.residual_born > behind].tolist()
    fixed = dict.fromkeys(segments.small, "small") | dict.fromkeys(segments.pinned, "pinned")
    return propose(graph, limits, fixed | dict.fromkeys(late, "last segment"))
