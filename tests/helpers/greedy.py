"""A planner for tests of the code around planners: simple, slow, and true to its budget."""

from __future__ import annotations

from memsaving_gradients.planners import Limits, Proposal
from memsaving_gradients.planners.proposal import propose
from memsaving_gradients.schedules.training_graph import TrainingGraph


def greedy(graph: TrainingGraph, limits: Limits) -> Proposal:
    """Keep every k-th residual, for the k with the least peak; within a budget, for the k with the
    least extra time, plus as many other residuals as fit."""
    residuals = sorted(graph.residuals, key=lambda s: int(graph.producer[s]))
    tried = []
    for k in range(1, 9):
        tell(limits, k / 16)
        tried.append(propose(graph, limits, dict.fromkeys(residuals[::k], "checkpoint")))
    best = min(tried, key=lambda proposal: proposal.peak)
    if limits.budget is None:
        return best
    fits = [proposal for proposal in tried if proposal.peak <= limits.budget]
    if not fits:
        return best
    best = min(fits, key=lambda proposal: proposal.extra_seconds)
    missing = [s for s in residuals if s not in best.reasons]
    for number, storage in enumerate(missing):
        tell(limits, 0.5 + number / len(missing) / 2)
        more = propose(graph, limits, best.reasons | {storage: "checkpoint"})
        if more.peak <= limits.budget and more.extra_seconds <= best.extra_seconds:
            best = more
    return best


def tell(limits: Limits, share: float) -> None:
    if limits.progress is not None:
        limits.progress(share, "keeping")
