"""Keep the outputs of expensive ops, recompute the outputs of cheap ops.

The plan keeps outputs of convolutions, matrix products, pooling and recurrent kernels. It
recomputes activations, normalizations, dropout masks and casts just before backward reads them.
That costs a few percent of a step's time, and saves about half of a convolutional network's memory.
Recomputing a residual stream begins at its last kept tensor, so the plan keeps a few cheap tensors
as well: the cuts of :mod:`~memsaving_gradients.planners.least_memory`, with all expensive outputs
given. If one cheap op alone reads an expensive output and makes as many bytes, the plan keeps its
output instead. It repeats this along a chain (convolution, bias, activation, addition of a
shortcut): the same bytes, fewer ops to recompute, and fused kernels stay fused.
"""

from __future__ import annotations

from dataclasses import replace

from memsaving_gradients.planners import least_memory
from memsaving_gradients.planners.chains.frontiers import expensive_storages
from memsaving_gradients.planners.proposal import Limits, Proposal
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Keep outputs of expensive forward ops; recompute the rest."""
    expensive = dict.fromkeys(expensive_storages(graph), "expensive to recompute")
    return least_memory.plan(graph, replace(limits, keep={**expensive, **limits.keep}))
